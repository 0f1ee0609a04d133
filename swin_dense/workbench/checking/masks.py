"""The round trip of masks of pixels: the values stored in a sample, and the labels that the framework makes of them."""

from __future__ import annotations

import copy
import io
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine import fileio
from mmengine.dataset import Compose
from mmengine.registry import DATASETS
from PIL import Image

from swin_dense.utils.addresses import is_address
from swin_dense.utils.checks import first_few
from swin_dense.workbench.checking.found import Found
from swin_dense.workbench.checking.images import check_images, other_size, reads_files, sample_evenly
from swin_dense.workbench.checking.pixel_trip import PixelTrip, notes_on_pixels
from swin_dense.workbench.checking.samples import load_sample, load_samples, loading_steps
from swin_dense.workbench.checking.stated import Source
from swin_dense.workbench.configs.experiment import DataSet, is_local
from swin_dense.workbench.configs.files import endings_in, missing_files
from swin_dense.workbench.configs.quietly import quiet

_SAMPLED = 200  # masks of each data set whose pixels are read, evenly spaced


def check_masks(
    data: DataSet, source: Source | None, every_image: bool = False, trained: Sequence[Found] = ()
) -> Found:
    """Check a data set of mmseg by the round trip of a sample of its masks, and all names of its files.

    With ``every_image``, every mask is read and every image decoded. The masks are compared with those of ``trained``,
    what this function has returned for the data sets of the training. The result has notes on the data and on anything
    unusual; ValueError is raised for errors. The default scope of mmengine must be that of the config.
    """
    steps = loading_steps(data)
    loading = next((step for step in steps if step['type'] == 'LoadAnnotations'), None)
    if source is None or loading is None or not hasattr(source.built, 'label_map'):
        return Found([])  # not like mmseg's own data sets, which consist of images and masks
    _check_names(data)
    if is_address(source.built.data_prefix.get('img_path')):
        return Found([])
    _check_files(source, loading)
    of_image = {sample['img_path']: sample for sample in source.loaded}
    _, images, notes = check_images(list(of_image), data.loader, _SAMPLED, every_image, of_image)
    looked_at = sample_evenly(source.loaded, _SAMPLED, every_image)  # the masks of these images
    with quiet():
        label = Compose([copy.deepcopy(dict(step)) for step in steps])
    trip = PixelTrip(len(looked_at))
    for sample in looked_at:
        path, image = sample['seg_map_path'], sample['img_path']
        stored = _read_mask(path, loading.get('backend_args'))
        if image in images and images[image].size != stored.shape[::-1]:
            advice = 'a mask must have the size of its image'
            read = f'its image {image} is read'
            raise ValueError(other_size(f'the mask {path} has', stored.shape[::-1], read, images[image], advice))
        trip.add(path, stored, load_sample(source, sample, label)['gt_seg_map'])
    notes = [f'{len(source.loaded)} masks, one for each image; read the values of {trip.masks}', *notes]
    notes += notes_on_pixels(trip, source, steps, [found.pixels for found in trained if found.pixels])
    used = len(source.samples)
    if used < len(source.loaded):
        notes.append(f'mmseg uses {used} of {len(source.loaded)} images (indices={data.entry.get("indices")})')
    folder, files = source.built.data_prefix['seg_map_path'], frozenset(map(os.path.realpath, of_image))
    return Found([f'{folder}: {note}' for note in notes], used, files, load_samples(source), trip)


def labels_of_values(entry: Any) -> list[int] | None:
    """Return the label that mmseg gives to each value of a mask, 0 to 255, in a data set; None if it loads no masks.

    The default scope of mmengine must be that of the config.

    Args:
        entry: the config of the data set, whose pipeline loads and maps the masks.
    """
    steps = [
        step for step in entry.pipeline if step.get('type') in ('IgnoreMaskValues', 'MapMaskValues', 'LoadAnnotations')
    ]
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


def _check_files(source: Source, loading: Any) -> None:
    """Raise ValueError if images or masks are missing, or if there are none."""
    data, prefixes = source.data, source.built.data_prefix
    if source.loaded and 'seg_map_path' not in source.loaded[0]:
        is_augmented = data.pipeline == data.experiment.config.get('tta_pipeline')
        place = 'tta_pipeline in the config' if is_augmented else f'{data.address}.pipeline'
        raise ValueError(
            f'{data.address} has no masks (data_prefix.seg_map_path), but LoadAnnotations of {place} loads them; give '
            'their folder, or remove this step from the config to predict without an evaluation'
        )
    for key in ('img_path', 'seg_map_path'):
        folder = Path(prefixes.get(key) or '')
        if not source.loaded:
            raise ValueError(f'no images found in {folder}, {endings_in(folder)}')
        is_file = reads_files(data.loader) if key == 'img_path' else is_local(loading)
        absent = missing_files([sample[key] for sample in source.loaded]) if is_file else {}
        if absent:
            raise ValueError(
                f'{len(absent)} of {len(source.loaded)} files are missing: {first_few(absent.values())} in {folder}, '
                f'{endings_in(folder)} (img_suffix, seg_map_suffix; ann_file takes a list of names)'
            )


def _check_names(data: DataSet) -> None:
    """Raise ValueError for fewer names than the model has classes, because mmseg evaluates classes with names only.

    Also for a head of another number of classes, if one has as many as there are names.
    """
    count, names = data.experiment.class_count or 0, len(data.classes)
    counts = data.experiment.class_counts.values()
    cure = f', or {setting}' if (setting := data.experiment.setting_of_heads(names)) and names else ''
    has_wrong_head = bool(cure) and names in counts
    if not has_wrong_head and (names >= count or not (data.classes or data.is_evaluated)):
        return
    named = f', {first_few(data.classes)},' if data.classes else ''
    found = ' and '.join(map(str, sorted({*counts}))) or count
    raise ValueError(
        f'{data.address} has names of {names} classes{named} but the model has {found} classes, and mmseg would leave '
        f'those without names out of the mIoU; name all in {data.address}.metainfo.classes{cure}'
    )


def _read_mask(path: str, backend_args: Any = None) -> np.ndarray:
    """Return the values that are stored in a mask, before mmseg makes them uint8."""
    try:
        with Image.open(io.BytesIO(fileio.get(path, backend_args))) as image:
            is_lossy, mask = image.format == 'JPEG', np.array(image).squeeze()
    except Exception as error:  # of any decoder
        raise ValueError(f'the mask {path} cannot be read: {error}') from error
    if is_lossy:
        raise ValueError(
            f'the mask {path} is a JPEG file, which stores other values than those that were drawn; write masks anew, '
            'as .png'
        )
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
