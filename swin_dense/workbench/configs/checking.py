"""Check configs and data before training or testing, for errors that would otherwise appear late or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from mmengine.config import Config
from mmengine.dist import get_rank, get_world_size
from mmengine.registry import DATASETS, init_default_scope
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from swin_dense.utils.addresses import is_address
from swin_dense.workbench.building import build_on_meta, check_packages
from swin_dense.workbench.configs.coco import look_at_coco
from swin_dense.workbench.configs.masks import look_at_masks
from swin_dense.workbench.configs.own_data import missing_data
from swin_dense.workbench.configs.parts import datasets, is_pretraining


def check_data(config: Config, splits: Sequence[str], every_image: bool = False) -> list[str]:
    """Look at the data of a config, as far as files of annotations, names, headers and a sample of masks tell.

    Args:
        config: config of a detector, a segmentor, or any other model that mmengine trains.
        splits: splits that will be read: 'train', 'val', 'test'.
        every_image: decode every image, instead of reading the headers of a sample.

    Returns:
        What was looked at, and what is odd but no error.

    Raises:
        FileNotFoundError: files or folders do not exist.
        ValueError: the data cannot be used for training or testing, or would train a wrong model without an error.
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
        return _check_pretraining(config, splits, every_image)
    init_default_scope(config.get('default_scope') or 'mmengine')
    # Validation and test often have the same data.
    different = {(split != 'train', str(dataset)): dataset for split in splits for dataset in datasets(config, [split])}
    notes: list[str] = []
    for (is_evaluated, _), dataset in different.items():
        annotations = os.path.join(dataset.get('data_root') or '', dataset.get('ann_file') or '')
        if dataset.get('type') == 'CocoDataset' and dataset.get('ann_file') and not is_address(annotations):
            notes += look_at_coco(config, dataset, is_evaluated, every_image)
        elif config.get('default_scope') == 'mmseg':
            notes += look_at_masks(config, dataset, every_image)
    return list(dict.fromkeys(notes))


def _check_pretraining(config: Config, splits: Sequence[str], every_image: bool) -> list[str]:
    model: Any = build_on_meta(config)
    channels = model.backbone.in_channels
    model.data_preprocessor.undo(torch.zeros(1, channels, 1, 1))  # raises for mean and std of other channels
    notes = []
    for dataset in datasets(config, splits):
        built = DATASETS.build(dataset)
        if built.in_channels != channels:
            raise ValueError(
                f'the images have in_channels={built.in_channels}, the backbone {channels}; set both, and mean and '
                'std: --set model.backbone.in_channels=N train_dataloader.dataset.in_channels=N '
                'val_dataloader.dataset.in_channels=N model.data_preprocessor.mean=[...] '
                'model.data_preprocessor.std=[...]'
            )
        if getattr(model.teacher, 'folder', None) is not None and built.maps is None:
            raise ValueError(
                f'the teacher is the folder of maps {model.teacher.folder}, but the data sets do not read it; write '
                'the config with `swin-dense config --teacher`, or set maps= of both data sets'
            )
        notes += built.check(get_rank(), get_world_size(), every_image)
    return notes


def check_batch(config: Config) -> None:
    """Raise an error for batches of one image if the model has a batch norm after pooling a map to a single value.

    Each of the processes that train together has its own batch.
    """
    if (config.get('train_dataloader') or {}).get('batch_size') != 1:
        return
    for name, module in build_on_meta(config).named_modules():
        if isinstance(module, nn.Sequential) and _normalises_one_value(module, get_world_size() > 1):
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
