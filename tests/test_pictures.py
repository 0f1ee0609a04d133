"""The pictures of examples/pictures.py show the right values."""

import numpy as np
import pytest
import torch
from PIL import Image

from swin_dense.ops import reference
from swin_dense.ops.windows import Grid, slots_of_windows
from tests.conftest import needs, photograph, tiny
from tests.examples import load_example

pytestmark = needs('matplotlib')


@pytest.fixture
def pictures():
    return load_example('pictures')


def test_pca_against_a_singular_value_decomposition(pictures):
    level = torch.randn(7, 9, 11) * torch.logspace(1, -1, 7)[:, None, None]
    cells = level.reshape(7, -1).T.double().numpy()
    left, values, _ = np.linalg.svd(cells - cells.mean(0), full_matrices=False)
    components = (left * values)[:, :3]
    low, high = np.percentile(components, [1, 99], axis=0)
    expected = ((components - low) / (high - low)).clip(0, 1)
    found = pictures.pca_rgb(level).reshape(-1, 3)
    same, opposite = (np.abs(found - one).max(0) for one in (expected, 1 - expected))
    assert np.minimum(same, opposite).max() < 1e-9


@pytest.mark.parametrize('shift', [(0, 0), (3, 2)])
def test_places_are_those_of_the_windows(pictures, shift):
    size, window = (11, 17), (7, 5)
    numbers = torch.arange(1, 1 + 11 * 17).view(1, *size, 1)
    tokens_NT, _ = slots_of_windows(Grid(size, window, shift), torch.device('cpu'))
    numbers_NT = reference.partition(numbers, window, tokens_NT).view(tokens_NT.shape)
    assert torch.equal(numbers_NT[pictures.places(size, window, shift)], numbers[0, :, :, 0])


def test_attention_lies_in_the_window_and_sums_to_one(pictures):
    weights = pictures.token_attention(
        tiny(),
        photograph(56, 84),
        0,
        0,
        (30, 40),
    )
    assert weights.shape[1:] == (14, 21)
    torch.testing.assert_close(weights.sum((1, 2)), torch.ones(len(weights)))
    assert weights[:, 7:14, 7:14].sum((1, 2)).min() > 0.999  # the window of cell (7, 10)


def test_shift_masks_are_true_where_tokens_were_neighbours(pictures):
    masks = pictures.shift_masks(7)
    assert masks['inside'].all()
    row = torch.arange(7) < 4  # of the last row of windows, the first four rows are neighbours
    expected = (row[:, None] == row).repeat_interleave(7, 0).repeat_interleave(7, 1)
    assert torch.equal(masks['bottom row'], expected)


@pytest.fixture
def image(tmp_path):
    Image.fromarray(photograph(56, 84)).save(tmp_path / 'a.png')
    return tmp_path / 'a.png'


@pytest.mark.parametrize('kind', ['pyramid', 'attention', 'windows', 'masks'])
def test_every_picture_is_drawn(pictures, monkeypatch, image, kind):
    out = image.with_name('drawn.png')
    monkeypatch.setattr(
        'sys.argv',
        [
            'pictures.py',
            kind,
            str(image),
            '--out',
            str(out),
        ],
    )
    pictures.main()
    assert out.read_bytes().startswith(b'\x89PNG')
