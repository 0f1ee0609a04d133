"""The pictures of examples/pictures.py show the right values."""

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import TINY, needs, photograph, randomize
from tests.examples import load_example

pytestmark = needs('matplotlib')


@pytest.fixture
def pictures():
    return load_example('pictures')


def test_pca_against_a_singular_value_decomposition(pictures):
    level = torch.randn(7, 9, 11) * torch.tensor([5.0, 3.0, 2.0, 1.0, 0.5, 0.2, 0.1])[:, None, None]
    cells = level.reshape(7, -1).T.double().numpy()
    left, values, _ = np.linalg.svd(cells - cells.mean(0), full_matrices=False)
    for index in range(3):
        component = left[:, index] * values[index]
        low, high = np.percentile(component, [1, 99])
        stretched = ((component - low) / (high - low)).clip(0, 1)
        colour = pictures.pca_rgb(level)[:, :, index].flatten()
        assert min(np.abs(colour - stretched).max(), np.abs(colour - (1 - stretched)).max()) < 1e-9


def test_attention_lies_in_the_window_and_sums_to_one(pictures):
    from swin_dense import SwinBackbone

    backbone = randomize(SwinBackbone(**TINY)).eval()
    weights = pictures.token_attention(backbone, photograph(56, 84), 0, 0, (30, 40))
    assert weights.shape[1:] == (14, 21)
    torch.testing.assert_close(weights.sum((1, 2)), torch.ones(len(weights)))
    assert weights[:, 7:14, 7:14].sum((1, 2)).min() > 0.999  # the window of cell (7, 10)


def test_shift_masks_are_true_where_tokens_were_neighbours(pictures):
    masks = pictures.shift_masks(21, 28, 7)
    assert masks['inside'].all()
    row = torch.arange(7) < 4  # of the last row of windows, the first four rows are neighbours
    expected = (row[:, None] == row).repeat_interleave(7, 0).repeat_interleave(7, 1)
    assert torch.equal(masks['bottom row'], expected)


@pytest.mark.parametrize('kind', ['pyramid', 'attention', 'windows', 'masks'])
def test_every_picture_is_drawn(pictures, monkeypatch, tmp_path, kind):
    Image.fromarray(photograph(75, 106)).save(tmp_path / 'a.png')
    arguments = [kind, str(tmp_path / 'a.png'), '--out', str(tmp_path / 'drawn.png')]
    monkeypatch.setattr('sys.argv', ['pictures.py', *arguments])
    pictures.main()
    assert (tmp_path / 'drawn.png').read_bytes().startswith(b'\x89PNG')
