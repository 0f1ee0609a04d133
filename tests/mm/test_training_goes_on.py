"""A training with the framework's own Swin is resumed with SwinDense."""

import mmcv.ops  # noqa: F401
import pytest
import torch
from mmengine.registry import DefaultScope
from mmengine.runner import Runner

from tests.conftest import TINY
from tests.mm.demo import demo_config

ENDING = {'mmdet': 'epoch_1.pth', 'mmseg': 'iter_2.pth'}


def build_runner(framework, data, work_dir, backbone, end, **options):
    """Build a runner of the demo with a tiny backbone; ``end`` is in epochs for mmdet and in iterations for mmseg."""
    cfg = demo_config(framework, data)
    cfg.work_dir = str(work_dir)
    cfg.update(options)
    changes = {'model.backbone': {'_delete_': True, 'type': backbone, 'drop_path_rate': 0.0, **TINY}}
    channels = [16, 32, 64, 128]
    if framework == 'mmdet':
        changes |= {'model.neck.in_channels': channels, 'train_cfg.max_epochs': end, 'train_cfg.val_interval': 99}
    else:
        changes |= {'model.decode_head.in_channels': channels, 'model.auxiliary_head.in_channels': 64}
        changes |= {'train_cfg.max_iters': end, 'train_cfg.val_interval': 99}
    step = {'mmdet': 1, 'mmseg': 2}[framework]
    changes |= {'train_dataloader.batch_size': 2, 'default_hooks.checkpoint.interval': step, 'visualizer': None}
    cfg.merge_from_dict(changes)
    cfg.experiment_name = f'{framework}-{backbone}-{end}'
    return Runner.from_cfg(cfg)


def predictions(runner):
    model = runner.model.eval()
    samples = [
        sample for batch in runner.build_dataloader(runner._test_dataloader) for sample in model.test_step(batch)
    ]
    if hasattr(samples[0], 'seg_logits'):
        return [sample.seg_logits.data for sample in samples]
    return [value for sample in samples for value in (sample.pred_instances.scores, sample.pred_instances.bboxes)]


@pytest.mark.slow
@pytest.mark.parametrize('framework', ['mmseg', pytest.param('mmdet', marks=pytest.mark.long)])
def test_a_run_with_the_frameworks_backbone_is_resumed(framework, demo_data, tmp_path):
    with DefaultScope.overwrite_default_scope(None):
        started = build_runner(
            framework, demo_data, tmp_path / 'theirs', 'SwinTransformer', end={'mmdet': 1}.get(framework, 2)
        )
        started.train()
        saved = tmp_path / 'theirs' / ENDING[framework]
        options = {'load_from': str(saved), 'resume': True}
        resumed = build_runner(
            framework, demo_data, tmp_path / 'ours', 'SwinDense', end={'mmdet': 2}.get(framework, 4), **options
        )
        resumed.load_or_resume()
        expected, found = predictions(started), predictions(resumed)
        assert len(expected) == len(found)
        assert any(tensor.numel() for tensor in expected)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert resumed.iter == started.iter
        resumed.train()
        assert resumed.iter == 2 * started.iter
        assert all(parameter.isfinite().all() for parameter in resumed.model.parameters())
