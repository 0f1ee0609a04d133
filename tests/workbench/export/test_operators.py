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
    """All operators with each of their options."""

    def forward(self, img, size):
        boxes, scores = boxes_and_scores(img)
        pooled = [roi_align(img, boxes, [2, 3], 0.25, ratio, aligned) for ratio, aligned in ((2, True), (0, False))]
        return [nms(boxes, scores, 0.5, 4), *pooled, *(resize(img, size, corners) for corners in (False, True))]


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
    example, free = (image(4, 6), torch.tensor([0, 0])), ({2: 'height', 3: 'width'}, {})
    interface = formats.Interface(example, free, ('img', 'size'), translations=translations)
    formats.write_onnx(Operators(), interface, None, path)
    return path


@pytest.mark.parametrize('each', sorted(SESSIONS))
def test_operators_equal_mmcvs_and_torchs(path, each):
    session = SESSIONS[each](path, 1)
    for height, width, size in ((7, 5, (5, 23)), (3, 9, (16, 1)), (2, 2, None)):
        img = image(height, width)
        more = {} if size is None else {'size': np.array(size)}
        kept, pooled, unaligned, resized, cornered = session.run({'img': img.numpy(), **more})
        boxes, scores = boxes_and_scores(img)
        assert kept.tolist() == mmcv_nms(boxes[:-1].contiguous(), scores[:-1].contiguous(), 0.5)[1][:4].tolist()
        for found, ratio, aligned in ((pooled, 2, True), (unaligned, 0, False)):
            expected = mmcv_roi_align(img, F.pad(boxes, (1, 0)), (2, 3), 0.25, ratio, 'avg', aligned)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
        for found, corners in ((resized, False), (cornered, True)):
            expected = F.interpolate(img, size or (height, width), mode='bilinear', align_corners=corners)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


def test_too_many_weights_for_a_file_are_refused(tmp_path, monkeypatch):
    example = torch.zeros(2, 30)
    monkeypatch.setattr(formats, 'LARGEST_ONNX', 4 * 40 * 31 - 1)
    with pytest.raises(ValueError, match=r'weights of 4,960 bytes .*write a .pt2'):
        formats.write_onnx(nn.Linear(30, 40), formats.Interface((example,), ({},)), None, tmp_path / 'x.onnx')
    assert not list(tmp_path.iterdir())
