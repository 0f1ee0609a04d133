"""SwinFPN of docs/elsewhere.md in torchvision's detectors."""

import pytest
import torch

from swin_dense import SwinBackbone
from tests.conftest import equal_weights, randomize

from .detection import HEIGHT, OPTIONS, WIDTH, scene, train, without_gradient
from .peer import needed
from .test_page import blocks

detection = needed('torchvision.models.detection')
NAMES = {}
exec(blocks('python')[0].partition('\nmask_rcnn = ')[0], NAMES)
SwinFPN = NAMES['SwinFPN']
SIZES = {'min_size': HEIGHT, 'max_size': WIDTH}


def build(kind, **options):
    torch.manual_seed(0)
    backbone = SwinFPN('swin_t', **{**OPTIONS, 'out_channels': 32, **options})
    # Fewer of the samples are objects than of 512, and masks of objects take most of the time.
    extra = {'box_batch_size_per_image': 64} if kind == 'MaskRCNN' else {}
    return getattr(detection, kind)(backbone, 3, **SIZES, **extra)


def targets(kind, with_objects=True):
    image, target = scene()
    if kind != 'MaskRCNN':
        target.pop('masks')
    if kind == 'KeypointRCNN':
        target['keypoints'] = torch.ones(2, 17, 3)
    if not with_objects:
        target = {key: value[:0] for key, value in target.items()}
    return [image], [target]


@pytest.mark.slow
@pytest.mark.parametrize('kind', [pytest.param('MaskRCNN', marks=pytest.mark.long), 'FasterRCNN'])
def test_detectors_learn(kind):
    model = build(kind)
    images, target = targets(kind)
    losses = train(model, lambda: model(images, target), steps=20)
    assert not without_gradient(model)
    assert losses[-1] < losses[0] / 4, losses
    with torch.no_grad():
        (found,) = model.eval()(images)
    assert found['boxes'].shape == (len(found['scores']), 4)
    if kind == 'MaskRCNN':
        assert found['masks'].shape[2:] == (HEIGHT, WIDTH)


@pytest.mark.parametrize('kind', ['MaskRCNN', 'KeypointRCNN'])
def test_images_without_objects_frozen_stages_and_bfloat16(kind):
    model = build(kind, frozen_stages=2)
    with torch.autocast('cpu', torch.bfloat16):
        losses = model(*targets(kind, with_objects=False))
    sum(losses.values()).backward()
    assert all(torch.isfinite(loss) for loss in losses.values())
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert any('stages.1' in name for name in frozen)
    assert not any('stages.2' in name for name in frozen)


def test_levels():
    image = torch.randn(2, 3, 70, 90)
    pyramid = SwinFPN('t', **OPTIONS, out_channels=8)(image)
    assert {name: tuple(level.shape[1:]) for name, level in pyramid.items()} == {
        '0': (8, 18, 23), '1': (8, 9, 12), '2': (8, 5, 6), '3': (8, 3, 3), 'pool': (8, 2, 2)
    }  # fmt: skip


def test_swin_fpn_loads_a_detector_of_mmdet(tmp_path):
    weights = randomize(SwinBackbone('t', **OPTIONS)).state_dict()
    state = {f'backbone.{key}': value for key, value in weights.items()}
    torch.save({'state_dict': {**state, 'neck.lateral_convs.0.conv.weight': torch.zeros(1)}}, tmp_path / 'det.pth')
    backbone = SwinFPN('t', tmp_path / 'det.pth', **OPTIONS)
    assert backbone.training
    assert equal_weights(backbone.body, weights)
    resumed = SwinFPN('t', **OPTIONS)
    resumed.load_state_dict(backbone.state_dict())
    assert torch.equal(resumed.body.norm3.weight, weights['norm3.weight'])
