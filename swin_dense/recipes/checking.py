"""What a training or a test would meet late, or never say, found in its config and in its data beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from swin_dense.analysis.flop_counter import build_on_meta, check_packages
from swin_dense.recipes.own_data import endings_in, missing_data
from swin_dense.recipes.parts import class_count, datasets, dicts

if TYPE_CHECKING:
    from mmengine.config import Config

_LOOKED_AT = 24  # masks of a data set whose pixels are read, evenly spread over it
_LOADING = ('LoadImageFromFile', 'IgnoreMaskValues', 'LoadAnnotations')


def check_data(config: Config, splits: Sequence[str]) -> None:
    """Refuse data that cannot be trained on, or tested with.

    Args:
        config: of a detector, a segmentor, or whatever else mmengine trains.
        splits: 'train', 'val' or 'test', those that will be read.

    Raises:
        FileNotFoundError: files or folders are not there.
        ValueError: a segmentor's images have no masks, or these another size, or values that are no class.
        ImportError: the model needs a package that is not installed.
    """
    check_packages(config)
    missing = missing_data(config, splits)
    if missing:
        raise FileNotFoundError(
            f'there is no {", no ".join(missing)}; say where the data lie: in the environment variables COCO_ROOT and '
            'ADE20K_ROOT for the recipes as they are, with the options of `swin-dense config` for your own, and for '
            'any config with --set train_dataloader.dataset.data_root=DIR, and so on'
        )
    if config.get('default_scope') != 'mmseg':
        return
    for dataset in datasets(config, splits):
        _check_masks(config, dataset)


def check_batch(config: Config, processes: int) -> None:
    """Refuse a batch of one image where a batch norm comes after the pooling of a map to a single value.

    Args:
        config: of the training.
        processes: that train together, of which each has a batch of its own.

    Raises:
        ValueError: in training, a channel would be normalised by its one value.
    """
    if (config.get('train_dataloader') or {}).get('batch_size') != 1:
        return
    for name, module in build_on_meta(config).named_modules():
        if isinstance(module, nn.Sequential) and _normalises_one_value(module, processes > 1):
            raise ValueError(
                f'a batch of one image cannot train this model: {name} pools a map to a single value per channel, and '
                'normalises it over the batch; set train_dataloader.batch_size=2 or more, or a norm_cfg of the head '
                "that needs no batch, such as norm_cfg=dict(type='GN', num_groups=32)"
            )


def _normalises_one_value(module: nn.Sequential, is_synchronized: bool) -> bool:
    """Return whether a batch norm of one process comes after a pooling to 1 x 1."""
    pooled = False
    for part in module:
        pooled = pooled or (isinstance(part, nn.AdaptiveAvgPool2d) and part.output_size in (1, (1, 1)))
        norms = [norm for norm in part.modules() if isinstance(norm, _BatchNorm)]
        if pooled and any(not (is_synchronized and isinstance(norm, nn.SyncBatchNorm)) for norm in norms):
            return True
    return False


def _check_masks(config: Config, dataset: Any) -> None:
    from mmengine.registry import DATASETS, init_default_scope

    init_default_scope(config.default_scope)
    with DATASETS.switch_scope_and_registry(config.default_scope) as registry:
        kind = registry.get(dataset.type)
    loading = [step for step in dataset.get('pipeline', ()) if step.get('type') in _LOADING]
    if not hasattr(kind, 'get_label_map') or not any(step['type'] == 'LoadAnnotations' for step in loading):
        return  # not of the form of mmseg's own, an image and a mask
    built = DATASETS.build({**dataset, 'pipeline': loading, 'lazy_init': True})
    if '://' in str(built.data_prefix.get('img_path')):
        return
    samples = built.load_data_list()
    if not samples:
        folder = Path(built.data_prefix['img_path'])
        raise ValueError(
            f'no image in {folder} ends in {built.img_suffix!r}, {endings_in(folder)}; `swin-dense config` finds the '
            'endings, or set img_suffix and seg_map_suffix of the data set'
        )
    for sample in samples:
        if not Path(sample['seg_map_path']).exists():
            folder = Path(built.data_prefix['seg_map_path'])
            raise ValueError(
                f'{sample["img_path"]} has no mask {sample["seg_map_path"]}; its folder is one {endings_in(folder)}'
            )
    loaded = {}
    for index in sorted({round(part) for part in np.linspace(0, len(samples) - 1, _LOOKED_AT)}):
        result = built.pipeline({**samples[index], 'sample_idx': index})
        _check_size(result)
        loaded[result['seg_map_path']] = {int(value) for value in np.unique(result['gt_seg_map'])}
    _check_values(config, loaded)


def _check_size(loaded: dict[str, Any]) -> None:
    mask, path = loaded['gt_seg_map'], loaded['seg_map_path']
    if mask.ndim != 2:
        raise ValueError(
            f'the mask {path} has {mask.shape[2]} channels; a mask has one, whose values are the numbers of classes'
        )
    if mask.shape != loaded['ori_shape']:
        sizes = [f'{width} x {height}' for height, width in (mask.shape, loaded['ori_shape'])]
        raise ValueError(f'the mask {path} is {sizes[0]} pixels large, and its image {loaded["img_path"]} {sizes[1]}')


def _check_values(config: Config, loaded: dict[str, set[int]]) -> None:
    classes = class_count(config.model)
    known = {*range(classes), 255, *(part['ignore_index'] for part in dicts(config.model) if 'ignore_index' in part)}
    wrong = {path: sorted(values - known) for path, values in loaded.items() if values - known}
    if not wrong:
        return
    path, values = next(iter(wrong.items()))
    ignored = ','.join(map(str, sorted({value for values in wrong.values() for value in values})))
    raise ValueError(
        f'the mask {path} has pixels of the value {values[0]}, and the classes are 0 to {classes - 1}; for what is no '
        f'class, write the config with `swin-dense config ... --ignore {ignored}`, else name all classes with --classes'
    )
