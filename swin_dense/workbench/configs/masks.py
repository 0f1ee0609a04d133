"""Look at segmentation masks before mmseg reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine import fileio
from mmengine.config import Config
from mmengine.registry import DATASETS

from swin_dense.utils.addresses import is_address
from swin_dense.workbench.configs.classes import mapped_values
from swin_dense.workbench.configs.images import Images, absent_files, evenly, some
from swin_dense.workbench.configs.own_data import endings_in
from swin_dense.workbench.configs.parts import class_count, dicts

_SAMPLED = 100  # masks of each data set whose pixels are read, evenly spaced
_SUSPECTED = 1000  # masks that are read before all are said to have a single class
_IGNORED = 255
_LABELLING = ('IgnoreMaskValues', 'MapMaskValues', 'LoadAnnotations')


def look_at_masks(config: Config, dataset: Any, every_image: bool = False) -> list[str]:
    """Look at all file names of a data set of mmseg, and at the sizes and values of a sample of its masks.

    The default scope of mmengine must be that of the config. With ``every_image``, every mask is read and every image
    decoded. Return what was looked at, and what is odd but no error.

    Raises:
        ValueError: an image has no mask, a mask differs in size from its image or contains values that are no class,
            only one class occurs beside 255, or files are damaged.
    """
    with DATASETS.switch_scope_and_registry(config.default_scope) as registry:
        kind = registry.get(dataset.type)
    pipeline = dataset.get('pipeline') or []
    labelling = [step for step in pipeline if step.get('type') in _LABELLING]
    if not hasattr(kind, 'get_label_map') or not any(step['type'] == 'LoadAnnotations' for step in labelling):
        return []  # not like mmseg's own data sets, which consist of images and masks
    built = DATASETS.build({**dataset, 'pipeline': labelling, 'lazy_init': True})
    if is_address(built.data_prefix.get('img_path')):
        return []
    samples = built.load_data_list()
    _check_names(built, samples)
    images = Images(pipeline[0], every_image)
    chosen = images.sample(samples) if every_image else evenly(samples, _SAMPLED)
    look = _Look(config, built, images)
    is_mapped = mapped_values(dataset) is not None
    look.at(chosen)
    folder = built.data_prefix['seg_map_path']
    if look.has_one_class and not is_mapped:
        look.at(evenly(samples, _SUSPECTED))
    if look.has_one_class and not is_mapped:
        values = ','.join(map(str, sorted(look.stored)))
        indices = ','.join(map(str, range(look.classes)))
        raise ValueError(
            f'the {len(look.seen)} masks looked at in {folder} have only the values {values}, and 255 is ignored, so '
            'that the model would learn nothing; if 255 is a class, write the config with `swin-dense config ... '
            f'--mask-values {values}`, the values of the classes in their order; if it is not, with --mask-values '
            f'{indices}'
        )
    count = len(look.seen)
    how = f'decoded {count} and their images' if every_image else f'read the values of {count}'
    notes = [f'{folder}: {len(samples)} masks, one for each image; {how}']
    names = built.metainfo.get('classes') or range(look.classes)
    absent = [name for index, name in enumerate(names) if index not in look.found]
    if absent:
        notes.append(f'{folder}: in these masks, {len(absent)} classes do not occur: {some(absent)}')
    return notes


def _check_names(built: Any, samples: Sequence[Any]) -> None:
    if not samples:
        folder = Path(built.data_prefix['img_path'])
        raise ValueError(
            f'no image in {folder} ends in {built.img_suffix!r}, {endings_in(folder)}; use `swin-dense config`, which '
            'detects the endings, or set img_suffix and seg_map_suffix of the data set'
        )
    absent = list(absent_files([sample['img_path'] for sample in samples]))  # a list of names may contain others
    if absent:
        raise ValueError(f'{len(absent)} of {len(samples)} images are missing: {some(absent)}')
    absent = list(absent_files([sample['seg_map_path'] for sample in samples]))
    if absent:
        folder = Path(built.data_prefix['seg_map_path'])
        raise ValueError(
            f'{len(absent)} of {len(samples)} images in {built.data_prefix["img_path"]} have no mask {some(absent)} in '
            f'a folder {endings_in(folder)}; add the masks, or list the names of the other images in a file '
            '(--train-ann, --val-ann)'
        )


class _Look:
    """What was found in masks.

    Attributes:
        classes: number of classes of the model.
        seen: masks that were looked at.
        stored: values in their files.
        found: classes that occur in them.
    """

    def __init__(self, config: Config, built: Any, images: Images) -> None:
        parts = dicts(config.model)
        self._ignored = {_IGNORED, *(part['ignore_index'] for part in parts if 'ignore_index' in part)}
        self._built, self._images = built, images
        self.classes = class_count(config.model)
        self.seen: set[str] = set()
        self.stored: set[int] = set()
        self.found: set[int] = set()

    def at(self, samples: Sequence[Any]) -> None:
        """Read masks, and the sizes of their images."""
        samples = [sample for sample in samples if sample['seg_map_path'] not in self.seen]
        sizes = self._images.sizes([sample['img_path'] for sample in samples])
        wrong: dict[str, set[int]] = {}
        for sample in samples:
            path = sample['seg_map_path']
            self.seen.add(path)
            mask = self._read(path)
            if mask.shape[::-1] != sizes[sample['img_path']]:
                width, height = sizes[sample['img_path']]
                raise ValueError(
                    f'the mask {path} has {mask.shape[1]} x {mask.shape[0]} pixels, but its image {sample["img_path"]} '
                    f'is read as {width} x {height}'
                )
            self.stored.update(_values(mask))
            values = set(_values(self._built.pipeline(dict(sample))['gt_seg_map'])) - self._ignored
            self.found |= values
            if max(values, default=0) >= self.classes:
                wrong[path] = values - set(range(self.classes))
        if wrong:
            path, found = next(iter(wrong.items()))
            ignored = ','.join(map(str, sorted(set.union(*wrong.values()))))
            raise ValueError(
                f'the mask {path} has pixels of the value {min(found)}, but the classes are 0 to {self.classes - 1}; '
                'to ignore values that are no class, write the config with `swin-dense config ... '
                f'--ignore {ignored}`; if the classes have other values than their indices, with --mask-values; '
                'otherwise name all classes with --classes'
            )

    def _read(self, path: str) -> np.ndarray:
        """Return the values that are stored in a mask, before mmseg makes them uint8."""
        import mmcv

        steps = self._built.pipeline.transforms
        backend = next(step.imdecode_backend for step in steps if hasattr(step, 'imdecode_backend'))
        try:
            mask = mmcv.imfrombytes(fileio.get(path), flag='unchanged', backend=backend)
        except Exception as error:  # of any decoder
            raise ValueError(f'the mask {path} cannot be read: {error}') from error
        if mask is None:
            raise ValueError(f'the mask {path} cannot be read')
        mask = mask.squeeze()
        if mask.ndim != 2:
            raise ValueError(
                f'the mask {path} has {mask.shape[2]} channels, but a mask must have one channel of class indices'
            )
        if mask.dtype != np.uint8 and not (mask.min() >= 0 and mask.max() <= 255 and (mask == mask.astype(int)).all()):
            wrong = next(value for value in np.unique(mask) if not 0 <= value <= 255 or value != int(value))
            raise ValueError(
                f'the mask {path} of type {mask.dtype} has pixels of the value {wrong}, but mmseg reads masks as 8 '
                f'bits, as which it would be {np.array(wrong).astype(np.uint8)}; write masks whose values are the '
                f'classes, 0 to {self.classes - 1}, or 255 to be ignored'
            )
        return mask.astype(np.uint8)

    @property
    def has_one_class(self) -> bool:
        """Whether at most one class occurs beside 255, which then is rather a class too."""
        return len(self.found) <= 1 and _IGNORED in self.stored


def _values(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.bincount(mask.ravel())).tolist()
