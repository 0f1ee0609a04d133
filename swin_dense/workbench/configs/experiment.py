"""A config as the checks and the options of the commands read it: its framework, its data sets and its classes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from mmengine.config import Config
from mmengine.registry import DATASETS

from swin_dense.utils.addresses import is_address

SPLITS = ('train', 'val', 'test')
# Models whose heads count something else than the classes of the data: any object, or the words of a text.
_OTHER_COUNTS = ('RPN', 'GroundingDINO', 'GLIP')


class Experiment:
    """A config of mmdet or mmseg with its data sets, in the order train, val, test.

    Changes to the entries of a data set change the config. Code that replaces whole entries, as settings do, makes
    another ``Experiment`` afterwards.

    Raises:
        ValueError: the model, a data loader, or the type or the place of a part of them, has the wrong form.
    """

    def __init__(self, config: Config) -> None:
        for key in ('model', *(f'{split}_dataloader' for split in SPLITS)):
            part = config.get(key)
            if not isinstance(part, dict) and (part is not None or key == 'model'):
                raise ValueError(f'{key} must be a dict, got {part!r}')
        unnamed = [part['type'] for part in dicts(list(config.values())) if not isinstance(part.get('type', ''), str)]
        if unnamed:
            raise ValueError(f'the type of each part of a config must be a name or a class, got {unnamed[0]!r}')
        self.config = config
        self.model: Any = config.model
        self.scope: str | None = config.get('default_scope')
        self.is_detector = self.scope == 'mmdet'
        self.class_count = _class_count(self.model)
        self.datasets = [
            DataSet(self, entry, split, address)
            for split in SPLITS
            for address, entry in _reading_files(
                f'{split}_dataloader.dataset', (config.get(f'{split}_dataloader') or {}).get('dataset')
            )
        ]

    def check_scope(self) -> None:
        """Raise ValueError unless the config names mmdet or mmseg as its framework."""
        if self.scope not in ('mmdet', 'mmseg'):
            raise ValueError(f"the config must have default_scope = 'mmdet' or 'mmseg', got {self.scope!r}")

    def of(self, splits: Sequence[str]) -> list[DataSet]:
        """Return the data sets of some splits."""
        return [dataset for dataset in self.datasets if dataset.split in splits]


class DataSet:
    """A data set of a config that reads files, inside the wrappers of other data sets.

    Attributes:
        experiment: the config that it is a part of.
        entry: this part of the config; changes to it change the config.
        split: 'train', 'val' or 'test'; ``is_evaluated`` is whether it is one of the latter two.
        address: the name of the part for `--set`, such as 'train_dataloader.dataset'.
        kind: the name of its class, or ''.
        annotations: the path or address of the file of annotations, or of names of images; '' if there is none.
        pipeline: the transforms of an image.
        loader: the first of them, which loads the image.
        evaluators: the configs of the metrics of its split.

    Raises:
        ValueError: a path, or the dict of folders, has the wrong type.
    """

    def __init__(self, experiment: Experiment, entry: Any, split: str, address: str = 'a data set') -> None:
        for key, kind in (('data_root', str), ('ann_file', str), ('data_prefix', dict)):
            if not isinstance(entry.get(key) or kind(), kind):
                raise ValueError(f'{key} of {address} must be a {kind.__name__}, got {entry[key]!r}')
        for prefix, folder in (entry.get('data_prefix') or {}).items():
            if not isinstance(folder or '', str):
                raise ValueError(f'data_prefix.{prefix} of {address} must be a str, got {folder!r}')
        self.experiment = experiment
        self.entry = entry
        self.split = split
        self.is_evaluated = split != 'train'
        self.address = address
        self.kind: str = entry.get('type') or ''
        self.annotations = self._below_root(entry.ann_file) if entry.get('ann_file') else ''
        self.pipeline: list[Any] = entry.get('pipeline') or []
        self.loader: Any = self.pipeline[0] if self.pipeline else {'type': 'LoadImageFromFile'}
        metrics = experiment.config.get(f'{split}_evaluator')
        self.evaluators = [part for part in dicts(metrics) if 'type' in part]

    def folder(self, prefix: str) -> str:
        """Return the path or address of a folder, such as that of the prefix 'img'."""
        return self._below_root((self.entry.get('data_prefix') or {}).get(prefix) or '')

    @property
    def classes(self) -> tuple[Any, ...]:
        """The names of the classes, or () if neither the config nor the class of the data set has any."""
        own = (self.entry.get('metainfo') or {}).get('classes')
        if own:
            return tuple(own)
        with DATASETS.switch_scope_and_registry(self.experiment.scope) as registry:
            kind = registry.get(self.kind) if self.kind else None
        return tuple(getattr(kind, 'METAINFO', {}).get('classes') or ())

    def missing(self) -> list[str]:
        """Return the files and folders that do not exist; addresses are not checked."""
        folders = dict(self.entry.get('data_prefix') or {})
        # mmdet's instance recipes only name the folder of panoptic masks.
        if self.kind == 'CocoDataset' and not any(step.get('with_seg') for step in self.pipeline):
            folders.pop('seg', None)
        paths = [self._below_root(path) for path in (self.entry.get('ann_file'), *folders.values()) if path]
        return [path for path in paths if not is_address(path) and not os.path.exists(path)]

    def _below_root(self, path: str) -> str:
        return os.path.join(self.entry.get('data_root') or '', path)


def _reading_files(address: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a data set that read files, with their addresses."""
    if isinstance(value, dict) and {'data_root', 'data_prefix', 'ann_file'} & set(value):
        yield address, value
    if isinstance(value, dict):
        items = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, (list, tuple)) else []
    for key, item in items:
        yield from _reading_files(f'{address}.{key}', item)


def _class_count(model: Any) -> int | None:
    """Return the most frequent number of classes in a model, as proposal heads have another than the other heads.

    None if no part of the model has ``num_classes``, or if they are no classes of the data.
    """
    parts = [] if model.get('type') in _OTHER_COUNTS else list(dicts(model))
    counts = Counter(part['num_classes'] for part in parts if isinstance(part.get('num_classes'), int))
    counts.update(part['num_things_classes'] + part['num_stuff_classes'] for part in parts if is_panoptic(part))
    return counts.most_common(1)[0][0] if counts else None


def is_panoptic(part: Any) -> bool:
    """Return whether a part of a model counts things and stuff separately, as mmdet's Mask2Former does."""
    return {'num_things_classes', 'num_stuff_classes'} <= set(part)


def dicts(value: Any) -> Iterator[Any]:
    """Yield every dict in a config, outer dicts first."""
    for part in _containers(value):
        if isinstance(part, dict):
            yield part


def pipelines(value: Any) -> Iterator[list]:
    """Yield every list of transforms that starts with ``LoadImageFromFile``."""
    for part in _containers(value):
        if isinstance(part, list) and part and isinstance(part[0], dict) and part[0].get('type') == 'LoadImageFromFile':
            yield part


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list, tuple)):
        yield value
        items = value.values() if isinstance(value, dict) else value
        for item in list(items):
            yield from _containers(item)
