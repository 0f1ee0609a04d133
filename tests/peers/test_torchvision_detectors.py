"""SwinFPN of docs/elsewhere.md in torchvision's detectors."""

import pytest
import torch

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


@pytest.mark.slow
@pytest.mark.parametrize('kind', [pytest.param('MaskRCNN', marks=pytest.mark.long), 'FasterRCNN'])
def test_detectors_learn(kind):
    model = build(kind)
    image, target = scene()
    if kind != 'MaskRCNN':
        target.pop('masks')
    images = [image]
    losses = train(model, lambda: model(images, [target]), steps=20)
    assert not without_gradient(model)
    assert losses[-1] < losses[0] / 4, losses
    with torch.no_grad():
        (found,) = model.eval()(images)
    assert found['boxes'].shape == (len(found['scores']), 4)
    if kind == 'MaskRCNN':
        assert found['masks'].shape[2:] == (HEIGHT, WIDTH)


def test_levels():
    image = torch.randn(2, 3, 70, 90)
    pyramid = SwinFPN('t', **OPTIONS, out_channels=8)(image)
    assert {name: tuple(level.shape[1:]) for name, level in pyramid.items()} == {
        '0': (8, 18, 23), '1': (8, 9, 12), '2': (8, 5, 6), '3': (8, 3, 3), 'pool': (8, 2, 2)
    }  # fmt: skip
