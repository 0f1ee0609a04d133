"""A training with the framework's own Swin is resumed with SwinDense."""

import mmcv.ops  # noqa: F401
import pytest
import torch
from mmengine.registry import DefaultScope
from mmengine.runner import Runner

from tests.mm.demo import demo_config, with_tiny_swin

ENDING = {'mmdet': 'epoch_1.pth', 'mmseg': 'iter_2.pth'}


def build_runner(framework, data, work_dir, backbone, end, **options):
    """Build a runner of the demo with a tiny backbone; ``end`` is in epochs for mmdet and in iterations for mmseg."""
    cfg = demo_config(framework, data)
    cfg.work_dir = str(work_dir)
    cfg.update(options)
    with_tiny_swin(cfg.model, type=backbone, drop_path_rate=0.0)
    if framework == 'mmdet':
        cfg.train_cfg.max_epochs, cfg.default_hooks.checkpoint.interval = end, 1
    else:
        cfg.train_cfg.max_iters, cfg.default_hooks.checkpoint.interval = end, 2
    cfg.train_cfg.val_interval = 99
    cfg.train_dataloader.batch_size = 2
    cfg.visualizer = None
    cfg.experiment_name = f'{framework}-{backbone}-{end}'
    return Runner.from_cfg(cfg)


def predictions(runner):
    model = runner.model.eval()
    found = []
    for batch in runner.build_dataloader(runner._test_dataloader):
        for sample in model.test_step(batch):
            if hasattr(sample, 'seg_logits'):
                found.append(sample.seg_logits.data)
            else:
                found += [sample.pred_instances.scores, sample.pred_instances.bboxes]
    return found


@pytest.mark.slow
@pytest.mark.parametrize('framework', ['mmseg', pytest.param('mmdet', marks=pytest.mark.long)])
def test_a_run_with_the_frameworks_backbone_is_resumed(framework, demo_data, tmp_path):
    ends = {'mmdet': (1, 2), 'mmseg': (2, 4)}[framework]
    with DefaultScope.overwrite_default_scope(None):
        started = build_runner(framework, demo_data, tmp_path / 'theirs', 'SwinTransformer', ends[0])
        started.train()
        saved = str(tmp_path / 'theirs' / ENDING[framework])
        going_on = {'load_from': saved, 'resume': True}
        resumed = build_runner(
            framework,
            demo_data,
            tmp_path / 'ours',
            'SwinDense',
            ends[1],
            **going_on,
        )
        resumed.load_or_resume()
        expected, found = predictions(started), predictions(resumed)
        assert any(tensor.numel() for tensor in expected)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert resumed.iter == started.iter
        resumed.train()
        assert resumed.iter == 2 * started.iter
        assert all(parameter.isfinite().all() for parameter in resumed.model.parameters())
