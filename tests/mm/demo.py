"""The demo configs with a small data set."""

from pathlib import Path

from mmengine.config import Config

from tests.conftest import ROOT


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
