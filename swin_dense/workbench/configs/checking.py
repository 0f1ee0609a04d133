"""Check configs and data before training or testing, for errors that would otherwise appear late or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from swin_dense.workbench.building import build_on_meta, check_packages
from swin_dense.workbench.configs.own_data import endings_in, missing_data
from swin_dense.workbench.configs.parts import class_count, datasets, dicts, is_pretraining

if TYPE_CHECKING:
    from mmengine.config import Config

_SAMPLED_MASKS = 24  # per data set, evenly spaced; their pixels are read
_LOADING = ('LoadImageFromFile', 'IgnoreMaskValues', 'LoadAnnotations')


def check_data(config: Config, splits: Sequence[str]) -> None:
    """Raise an error for data that cannot be used for training or testing.

    Args:
        config: config of a detector, a segmentor, or any other model that mmengine trains.
        splits: splits that will be read: 'train', 'val', 'test'.

    Raises:
        FileNotFoundError: files or folders do not exist.
        ValueError: for a segmentor, an image has no mask, a mask differs in size from its image, or a mask contains
            values that are no class; for pretraining, there are no images or some are smaller than a crop, or the model
            cannot be built.
        ImportError: the model needs a package that is not installed.
    """
    check_packages(config)
    missing = missing_data(config, splits)
    if missing:
        raise FileNotFoundError(
            f'there is no {", no ".join(missing)}; set the location of the data: with the environment variables '
            'COCO_ROOT and ADE20K_ROOT for unchanged recipes, with the options of `swin-dense config` for your own '
            'data, or in any config with --set train_dataloader.dataset.data_root=DIR, and so on'
        )
    if is_pretraining(config):
        _check_pretraining(config, splits)
    if config.get('default_scope') != 'mmseg':
        return
    for dataset in datasets(config, splits):
        _check_masks(config, dataset)


def _check_pretraining(config: Config, splits: Sequence[str]) -> None:
    from mmengine.dist import get_rank, get_world_size
    from mmengine.registry import DATASETS

    model: Any = build_on_meta(config)
    channels = model.backbone.in_channels
    model.data_preprocessor.undo(torch.zeros(1, channels, 1, 1))  # raises for mean and std of other channels
    for dataset in datasets(config, splits):
        built = DATASETS.build(dataset)
        if built.in_channels != channels:
            raise ValueError(
                f'the images have in_channels={built.in_channels}, the backbone {channels}; set both, and mean and '
                'std: --set model.backbone.in_channels=N train_dataloader.dataset.in_channels=N '
                'val_dataloader.dataset.in_channels=N model.data_preprocessor.mean=[...] '
                'model.data_preprocessor.std=[...]'
            )
        built.check(get_rank(), get_world_size())


def check_batch(config: Config, processes: int) -> None:
    """Raise an error for batches of one image if the model has a batch norm after pooling a map to a single value.

    Args:
        config: config of the training.
        processes: number of processes that train together, each with its own batch.

    Raises:
        ValueError: a batch norm would normalise a single value per channel.
    """
    if (config.get('train_dataloader') or {}).get('batch_size') != 1:
        return
    for name, module in build_on_meta(config).named_modules():
        if isinstance(module, nn.Sequential) and _normalises_one_value(module, processes > 1):
            raise ValueError(
                f'this model cannot be trained with a batch of one image: {name} pools a map to a single value per '
                'channel and normalises it over the batch; set train_dataloader.batch_size=2 or more, or a norm_cfg of '
                "the head that is independent of the batch, such as norm_cfg=dict(type='GN', num_groups=32)"
            )


def _normalises_one_value(module: nn.Sequential, is_synchronized: bool) -> bool:
    """Return whether a batch norm that is not synchronised across processes follows a pooling to 1 x 1."""
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
        return  # not like mmseg's own data sets, which consist of images and masks
    built = DATASETS.build({**dataset, 'pipeline': loading, 'lazy_init': True})
    if '://' in str(built.data_prefix.get('img_path')):
        return
    samples = built.load_data_list()
    if not samples:
        folder = Path(built.data_prefix['img_path'])
        raise ValueError(
            f'no image in {folder} ends in {built.img_suffix!r}, {endings_in(folder)}; use `swin-dense config`, which '
            'detects the endings, or set img_suffix and seg_map_suffix of the data set'
        )
    for sample in samples:
        if not Path(sample['seg_map_path']).exists():
            folder = Path(built.data_prefix['seg_map_path'])
            raise ValueError(
                f'{sample["img_path"]} has no mask {sample["seg_map_path"]} in a folder {endings_in(folder)}'
            )
    loaded = {}
    for index in sorted({round(part) for part in np.linspace(0, len(samples) - 1, _SAMPLED_MASKS)}):
        result = built.pipeline({**samples[index], 'sample_idx': index})
        _check_size(result)
        loaded[result['seg_map_path']] = {int(value) for value in np.unique(result['gt_seg_map'])}
    _check_values(config, loaded)


def _check_size(loaded: dict[str, Any]) -> None:
    mask, path = loaded['gt_seg_map'], loaded['seg_map_path']
    if mask.ndim != 2:
        raise ValueError(
            f'the mask {path} has {mask.shape[2]} channels, but a mask must have one channel of class indices'
        )
    if mask.shape != loaded['ori_shape']:
        sizes = [f'{width} x {height}' for height, width in (mask.shape, loaded['ori_shape'])]
        raise ValueError(f'the mask {path} has {sizes[0]} pixels, but its image {loaded["img_path"]} has {sizes[1]}')


def _check_values(config: Config, loaded: dict[str, set[int]]) -> None:
    classes = class_count(config.model)
    known = {*range(classes), 255, *(part['ignore_index'] for part in dicts(config.model) if 'ignore_index' in part)}
    wrong = {path: sorted(values - known) for path, values in loaded.items() if values - known}
    if not wrong:
        return
    path, values = next(iter(wrong.items()))
    ignored = ','.join(map(str, sorted({value for values in wrong.values() for value in values})))
    raise ValueError(
        f'the mask {path} has pixels of the value {values[0]}, but the classes are 0 to {classes - 1}; to ignore '
        f'values that are no class, write the config with `swin-dense config ... --ignore {ignored}`, otherwise name '
        'all classes with --classes'
    )
