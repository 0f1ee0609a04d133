"""A recipe written whole, for a user's own data: one file that mmdet's or mmseg's own tools train."""

from __future__ import annotations

import colorsys
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swin_dense import checks

if TYPE_CHECKING:
    from mmengine.config import Config

# Beside what mmengine's Runner takes, what mmdet's and mmseg's tools and inference read from a config.
_READ_BY_TOOLS = {'custom_imports', 'default_scope', 'runner_type', 'test_pipeline', 'tta_model', 'tta_pipeline'}
_SPLITS = ('train', 'val', 'test')
_GOLDEN_RATIO = 0.618034


def check_form(config: Config) -> None:
    """Refuse a config that is not that of a detector of mmdet or a segmentor of mmseg, with names for types.

    Raises:
        ValueError: it is a lazy one, or its scope, model or data are not of the form that these have.
    """
    if any(not isinstance(part.get('type', ''), str) for part in _dicts(list(config.values()))):
        raise ValueError(
            'this is a lazy config, which imports the classes that it names; give one whose types are names in quotes'
        )
    if config.get('default_scope') not in ('mmdet', 'mmseg'):
        raise ValueError(
            f'this config has the default_scope {config.get("default_scope")!r}; it must be one of mmdet or of mmseg'
        )
    for key in ('model', *(f'{split}_dataloader' for split in _SPLITS)):
        part = config.get(key)
        if not isinstance(part, dict) and (part is not None or key == 'model'):
            raise ValueError(f'{key} must be a dict, got {part!r}')
    for dataset in _datasets(config):
        for key, kind in (('data_root', str), ('ann_file', str), ('data_prefix', dict)):
            if not isinstance(dataset.get(key) or kind(), kind):
                raise ValueError(f'{key} of a data set must be a {kind.__name__}, got {dataset[key]!r}')


def own_data(config: Config, data_root: str | None, classes: Sequence[str] | None) -> None:
    """Point a recipe at a user's own data, in the layout that the recipe has.

    Args:
        config: changed in place.
        data_root: folder that takes the place of COCO's or ADE20K's, None to keep it.
        classes: names that take the place of COCO's or ADE20K's, None to keep them. For segmentation, the value of a
            pixel in a mask is the index of its class in this list, and 255 is ignored.

    Raises:
        ValueError: the names are not distinct, or too few, or the config is of a kind that cannot be changed here.
    """
    check_form(config)
    is_detector = config.default_scope == 'mmdet'
    entries = list(config.values())
    if data_root is not None:
        old = _data_root(config)
        new = data_root.rstrip('/') + '/' * old.endswith('/')
        _replace(entries, lambda text: new + text.removeprefix(old) if text.startswith(old) else text)
    if classes is not None:
        classes = _checked(classes, is_detector)
        old_count = _class_count(config.model)
        for part in _dicts(config.model):
            if part.get('num_classes') == old_count:
                part['num_classes'] = len(classes)
        metainfo = {'classes': classes, 'palette': _palette(len(classes))}
        for dataset in _datasets(config):
            dataset['metainfo'] = metainfo
            if not is_detector:
                _use_plain_masks(dataset)
        for part in [] if is_detector else _dicts(entries):
            if part.get('type') == 'LoadAnnotations':
                part['reduce_zero_label'] = False


def check_classes(config: Config) -> None:
    """Compare the classes with those of the annotations, where these are there to look at.

    mmdet trains without a single box, and says nothing, where no annotation has the classes.

    Raises:
        ValueError: they differ.
    """
    for dataset in _datasets(config):
        annotations = Path(dataset.get('data_root') or '', dataset.get('ann_file', ''))
        if annotations.suffix != '.json' or not annotations.is_file():
            continue
        found = [category['name'] for category in json.loads(annotations.read_text())['categories']]
        classes = dataset.get('metainfo', {}).get('classes')
        given, expected = (classes, _class_count(config.model)) if classes else (found, _class_count(config.model))
        absent = [name for name in given if name not in found]
        if absent or len(given) != expected:
            raise ValueError(
                f'{annotations} has the classes {",".join(found)}, the config '
                f'{",".join(classes) if classes else expected}; give those to train with: --classes A,B,C'
            )


