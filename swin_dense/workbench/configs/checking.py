"""Check configs and data before training or testing, for errors that would otherwise appear late or not at all."""

from __future__ import annotations

from collections.abc import Sequence

from mmengine.registry import init_default_scope

from swin_dense.utils.addresses import is_address
from swin_dense.workbench.building import check_packages
from swin_dense.workbench.configs.coco import look_at_annotations
from swin_dense.workbench.configs.experiment import DataSet, Experiment
from swin_dense.workbench.configs.masks import look_at_masks


def check_data(experiment: Experiment, splits: Sequence[str], every_image: bool = False) -> list[str]:
    """Look at the data that the splits of a config read: annotations, names, and a sample of headers and masks.

    With ``every_image``, decode every image and mask. Return what was looked at, and what is odd but no error.

    Raises:
        FileNotFoundError: files or folders do not exist.
        ValueError: the data cannot be used for training or testing, or would train a wrong model without an error.
    """
    check_packages(experiment.config)
    missing = list(dict.fromkeys(path for dataset in experiment.of(splits) for path in dataset.missing()))
    if missing:
        raise FileNotFoundError(
            f'there is no {", no ".join(missing)}; set the location of the data: with the environment variables '
            'COCO_ROOT and ADE20K_ROOT for unchanged recipes, with the options of `swin-dense config` for your own '
            'data, or in any config with --set train_dataloader.dataset.data_root=DIR, and so on'
        )
    init_default_scope(experiment.scope or 'mmengine')
    # Validation and test often have the same data.
    different: dict[tuple[bool, str], DataSet] = {}
    for dataset in experiment.of(splits):
        different.setdefault((dataset.is_evaluated, str(dataset.entry)), dataset)
    notes: list[str] = []
    for dataset in different.values():
        if dataset.kind == 'CocoDataset' and dataset.annotations and not is_address(dataset.annotations):
            notes += look_at_annotations(dataset, every_image)
        elif experiment.scope == 'mmseg':
            notes += look_at_masks(dataset, every_image)
    return list(dict.fromkeys(notes))
