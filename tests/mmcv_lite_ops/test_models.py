"""Models of the zoos of mmdet and mmsegmentation, with the plain operators and with those of compiled mmcv."""

import copy
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
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

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
    'mmseg psanet/psanet_r50-d8_4xb2-40k_cityscapes-512x1024',
]
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


@pytest.fixture
def model(request):
    """Build a published model with an eighth of the channels in its backbone, 60 queries and random weights."""
    framework, name = request.param.split()
    with DefaultScope.overwrite_default_scope(None):
        init_default_scope(framework)
        folder = Path(import_module(framework).__file__).parent / '.mim/configs'
        config = Config.fromfile(folder / f'{name}.py').model
        make_small(config)
        set_random_seed(0)
        model = revert_sync_batchnorm(MODELS.build(config))
        model.init_weights()
        yield model.double()


def make_small(config):
    config.pop('pretrained', None)
    config.backbone.init_cfg = None
    if 'num_queries' in config:
        config.num_queries = 60
    if 'score_thr' in config.test_cfg.get('rcnn', config.test_cfg):
        config.test_cfg.get('rcnn', config.test_cfg).score_thr = 0.0  # random weights give low scores
    if 'ResNet' in config.backbone.type:
        config.backbone.base_channels = 8
        for part in ('neck', 'decode_head', 'auxiliary_head', 'panoptic_head'):
            widths = config.get(part, {}).get('in_channels', [])
            if widths:
                config[part].in_channels = [width // 8 for width in widths] if isinstance(widths, list) else widths // 8


def batch_for(model):
    torch.manual_seed(0)
    if 'mmdet' in type(model).__module__:
        shapes, has_masks = [(3, SIZE, SIZE)] * 2, type(model).__name__ not in ('RTMDet', 'DINO', 'DDQDETR')
        return demo_mm_inputs(2, shapes, num_items=[3, 2], num_classes=80, with_mask=has_masks)
    samples = [SegDataSample(metainfo={'img_shape': (SIZE, SIZE), 'ori_shape': (SIZE, SIZE)}) for _ in range(2)]
    for sample in samples:
        sample.gt_sem_seg = PixelData(data=torch.randint(19, (1, SIZE, SIZE)))
    return {'inputs': list(torch.randint(255, (2, 3, SIZE, SIZE), dtype=torch.uint8)), 'data_samples': samples}


def train_once(model):
    """Return the losses and the gradients of all parameters."""
    model.train().zero_grad()
    batch = in_float64(model.data_preprocessor(batch_for(model), training=True))
    torch.manual_seed(0)  # samplers of proposals and dropout draw the same
    torch.set_default_dtype(torch.float64)  # of the targets
    try:
        total, losses = model.parse_losses(model(**batch, mode='loss'))
        total.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    gradients = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return {name: float(loss) for name, loss in losses.items()}, gradients


def predict(model):
    """Return the predicted tensors of both images, computed in float32."""
    model = copy.deepcopy(model).float().eval()
    with torch.no_grad():
        samples = model.test_step(batch_for(model))
    parts = [getattr(sample, 'pred_instances' if 'pred_instances' in sample else 'pred_sem_seg') for sample in samples]
    return [{name: getattr(value, 'tensor', value) for name, value in part.items()} for part in parts]


@pytest.mark.parametrize('model', some(ZOO, every=4), indirect=True)
def test_losses_gradients_and_predictions_are_those_of_compiled_mmcv(both, model):
    (expected, expected_gradients), (losses, gradients) = both(lambda: train_once(model))
    assert losses == pytest.approx(expected, rel=1e-9)
    largest = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-9 * largest, msg=name)
    for compiled, plain in zip(*both(lambda: predict(model)), strict=True):
        assert compiled.keys() == plain.keys()
        assert len(next(iter(compiled.values())))
        for name, value in compiled.items():
            assert plain[name].shape == value.shape, name
            if value.is_floating_point():
                torch.testing.assert_close(plain[name], value, rtol=1e-4, atol=1e-4, msg=name)
            else:
                assert (plain[name] == value).double().mean() > 0.999, name


@pytest.mark.parametrize('model', WITHOUT_PEER_ON_A_CPU, indirect=True)
def test_models_train_and_predict_on_a_cpu_that_do_not_with_compiled_mmcv(plain, model):
    losses, gradients = train_once(model)
    assert all(loss == loss for loss in losses.values())
    assert gradients
    assert all(len(prediction['scores']) for prediction in predict(model))