def missing_data(config: Config) -> list[str]:
    """Return the files and folders of a recipe's data that are not there, where their root is."""
    missing = {}
    for dataset in _datasets(config):
        root = Path(dataset.get('data_root') or '')
        for path in [dataset.get('ann_file'), *dataset.get('data_prefix', {}).values()]:
            if path and root.is_dir() and not (root / path).exists():
                missing[str(root / path)] = True
    return list(missing)


def checked_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings, of which each must begin with an entry that something reads.

    Raises:
        ValueError: one does not, and would have no effect.
    """
    for key in settings:
        checks.one_of(f'the first part of {key}', key.partition('.')[0], sorted(_read_entries()))
    return settings


def as_text(config: Config, title: str) -> str:
    """Return the config as a file that stands alone, with what only served to put it together left out.

    Entries that nothing reads, such as ``data_root`` beside the data loaders that repeat it, would be traps to whoever
    edits the file.
    """
    from mmengine.config import Config

    read = _read_entries()
    kept = Config({key: value for key, value in config.items() if key in read})
    lines = [f'# {line}' for line in title.splitlines()]
    return '\n'.join([*lines, '', kept.pretty_text])


def _read_entries() -> set[str]:
    from mmengine.runner import Runner

    return _READ_BY_TOOLS | (set(inspect.signature(Runner.__init__).parameters) - {'self', 'cfg'})


def _dicts(value: Any) -> Iterator[Any]:
    """Yield every dict in a config, outer ones first."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _dicts(item)


def _replace(value: Any, change: Callable[[str], str]) -> None:
    """Change every string that is the value of a dict's key."""
    for part in _dicts(value):
        for key, item in list(part.items()):
            if isinstance(item, str):
                part[key] = change(item)


def _datasets(config: Config) -> list[Any]:
    loaders = (config.get(f'{split}_dataloader') or {} for split in _SPLITS)
    parts = [part for loader in loaders for part in _dicts(loader.get('dataset'))]
    # Those that wrap others have none of these.
    return [part for part in parts if {'data_root', 'data_prefix', 'ann_file'} & set(part)]


def _data_root(config: Config) -> str:
    roots = {str(dataset.get('data_root') or '') for dataset in _datasets(config)}
    if len(roots) != 1 or '' in roots:
        found = ', '.join(repr(root) for root in sorted(roots)) or 'no dataset'
        raise ValueError(
            f'a data root is replaced where all datasets of a config have the same; here is {found}: '
            'set them one by one, as in --set train_dataloader.dataset.data_root=DIR'
        )
    return roots.pop()


def _class_count(model: Any) -> int:
    """Return the number of classes that the heads agree on; a head of proposals has its own."""
    counts = Counter(part['num_classes'] for part in _dicts(model) if isinstance(part.get('num_classes'), int))
    if not counts:
        raise ValueError('no part of the model has num_classes, so own classes cannot be set')
    return counts.most_common(1)[0][0]


def _checked(classes: Sequence[str], is_detector: bool) -> tuple[str, ...]:
    names = tuple(name.strip() for name in classes)
    if not all(names) or len(set(names)) < len(names):
        raise ValueError(f'classes must be distinct names, got {",".join(names)!r}')
    if not is_detector and len(names) < 2:
        raise ValueError(f'a segmentor needs two classes at least, one may be the background; got {names[0]!r}')
    return names


def _palette(count: int) -> list[tuple[int, ...]]:
    """Return colours that lie far from each other, however many."""
    hues = ((index * _GOLDEN_RATIO) % 1 for index in range(count))
    return [tuple(round(255 * part) for part in colorsys.hsv_to_rgb(hue, 0.75, 0.9)) for hue in hues]


def _use_plain_masks(dataset: Any) -> None:
    """Read masks as they are, in place of ADE20K's, where 0 is 'other' and the classes begin at 1."""
    dataset['type'] = 'BaseSegDataset'
    dataset['reduce_zero_label'] = False
    root = Path(dataset['data_root'])
    for key, prefix, usual in (('img_suffix', 'img_path', '.jpg'), ('seg_map_suffix', 'seg_map_path', '.png')):
        folder = root / dataset['data_prefix'][prefix]
        suffixes = Counter(path.suffix for path in folder.glob('*.*')) if folder.is_dir() else Counter()
        dataset[key] = suffixes.most_common(1)[0][0] if suffixes else usual
