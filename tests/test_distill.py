"""examples/distill.py: its loss by hand, and a student that learns."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from swin_dense import SwinBackbone
from tests.conftest import TINY, photograph
from tests.examples import load_example

distill = load_example('distill')
STUDENT = {**TINY, 'drop_path_rate': 0.0}


def batches():
    pixels = torch.from_numpy(photograph(160, 160)).movedim(-1, 0) / 63.75 - 2
    random = np.random.default_rng(0)
    while True:
        corners = random.integers(96, size=(2, 2))
        yield torch.stack([pixels[:, top : top + 64, left : left + 64] for top, left in corners])


def teacher_of(channels):
    return nn.Sequential(nn.Conv2d(3, channels, 16, stride=16), nn.GELU(), nn.Conv2d(channels, channels, 1)).eval()


def test_the_loss_by_hand_and_of_a_perfect_prediction():
    target, predicted = torch.randn(2, 2, 6, 3, 5, dtype=torch.float64)
    found = distill.feature_loss(predicted, target)
    target, predicted = (features.movedim(1, -1).numpy() for features in (target, predicted))
    wanted = (target - target.mean(-1, keepdims=True)) / np.sqrt(target.var(-1, keepdims=True) + 1e-5)
    lengths = np.linalg.norm(wanted, axis=-1) * np.linalg.norm(predicted, axis=-1)
    cosine = ((wanted * predicted).sum(-1) / lengths).mean()
    distance = abs(wanted - predicted)
    smooth = np.where(distance < 1, distance**2 / 2, distance - 0.5).mean()
    assert found.item() == pytest.approx(0.9 * (1 - cosine) + 0.1 * smooth, abs=1e-9)
    # The standardised features of equal cells are the same at every size.
    features = torch.randn(1, 6, 1, 1)
    standardised = (features - features.mean()) / features.std(correction=0)
    assert distill.feature_loss(standardised.expand(1, 6, 2, 2), features.expand(1, 6, 7, 9)) < 1e-4


@pytest.mark.parametrize('levels', [(3,), (0, 2, 3)])
def test_a_student_learns_what_the_loss_reads(levels):
    student, teacher = SwinBackbone(**STUDENT), teacher_of(24)
    before = {name: parameter.clone() for name, parameter in student.named_parameters()}
    losses = distill.distill(
        student,
        teacher,
        batches(),
        steps=30,
        levels=levels,
        lr=2e-3,
    )
    assert len(losses) == 30
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    kept = {name for name, parameter in student.named_parameters() if torch.equal(parameter, before[name])}
    unused = {0, 1, 2, 3} - {*levels}
    assert kept == {f'norm{level}.{leaf}' for level in unused for leaf in ('weight', 'bias')}
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_photographs_are_normalised_crops(tmp_path):
    Image.new('RGB', (70, 50), (255, 0, 128)).save(tmp_path / 'a.png')
    (tmp_path / 'notes.txt').write_text('no image')
    photographs = distill.Photographs(tmp_path, 32)
    assert len(photographs) == 1
    colour = torch.tensor([1, 0, 128 / 255]) - torch.tensor([0.485, 0.456, 0.406])
    colour /= torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(photographs[0], colour[:, None, None].expand(3, 32, 32))
