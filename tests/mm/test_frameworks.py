"""A whole Mask R-CNN and a whole UPerNet, with the framework's own Swin and with SwinDense."""

import copy
import itertools
import sys

import mmcv.ops  # noqa: F401
import pytest
import torch
from mmengine.registry import MODELS, DefaultScope, init_default_scope
from mmengine.runner import Runner
from torch._dynamo.testing import CompileCounter

from swin_dense import SwinDense
from tests.conftest import TINY
from tests.mm.demo import demo_config, with_tiny_swin

PEER, OURS = {'type': 'SwinTransformer'}, {'type': 'SwinDense'}


def build(cfg, backbone):
    config = copy.deepcopy(cfg.model)
    with_tiny_swin(config, drop_path_rate=0.0, **backbone)
    model = MODELS.build(config)
    model.init_weights()
    return model.train().double()


def in_float64(data):
    """Convert a batch: in float32 a rounding error may move a proposal across a threshold, and the losses diverge."""
    data['inputs'] = data['inputs'].double()
    for sample in data['data_samples']:
        if 'gt_instances' in sample:
            sample.gt_instances.bboxes = sample.gt_instances.bboxes.double()
    return data


@pytest.fixture(params=['mmdet', 'mmseg'])
def framework(request):
    with DefaultScope.overwrite_default_scope(None):
        init_default_scope(request.param)
        yield request.param


@pytest.fixture(autouse=True)
def _nms_takes_float64(monkeypatch):
    """Convert the input of mmcv's NMS, which supports only float32 on a CPU."""
    module = sys.modules['mmcv.ops.nms'].ext_module  # mmcv.ops.nms itself is the function
    nms = module.nms
    in_float32 = lambda boxes, scores, **options: nms(boxes.float(), scores.float(), **options)  # noqa: E731
    monkeypatch.setattr(module, 'nms', in_float32)


def step(model, optimizer, batch, seed):
    """Train on a copy of a batch, and return the losses, {name: value}."""
    torch.manual_seed(seed)  # the samplers of proposals draw the same
    data = in_float64(model.data_preprocessor(copy.deepcopy(batch), training=True))
    loss, values = model.parse_losses(model(**data, mode='loss'))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {name: value.item() for name, value in values.items() if 'loss' in name}


def test_losses_of_three_steps_and_predictions_are_the_same(framework, demo_data):
    cfg = demo_config(framework, demo_data)
    theirs = build(cfg, PEER)
    ours = [build(cfg, {**OURS, 'attn_backend': backend}) for backend in ('auto', 'reference')]
    for model in ours:
        model.load_state_dict(theirs.state_dict())
    models = [theirs, *ours]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    cfg.train_dataloader.batch_size = 2
    batches = itertools.cycle(Runner.build_dataloader(cfg.train_dataloader, seed=0))
    for seed in range(3):
        batch = next(batches)
        expected, *found = (step(*pair, batch, seed) for pair in zip(models, optimizers, strict=True))
        for values in found:
            assert values == pytest.approx(expected, rel=1e-5, abs=1e-5), seed

    for batch in Runner.build_dataloader(cfg.test_dataloader, seed=0):
        expected, found = (model.float().eval().test_step(batch) for model in models[:2])  # masks are pasted in float32
        for exact, sample in zip(expected, found, strict=True):
            if framework == 'mmseg':
                agree = exact.pred_sem_seg.data == sample.pred_sem_seg.data
                assert agree.float().mean() > 0.999
            else:
                exact, found = exact.pred_instances, sample.pred_instances
                assert torch.allclose(exact.bboxes, found.bboxes, atol=1e-2)
                assert torch.allclose(exact.scores, found.scores, atol=1e-4)
                assert torch.equal(exact.labels, found.labels)


@pytest.mark.parametrize(
    ('before', 'after'),
    [(PEER, OURS), pytest.param(OURS, PEER, marks=pytest.mark.long)],
    ids=['theirs to ours', 'ours to theirs'],
)
def test_a_training_continues_with_the_other_class(framework, demo_data, before, after):
    """Transfer the weights and the moments of AdamW, which a checkpoint stores in the order of the parameters."""
    cfg = demo_config(framework, demo_data)
    batches = list(itertools.islice(Runner.build_dataloader(cfg.train_dataloader, seed=0), 2)) * 2
    models = [build(cfg, backbone) for backbone in (before, after)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for seed in range(2):
        step(models[0], optimizers[0], batches[seed], seed)
    outcome = models[1].load_state_dict(copy.deepcopy(models[0].state_dict()), strict=False)
    assert all(key.endswith('relative_position_index') for key in (*outcome.missing_keys, *outcome.unexpected_keys))
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for seed in (2, 3):
        expected = step(models[0], optimizers[0], batches[seed], seed)
        found = step(models[1], optimizers[1], batches[seed], seed)
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_the_backbone_alone_can_be_compiled():
    torch._dynamo.reset()  # drop the code that other tests compiled
    counter = CompileCounter()
    backbone = SwinDense(**TINY, compile={'backend': counter}).eval()
    first, *_ = backbone(torch.rand(1, 3, 64, 64))
    assert first.shape == (1, 16, 16, 16)
    assert counter.frame_count == 1
    with pytest.raises(TypeError, match='compile must be True, False or a dict'):
        SwinDense('t', compile='inductor')
