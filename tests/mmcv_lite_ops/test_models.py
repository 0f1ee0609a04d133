"""Models of the zoos of mmdet and mmsegmentation, with the plain operators and with those of compiled mmcv."""

import contextlib
import logging
import math
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, DefaultScope, init_default_scope
from mmengine.runner import set_random_seed

from swin_dense.workbench.configs.experiment import dicts
from tests.conftest import some
from tests.mm.test_frameworks import in_float64
from tests.mmcv_lite_ops.conftest import PLAIN

pytestmark = pytest.mark.slow

ZOO = [
    'mmdet mask_rcnn/mask-rcnn_r50_fpn_1x_coco',
    'mmdet retinanet/retinanet_r50_fpn_1x_coco',
    'mmdet faster_rcnn/faster-rcnn_r50_fpn_1x_coco',
    'mmdet cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco',
    'mmdet dino/dino-4scale_r50_8xb2-12e_coco',
    'mmdet dcn/faster-rcnn_r50-dconv-c3-c5_fpn_1x_coco',
    'mmdet rtmdet/rtmdet-ins_tiny_8xb32-300e_coco',
    'mmdet dyhead/atss_r50_fpn_dyhead_1x_coco',
    'mmdet ddq/ddq-detr-4scale_r50_8xb2-12e_coco',
    'mmdet vfnet/vfnet_r50-mdconv-c3-c5_fpn_ms-2x_coco',
    'mmdet mask2former/mask2former_r50_8xb2-lsj-50e_coco',
    'mmdet pisa/faster-rcnn_r50_fpn_pisa_1x_coco',
]
FLOAT32_ONLY = [name for name in ZOO if re.search('dino|rtmdet|dyhead|ddq|vfnet|mask2former', name)]
# Compiled mmcv has their operators for GPUs only.
WITHOUT_PEER_ON_A_CPU = [
    'mmdet carafe/mask-rcnn_r50_fpn-carafe_1x_coco',
    'mmdet guided_anchoring/ga-faster-rcnn_r50_fpn_1x_coco',
]
SIZE = 96


@pytest.fixture(autouse=True)
def _nms_takes_float64(monkeypatch):
    """Convert the input of NMS, since compiled mmcv computes NMS in float32 only."""
    for operators in (PLAIN, sys.modules['mmcv.ops.nms'].ext_module):
        in_float32 = lambda boxes, scores, nms=operators.nms, **options: nms(boxes.float(), scores.float(), **options)  # noqa: E731
        monkeypatch.setattr(operators, 'nms', in_float32)


@contextlib.contextmanager
def default_dtype(dtype):
    """Change the type of what models create when they are built and trained."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def build(name):
    """Build a published model with an eighth of the channels in its backbone, 60 queries and random weights."""
    framework, name = name.split()
    folder = Path(import_module(framework).__file__).parent / '.mim/configs'
    config = Config.fromfile(folder / f'{name}.py').model
    make_small(config)
    with DefaultScope.overwrite_default_scope(None):
        init_default_scope(framework)
        set_random_seed(0)
        model = revert_sync_batchnorm(MODELS.build(config))
    logging.disable()  # each initialized parameter
    model.init_weights()
    logging.disable(logging.NOTSET)
    return model


def make_small(config):
    config.backbone.init_cfg = None
    for part in dicts(config):
        if part.get('type') == 'RandomSampler':
            part.num = 32
        if 'score_thr' in part:
            part.score_thr = 0.0  # random weights give low scores
    if 'num_queries' in config:
        config.num_queries = 60
    if config.backbone.type == 'ResNet':
        config.backbone.base_channels = 8
        heads = [
            config.neck[0] if isinstance(config.get('neck'), list) else config.get('neck'),
            config.get('panoptic_head'),
        ]
        for head in heads:
            if head:
                head.in_channels = [width // 8 for width in head.in_channels]


def batch_for(model):
    torch.manual_seed(0)
    shapes, has_masks = [(3, SIZE, SIZE)] * 2, any('mask' in name for name, _ in model.named_modules())
    batch = demo_mm_inputs(
        2,
        shapes,
        num_items=[3, 2],
        num_classes=80,
        with_mask=has_masks,
    )
    for sample in batch['data_samples'] if has_masks else []:
        # Masks of random pixels would often have a mean of exactly one half.
        masks = sample.gt_instances.masks.masks
        for mask, box in zip(masks, sample.gt_instances.bboxes.int().tolist(), strict=True):
            mask[:] = 0
            mask[box[1] : box[3] + 1, box[0] : box[2] + 1] = 1
    return batch


def train_once(model):
    model.train().zero_grad()
    batch = model.data_preprocessor(batch_for(model), training=True)
    if torch.get_default_dtype() == torch.float64:
        batch = in_float64(batch)
    torch.manual_seed(0)  # samplers of proposals and dropout draw the same
    total, losses = model.parse_losses(model(**batch, mode='loss'))
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: float(loss) for name, loss in losses.items()}, {k: v.clone() for k, v in gradients.items()}


def predict(model):
    batch = batch_for(model)
    with torch.no_grad():  # guided anchoring predicts single images
        samples = [
            model.eval().test_step({'inputs': [image], 'data_samples': [sample]})[0]
            for image, sample in zip(batch['inputs'], batch['data_samples'], strict=True)
        ]
    return [
        {name: getattr(value, 'tensor', value) for name, value in sample.pred_instances.items()} for sample in samples
    ]


@pytest.mark.parametrize('name', some(ZOO, every=4))
def test_losses_and_gradients_are_those_of_compiled_mmcv(both, name):
    """In float64, because in float32, rounding errors change which proposals two-stage detectors sample."""
    dtype, tolerance = (torch.float32, 1e-5) if name in FLOAT32_ONLY else (torch.float64, 1e-9)
    with default_dtype(dtype):
        model = build(name)
        (expected, expected_gradients), (losses, gradients) = both(lambda: train_once(model))
    assert losses == pytest.approx(expected, rel=tolerance)
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for parameter, gradient in expected_gradients.items():
        torch.testing.assert_close(
            gradients[parameter],
            gradient,
            rtol=0,
            atol=tolerance * largest,
        )


@pytest.mark.parametrize('name', some(ZOO, every=4))
def test_predictions_are_those_of_compiled_mmcv(both, name):
    model = build(name)
    for compiled, plain in zip(*both(lambda: predict(model)), strict=True):
        assert compiled.keys() == plain.keys()
        assert len(compiled['scores'])
        for key, value in compiled.items():
            if value.is_floating_point():
                torch.testing.assert_close(plain[key], value, rtol=1e-4, atol=1e-4)
            else:
                assert plain[key].shape == value.shape
                assert (plain[key] == value).double().mean() > 0.999


@pytest.mark.parametrize('name', WITHOUT_PEER_ON_A_CPU)
def test_models_train_and_predict_on_a_cpu_that_do_not_with_compiled_mmcv(plain, name):
    model = build(name)
    losses, gradients = train_once(model)
    assert all(map(math.isfinite, losses.values()))
    assert gradients
    assert all(len(prediction['scores']) for prediction in predict(model))
