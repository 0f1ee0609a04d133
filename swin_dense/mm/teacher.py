"""The teacher in a config for feature distillation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import DATASETS

from swin_dense.pretraining.teacher_maps import MANIFEST, StoredMaps, store_maps
from swin_dense.pretraining.teacher_sources import licence_of, load_teacher
from swin_dense.utils import checks

_SPLITS = ('train', 'val')


def use_teacher(config: Config, teacher: str) -> list[str]:
    """Set the teacher of a config, and for a folder of maps also the crops of the data sets; return a note.

    The note is about the licence of the teacher.

    Raises:
        ValueError: the config is not for feature distillation, or the folder is damaged.
    """
    _check_config(config, f'{checks.argument("teacher", ...)} is')
    config.model.teacher = teacher
    if (Path(teacher) / MANIFEST).is_file():
        crops = StoredMaps(teacher).crops
        crops.pop('views')
        for split in _SPLITS:
            if config.get(f'{split}_dataloader') is not None:
                config[f'{split}_dataloader'].dataset.update(crops, maps=teacher)
    licence = licence_of(teacher)
    if licence is None:
        return [f'the licence of the teacher {teacher} is not known; read it before you use what learnt from it']
    return [f'the licence of the teacher {teacher}: {licence}']


def write_maps(
    config: Config, folder: str | Path, views: int, batch_size: int, dtype: torch.dtype, device: str | None
) -> tuple[int, Iterator[int]]:
    """Prepare to write the maps of a config's teacher for all images, see :func:`store_maps`.

    Returns:
        The number of crops, and the iterator that writes their maps.
    """
    _check_config(config, 'maps are stored')
    splits = []
    for split in _SPLITS:
        if config.get(f'{split}_dataloader') is not None:
            dataset: Any = config[f'{split}_dataloader'].dataset
            splits.append(DATASETS.build({**dataset, 'maps': None, 'views': views}))
    source = config.model.teacher
    teacher = load_teacher(source)
    if isinstance(teacher, StoredMaps):
        raise ValueError(
            f'the teacher of the config, {source}, is already a folder of maps; give a config with a network'
        )
    if not device:
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    teacher.eval().to(device)
    count = sum(len(images) * len(images.view_numbers) for images in splits)
    options: dict[str, Any] = {'batch_size': batch_size, 'dtype': dtype}
    return count, store_maps(teacher, splits, folder, name=source, licence=licence_of(source), **options)


def _check_config(config: Config, what: str) -> None:
    if config.model.get('type') != 'FeatureDistillationPretrainer':
        raise ValueError(
            f'{what} for recipes of feature distillation only (`swin-dense zoo distill` lists them); the teacher of '
            'SimMIM is model.teacher.init_cfg.checkpoint'
        )
