"""Look at segmentation masks before mmseg reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mmcv
import numpy as np
from mmengine import fileio
from mmengine.registry import DATASETS

from swin_dense.utils.addresses import is_address
from swin_dense.utils.checks import first_few
from swin_dense.workbench.configs.experiment import DataSet, dicts, is_local, mapped_values
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


def check_masks(data: DataSet, every_image: bool = False) -> list[str]:
    """Check all file names of a data set of mmseg, and the sizes and values of a sample of its masks.

    The default scope of mmengine must be that of the config. With ``every_image``, every mask is read and every image
    decoded. Return what was looked at, and what is odd but no error; raise ValueError for what is one.
    """
    dataset, pipeline = data.entry, data.pipeline
    if not data.kind:
        raise ValueError(f'a data set must have a type, a name, got {dict(dataset)}')
    # Test-time augmentation loads the masks in a step inside of another.
    labelling = [step for step in dicts(pipeline) if step.get('type') in _LABELLING]
    loading = next((step for step in labelling if step['type'] == 'LoadAnnotations'), None)
    if loading is None or not hasattr(data.dataset_class, 'get_label_map'):
        return []  # not like mmseg's own data sets, which consist of images and masks
    _check_names(data)
    built = DATASETS.build({**dataset, 'pipeline': labelling, 'lazy_init': True})
    if is_address(built.data_prefix.get('img_path')):
        return []
    samples = built.load_data_list()
    for key in ('img_path', 'seg_map_path'):
        folder = Path(built.data_prefix[key])
        if not samples:
            raise ValueError(f'no images found in {folder}, {endings_in(folder)}')
        is_file = reads_files(data.loader) if key == 'img_path' else is_local(loading)
        absent = missing_files([sample[key] for sample in samples]) if is_file else {}
        if absent:
            raise ValueError(
                f'{len(absent)} of {len(samples)} files are missing: {first_few(absent.values())} in {folder}, '
                f'{endings_in(folder)} (img_suffix, seg_map_suffix; ann_file takes a list of names)'
            )
    classes = data.experiment.class_count or len(data.classes) or _IGNORED
    ignored = {_IGNORED}
    for part in dicts(data.experiment.model):
        if 'ignore_index' in part:
            ignored.add(part['ignore_index'])
    mapped = mapped_values(labelling)
    no_class = {_IGNORED}
    for step in labelling:
        if step['type'] == 'IgnoreMaskValues':
            no_class |= {*step['values']}
    stored: set[int] = set()
    found: set[int] = set()
    not_used: set[int] = set()
    share = 0.0  # of the pixels that are ignored
    wrong: dict[str, set[int]] = {}
    of_image = {sample['img_path']: sample for sample in samples}
    _, images, notes = check_images(list(of_image), data.loader, _SAMPLED, every_image, of_image)
    looked_at = sample_evenly(samples, _SAMPLED, every_image)  # the masks of these images
    for sample in looked_at:
        path, image = sample['seg_map_path'], sample['img_path']
        mask = _read_mask(path, loading.get('backend_args'))
        if image in images and images[image].size != mask.shape[::-1]:
            advice = 'a mask must have the size of its image'
            read = f'its image {image} is read'
            raise ValueError(other_size(f'the mask {path} has', mask.shape[::-1], read, images[image], advice))
        in_file = _values(mask)
        stored |= in_file
        labels = built.pipeline(dict(sample))['gt_seg_map']
        is_ignored = np.isin(labels, [*ignored])
        share += is_ignored.mean() / len(looked_at)
        not_used |= _values(mask[is_ignored])
        values = _values(labels) - ignored
        found |= values
        unlisted = in_file - {*mapped, *no_class} if mapped else values - set(range(classes))
        if unlisted:
            wrong[path] = unlisted
    if wrong:
        path = next(iter(wrong))
        others = ','.join(map(str, sorted(set.union(*wrong.values()))))
        known = f'are 0 to {classes - 1}' if mapped is None else f'have the values {", ".join(map(str, mapped))}'
        raise ValueError(
            f'the mask {path} has pixels of the value {min(wrong[path])}, but the classes {known}; to '
            f'ignore others, write the config with `swin-dense config ... --ignore {others}`; if classes have other '
            'values than their indices, with `--mask-values`; otherwise name all classes, with `--classes`'
        )
    if len(found) <= 1 and _IGNORED in stored and mapped is None:
        given = ','.join(map(str, sorted(stored)))
        raise ValueError(
            f'the {len(looked_at)} masks looked at in {folder} have only the values {given}, and 255 is ignored, so '
            'that the model would learn nothing; if 255 is a class, write the config with `swin-dense config ... '
            f'--mask-values {given}`; if it is not, with `--mask-values {",".join(map(str, range(classes)))}`'
        )
    names = built.metainfo.get('classes') or range(classes)
    rest = [name for index, name in enumerate(names) if index not in found]
    notes = [f'{len(samples)} masks, one for each image; read the values of {len(looked_at)}', *notes]
    if not_used:
        zero = ' (reduce_zero_label=True ignores 0)' if built.reduce_zero_label else ''
        given = ', '.join(map(str, sorted(not_used)))
        notes.append(f'{100 * share:.2g} % of their pixels are ignored, those of the values {given}{zero}')
    data.reduces_zero = bool(built.reduce_zero_label)
    for other in data.experiment.datasets_of(['train']):
        if other.reduces_zero not in (None, data.reduces_zero):
            notes.append(
                f'reduce_zero_label is {data.reduces_zero} here and {other.reduces_zero} in {other.address}, so that a '
                'value of a mask is another class there'
            )
    if rest:
        notes.append(f'in these masks, {len(rest)} of {len(names)} classes do not occur: {first_few(rest)}')
    data.used_images = len(samples)
    if dataset.get('indices') is not None:
        built.full_init()
        data.used_images = len(built)
        notes.append(f'mmseg uses {len(built)} of {len(samples)} images (indices={dataset.indices})')
    return [f'{folder}: {note}' for note in notes]


def _check_names(data: DataSet) -> None:
    """Raise ValueError for fewer names than the model has classes, as mmseg evaluates the classes with names alone."""
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
