"""The demo configs with a small data set, and models with a tiny Swin."""

from pathlib import Path
from typing import Any

from mmengine.config import Config, ConfigDict

from tests.conftest import ROOT, TINY


def demo_config(framework: str, data: Path) -> Config:
    """Return the demo config of a framework with the data set in ``data``."""
    name = {'mmdet': 'mask-rcnn_swin-demo_fpn.py', 'mmseg': 'upernet_swin-demo.py'}[framework]
    cfg = Config.fromfile(ROOT / 'configs' / 'demo' / name)
    root = f'{data}/coco/' if framework == 'mmdet' else f'{data}/ADEChallengeData2016'
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        loader.dataset.data_root = root
    if framework == 'mmdet':
        for evaluator in (cfg.val_evaluator, cfg.test_evaluator):
            evaluator.ann_file = f'{root}annotations/instances_val2017.json'
    # mmengine would take the visualizer of that name from an earlier test, which logs to that test's folder.
    cfg.visualizer.pop('name', None)
    return cfg


def with_tiny_swin(model: ConfigDict, **options: Any) -> None:
    """Make the backbone in the config of a model tiny, and give its channels to the parts that take them."""
    model.backbone.update(init_cfg=None, **TINY, **options)
    for name in ('neck', 'panoptic_head', 'decode_head', 'auxiliary_head'):
        part = model.get(name)
        if part is not None:
            of_one = isinstance(part.in_channels, int)  # an auxiliary head takes the third map
            part.in_channels = 64 if of_one else [16, 32, 64, 128][-len(part.in_channels) :]
