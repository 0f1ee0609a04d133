"""The operators of whole models in ONNX against mmcv and torch, in both runtimes, at sizes that were not recorded."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmcv.ops import nms as mmcv_nms
from mmcv.ops import roi_align as mmcv_roi_align
from torch import nn

from swin_dense.export import formats
from swin_dense.workbench.export.operators import nms, resize, roi_align, translations
from swin_dense.workbench.runtime.sessions import SESSIONS


def boxes_and_scores(img):
    """Return a box (4,) and a score for each pixel of a map (1, 5, H, W), whose values they are."""
    values = img.flatten(2)[0].transpose(0, 1)
    return torch.cat([values[:, :2], values[:, :2] + values[:, 2:4]], 1), values[:, 4]


class Operators(nn.Module):
    def forward(self, img, size):
        boxes, scores = boxes_and_scores(img)
        return [
            nms(boxes, scores, 0.5, 4),
            roi_align(img, boxes, [2, 3], 0.25, 2, True),
            roi_align(img, boxes, [2, 3], 0.25, 0, False),
            resize(img, size, False),
            resize(img, size, True),
        ]


def image(height, width):
    """Return a map of boxes with sides from 1 to 21, and of scores, of which the last is that of a discarded box."""
    generator = torch.Generator().manual_seed(height)
    img = torch.rand(1, 5, height, width, generator=generator)
    img[:, :4] = 1 + 20 * img[:, :4]
    img[:, 4, -1, -1] = -1.0
    return img


@pytest.fixture(scope='module')
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp('operators') / 'x.onnx'
    interface = formats.Interface(
        (image(4, 6), torch.tensor([0, 0])),
        ({2: 'height', 3: 'width'}, {}),
        ('img', 'size'),
        translations=translations,
    )
    formats.write_onnx(Operators(), interface, None, path)
    return path


@pytest.mark.parametrize('each', sorted(SESSIONS))
@pytest.mark.parametrize(
    ('height', 'width', 'size'),
    [
        (7, 5, (5, 23)),
        (3, 9, (16, 1)),
        (2, 2, None),
    ],
)
def test_operators_equal_mmcvs_and_torchs(path, each, height, width, size):
    img = image(height, width)
    feed = {'img': img.numpy()}
    if size is not None:
        feed['size'] = np.array(size)
    kept, *found = SESSIONS[each](path, 1).run(feed)
    boxes, scores = boxes_and_scores(img)
    _, best = mmcv_nms(
        boxes[:-1].contiguous(),
        scores[:-1].contiguous(),
        0.5,
    )
    assert kept.tolist() == best[:4].tolist()
    regions = F.pad(boxes, (1, 0))
    expected = [
        mmcv_roi_align(img, regions, (2, 3), 0.25, 2, 'avg', True),
        mmcv_roi_align(img, regions, (2, 3), 0.25, 0, 'avg', False),
        F.interpolate(img, size or (height, width), mode='bilinear', align_corners=False),
        F.interpolate(img, size or (height, width), mode='bilinear', align_corners=True),
    ]
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
