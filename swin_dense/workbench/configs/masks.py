"""Look at segmentation masks before mmseg reads them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mmcv
import numpy as np
from mmengine import fileio
from mmengine.registry import DATASETS
from PIL import Image

from swin_dense.utils.addresses import is_address
from swin_dense.utils.checks import first_few
from swin_dense.workbench.configs.experiment import DataSet, Found, dicts, in_its_scope, is_local, mapped_values
from swin_dense.workbench.configs.images import (
    check_images,
    endings_in,
    missing_files,
    other_size,
    reads_files,
    sample_evenly,
)

_SAMPLED = 200  # masks of each data set whose pixels are read, evenly spaced
_IGNORED = 255
_LABELLING = ('IgnoreMaskValues', 'MapMaskValues', 'LoadAnnotations')


@dataclass
class Labels:
    """What a sample of masks contains, as the framework labels their pixels.

    Attributes:
        masks: their number.
        stored: the values in the files.
        classes: the indices of classes that occur.
        ignored: the values in the files of pixels that are ignored; ``share`` of all pixels.
        wrong: by path of a mask, the values that are no class.
    """

    masks: int
    stored: set[int] = field(default_factory=set)
    classes: set[int] = field(default_factory=set)
    ignored: set[int] = field(default_factory=set)
    share: float = 0.0
    wrong: dict[str, set[int]] = field(default_factory=dict)


@in_its_scope
def check_masks(data: DataSet, every_image: bool = False) -> Found:
    """Check all file names of a data set of mmseg, and the sizes and values of a sample of its masks.

    With ``every_image``, every mask is read and every image decoded. The result has notes on the data and on anything
    unusual; ValueError is raised for errors.
    """
    if not data.kind:
        raise ValueError(f'a data set must have a type, a name, got {dict(data.entry)}')
    # Test-time augmentation loads the masks in a step inside of another.
    labelling = [step for step in dicts(data.pipeline) if step.get('type') in _LABELLING]
    loading = next((step for step in labelling if step['type'] == 'LoadAnnotations'), None)
    if loading is None or not hasattr(data.dataset_class, 'get_label_map'):
        return Found([])  # not like mmseg's own data sets, which consist of images and masks
    _check_names(data)
    built = DATASETS.build({**data.entry, 'pipeline': labelling, 'lazy_init': True})
    if is_address(built.data_prefix.get('img_path')):
        return Found([])
    samples = built.load_data_list()
    _check_files(data, built, samples, loading)
    of_image = {sample['img_path']: sample for sample in samples}
    _, images, notes_on_images = check_images(list(of_image), data.loader, _SAMPLED, every_image, of_image)
    mapped = mapped_values(labelling)
    others = {value for step in labelling if step['type'] == 'IgnoreMaskValues' for value in step['values']}
    count = data.experiment.class_count or len(data.classes) or _IGNORED
    looked_at = sample_evenly(samples, _SAMPLED, every_image)  # the masks of these images
    labels = Labels(len(looked_at))
    for sample in looked_at:
        path, image = sample['seg_map_path'], sample['img_path']
        mask = _read_mask(path, loading.get('backend_args'))
        if image in images and images[image].size != mask.shape[::-1]:
            advice = 'a mask must have the size of its image'
            read = f'its image {image} is read'
            raise ValueError(other_size(f'the mask {path} has', mask.shape[::-1], read, images[image], advice))
        classes = _add(labels, mask, built.pipeline(dict(sample))['gt_seg_map'], data)
        unlisted = _values(mask) - {*mapped, *others, _IGNORED} if mapped else classes - {*range(count)}
        if unlisted:
            labels.wrong[path] = unlisted
    folder = built.data_prefix['seg_map_path']
    _check_values(folder, labels, count, mapped)
    notes = [f'{len(samples)} masks, one for each image; read the values of {len(looked_at)}', *notes_on_images]
    notes += _notes_on_labels(data, built, labels, count)
    used_images = len(samples)
    if data.entry.get('indices') is not None:
        built.full_init()
        used_images = len(built)
        notes.append(f'mmseg uses {len(built)} of {len(samples)} images (indices={data.entry.indices})')
    files = frozenset(os.path.realpath(path) for path in of_image)
    return Found([f'{folder}: {note}' for note in notes], used_images, files)


def labels_of_values(entry: Any) -> list[int] | None:
    """Return the label that mmseg gives to each value of a mask, 0 to 255, in a data set; None if it loads no masks.

    The default scope of mmengine must be that of the config.

    Args:
        entry: the config of the data set, whose pipeline loads and maps the masks.
    """
    steps = [step for step in entry.pipeline if step.get('type') in _LABELLING]
    if not steps or steps[-1]['type'] != 'LoadAnnotations':
        return None
    steps[-1] = {**steps[-1], 'backend_args': None}
    dataset = DATASETS.build({**entry, 'pipeline': steps, 'lazy_init': True})
    if not hasattr(dataset, 'label_map'):
        return None  # not like mmseg's own data sets
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, 'values.png')
        Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).save(path)
        sample = {'seg_map_path': path, 'label_map': dataset.label_map, 'seg_fields': []}
        loaded = dataset.pipeline({**sample, 'reduce_zero_label': dataset.reduce_zero_label})
    return loaded['gt_seg_map'].ravel().tolist()


def _check_files(data: DataSet, built: Any, samples: list[Any], loading: Any) -> None:
    """Raise ValueError if images or masks are missing, or if there are none."""
    if samples and 'seg_map_path' not in samples[0]:
        is_augmented = data.pipeline == data.experiment.config.get('tta_pipeline')
        place = 'tta_pipeline in the config' if is_augmented else f'{data.address}.pipeline'
        raise ValueError(
            f'{data.address} has no masks (data_prefix.seg_map_path), but LoadAnnotations of {place} loads them; give '
            'their folder, or remove this step from the config to predict without an evaluation'
        )
    for key in ('img_path', 'seg_map_path'):
        folder = Path(built.data_prefix.get(key) or '')
        if not samples:
            raise ValueError(f'no images found in {folder}, {endings_in(folder)}')
        is_file = reads_files(data.loader) if key == 'img_path' else is_local(loading)
        absent = missing_files([sample[key] for sample in samples]) if is_file else {}
        if absent:
            raise ValueError(
                f'{len(absent)} of {len(samples)} files are missing: {first_few(absent.values())} in {folder}, '
                f'{endings_in(folder)} (img_suffix, seg_map_suffix; ann_file takes a list of names)'
            )


def _add(labels: Labels, mask: np.ndarray, labelled: np.ndarray, data: DataSet) -> set[int]:
    """Add a mask, as it is stored and as the framework labels it, and return the labels that are not ignored."""
    no_class = {part['ignore_index'] for part in dicts(data.experiment.model) if 'ignore_index' in part} | {_IGNORED}
    is_ignored = np.isin(labelled, [*no_class])
    labels.stored |= _values(mask)
    labels.share += is_ignored.mean() / labels.masks
    labels.ignored |= _values(mask[is_ignored])
    classes = _values(labelled) - no_class
    labels.classes |= classes
    return classes


def _check_values(folder: str, labels: Labels, count: int, mapped: Sequence[int] | None) -> None:
    """Raise ValueError for values that are no class, and for masks of one class beside ignored pixels."""
    if labels.wrong:
        path, values = next(iter(labels.wrong.items()))
        others = ','.join(map(str, sorted(set.union(*labels.wrong.values()))))
        known = f'are 0 to {count - 1}' if mapped is None else f'have the values {", ".join(map(str, mapped))}'
        raise ValueError(
            f'the mask {path} has pixels of the value {min(values)}, but the classes {known}; to '
            f'ignore others, write the config with `swin-dense config ... --ignore {others}`; if classes have other '
            'values than their indices, with `--mask-values`; otherwise name all classes, with `--classes`'
        )
    if len(labels.classes) <= 1 and _IGNORED in labels.stored and mapped is None:
        given = ','.join(map(str, sorted(labels.stored)))
        raise ValueError(
            f'the {labels.masks} checked masks in {folder} have only the values {given}, and 255 is ignored, so '
            'that the model would learn nothing; if 255 is a class, write the config with `swin-dense config ... '
            f'--mask-values {given}`; if it is not, with `--mask-values {",".join(map(str, range(count)))}`'
        )


def _notes_on_labels(data: DataSet, built: Any, labels: Labels, count: int) -> list[str]:
    """Return notes on ignored pixels and on classes that do not occur."""
    notes = []
    if labels.ignored:
        zero = ' (reduce_zero_label=True ignores 0)' if built.reduce_zero_label else ''
        given = ', '.join(map(str, sorted(labels.ignored)))
        notes.append(f'{100 * labels.share:.2g} % of their pixels are ignored, those of the values {given}{zero}')
    names = built.metainfo.get('classes') or range(count)
    rest = [name for index, name in enumerate(names) if index not in labels.classes]
    if rest:
        notes.append(f'in these masks, {len(rest)} of {len(names)} classes do not occur: {first_few(rest)}')
    return notes


def _check_names(data: DataSet) -> None:
    """Raise ValueError for fewer names than the model has classes, because mmseg evaluates classes with names only."""
    count = data.experiment.class_count or 0
    if len(data.classes) >= count or not (data.classes or data.is_evaluated):
        return
    named = f', {first_few(data.classes)},' if data.classes else ''
    raise ValueError(
        f'{data.address} has names of {len(data.classes)} classes{named} but the model has {count} classes, and mmseg '
        f'would leave the others out of the mIoU; name all in {data.address}.metainfo.classes, or correct num_classes '
        'of each head'
    )


def _read_mask(path: str, backend_args: Any = None) -> np.ndarray:
    """Return the values that are stored in a mask, before mmseg makes them uint8."""
    try:
        mask = mmcv.imfrombytes(fileio.get(path, backend_args), flag='unchanged', backend='pillow').squeeze()
    except Exception as error:  # of any decoder
        raise ValueError(f'the mask {path} cannot be read: {error}') from error
    # Values beyond 8 bits, and NaN, are not converted: NumPy warns about them.
    are_bytes = mask.min() >= 0 and mask.max() <= 255 and (mask == mask.astype(np.uint8)).all()
    if mask.ndim != 2 or not are_bytes:
        colours = ''
        if mask.ndim == 3 and mask.shape[2] in (3, 4):
            found = np.unique(mask[..., :3].reshape(-1, 3), axis=0)
            shown = first_few([','.join(map(str, colour)) for colour in found.tolist()])
            colours = (
                f', with {len(found)} colours ({shown}), as CVAT writes; docs/own-data.md shows how to convert them'
            )
        raise ValueError(
            f'the mask {path} is an array {mask.shape} of {mask.dtype} from {mask.min()} to {mask.max()}; a mask must '
            f'have one channel of class indices up to 255{colours}'
        )
    return mask.astype(np.uint8)


def _values(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.bincount(mask.ravel())).tolist())
