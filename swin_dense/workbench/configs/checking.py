"""Check configs and data before training or testing, for errors that would otherwise appear late or not at all."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mmengine.config import Config
from mmengine.registry import init_default_scope

from swin_dense.utils.addresses import is_address
from swin_dense.workbench.building import check_packages
from swin_dense.workbench.configs.coco import look_at_coco
from swin_dense.workbench.configs.masks import look_at_masks
from swin_dense.workbench.configs.own_data import missing_data
from swin_dense.workbench.configs.parts import datasets


def check_data(config: Config, splits: Sequence[str], every_image: bool = False) -> list[str]:
    """Look at the data that the splits of a config read: annotations, names, and a sample of headers and masks.

    With ``every_image``, decode every image and mask. Return what was looked at, and what is odd but no error.

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
