"""Figures show the right values at the right positions; their appearance is not tested."""

import numpy as np
import pytest
import torch
from PIL import Image

from swin_dense import SwinBackbone
from swin_dense.__main__ import main
from swin_dense.analysis.colours import pca_rgb
from swin_dense.analysis.explain import TokenAttention
from swin_dense.analysis.visualize import (
    draw_attention,
    draw_grad_cam,
    draw_pyramid,
    draw_shift_masks,
    draw_windows,
)
from swin_dense.features.pyramid import extract_pyramid
from swin_dense.models import create
from tests.conftest import TINY, photograph, randomize

PHOTOGRAPH = photograph(75, 106)


@pytest.fixture(scope='module')
def backbone():
    return randomize(SwinBackbone(**TINY)).eval()


def test_pca_against_a_singular_value_decomposition():
    level = torch.randn(7, 9, 11) * torch.tensor([5.0, 3.0, 2.0, 1.0, 0.5, 0.2, 0.1])[:, None, None]
    cells = level.reshape(7, -1).T.double().numpy()
    left, values, _ = np.linalg.svd(cells - cells.mean(0), full_matrices=False)
    colours = pca_rgb(level)
    assert colours.shape == (9, 11, 3)
    for index in range(3):
        colour = colours[:, :, index].flatten()
        component = left[:, index] * values[index]
        low, high = np.percentile(component, [1, 99])
        stretched = ((component - low) / (high - low)).clip(0, 1)
        assert min(np.abs(colour - stretched).max(), np.abs(colour - (1 - stretched)).max()) < 1e-9
    assert np.array_equal(colours, pca_rgb(level.clone()))


@pytest.mark.parametrize('shape', [(1, 4, 5), (2, 4, 5), (8, 1, 1), (3, 1, 7)])
def test_pca_of_few_channels_or_cells(shape):
    colours = pca_rgb(torch.randn(shape))
    assert colours.shape == (*shape[1:], 3)
    assert np.isfinite(colours).all()
    assert np.isfinite(pca_rgb(torch.ones(shape))).all()


def test_pyramid_cells_lie_over_their_pixels(backbone):
    figure = draw_pyramid(extract_pyramid(backbone, PHOTOGRAPH), PHOTOGRAPH)
    assert [ax.get_title() for ax in figure.axes] == [
        'image 75 x 106',
        'stride 4: 16 x 19 x 27',
        'stride 8: 32 x 10 x 14',
        'stride 16: 64 x 5 x 7',
        'stride 32: 128 x 3 x 4',
    ]
    for ax, stride in zip(figure.axes, (1, 4, 8, 16, 32), strict=True):
        (shown,) = ax.images
        rows, columns = shown.get_array().shape[:2]
        assert tuple(shown.get_extent()) == (0, columns * stride, rows * stride, 0)
        assert (ax.get_xlim(), ax.get_ylim()) == ((0, 106), (75, 0))
    with pytest.raises(ValueError, match='use the same image for both'):
        draw_pyramid(extract_pyramid(backbone, PHOTOGRAPH), PHOTOGRAPH[:70])


def test_attention_panels():
    weights = torch.zeros(3, 19, 27)
    weights[:, 5, 8] = torch.tensor([0.5, 1.0, 0.0])
    weights[2, 6, 9] = 0.25
    attention = TokenAttention(weights, 1 - weights.sum((1, 2)), (5, 8), 4, (75, 106))
    figure = draw_attention(attention, PHOTOGRAPH, heads=[2])
    assert [ax.get_title() for ax in figure.axes] == [
        'token',
        'mean of 3 heads, 42% on padding',
        'head 2, 75% on padding',
    ]
    heat = figure.axes[2].images[1].get_array()
    assert np.argwhere(heat[:, :, 3] > 0).tolist() == [[6, 9]]
    for ax in figure.axes:
        assert ax.patches[0].get_bbox().bounds == (32, 20, 4, 4)
    with pytest.raises(ValueError, match='every entry of heads'):
        draw_attention(attention, PHOTOGRAPH, heads=[3])


def test_grad_cam_panels():
    cams = {8: torch.rand(10, 14), 32: torch.zeros(3, 4)}
    figure = draw_grad_cam(cams, PHOTOGRAPH)
    assert [ax.get_title() for ax in figure.axes] == ['image', 'stride 8', 'stride 32']
    alpha = figure.axes[1].images[1].get_array()[:, :, 3]
    assert np.unravel_index(alpha.argmax(), alpha.shape) == np.unravel_index(int(cams[8].argmax()), (10, 14))
    assert (figure.axes[2].images[1].get_array()[:, :, 3] == 0).all()


def borders(ax):
    """Return the positions of the drawn lines, (rows, columns) in pixels."""
    rows, columns = set(), set()
    for lines in ax.collections:
        for (x0, y0), (x1, y1) in lines.get_segments():
            (rows if y0 == y1 else columns).add(y0 if y0 == y1 else x0)
            assert (y0 == y1) != (x0 == x1)
    return sorted(rows), sorted(columns)


def test_borders_within_the_only_window_of_a_small_map():
    plain, shifted = draw_windows(PHOTOGRAPH[:20, :24], 4, (7, 7)).axes
    assert borders(plain) == ([], [])
    assert borders(shifted) == ([12], [12])


def test_window_borders_are_where_windows_meet():
    figure = draw_windows(PHOTOGRAPH, 4, (7, 7))  # 19 x 27 cells, padded to 21 x 28
    plain, shifted = figure.axes
    assert borders(plain) == ([28, 56], [28, 56, 84])
    assert borders(shifted) == ([12, 40, 68], [12, 40, 68, 96])
    assert (plain.get_xlim(), plain.get_ylim()) == ((0, 112), (84, 0))
    # The four corners belong to one shifted window and share its colour, which a window in the middle lacks.
    tint = shifted.images[1].get_array()
    corners = [tint[0, 0], tint[0, -1], tint[-1, 0], tint[-1, -1]]
    assert all(np.array_equal(corner, corners[0]) for corner in corners)
    assert not np.array_equal(tint[10, 10], corners[0])
    assert {patch.get_bbox().bounds for patch in plain.patches} == {(108, 0, 4, 84), (0, 76, 108, 8)}


def test_shift_masks_are_true_where_tokens_were_neighbours():
    grid, window = (20, 26), (7, 5)
    figure = draw_shift_masks(grid, window)
    padded = (21, 30)
    starts = {'inside': (0, 0), 'right column': (0, 25), 'bottom row': (14, 0), 'bottom right': (14, 25)}
    assert [ax.get_title() for ax in figure.axes] == [f'window {name}' for name in starts]
    for ax, (top, left) in zip(figure.axes, starts.values(), strict=True):
        mask = ax.images[0].get_array()
        tokens = [(top + row, left + column) for row in range(7) for column in range(5)]
        for one, rolled in enumerate(tokens):
            for other, rolled_too in enumerate(tokens):
                first, second = (
                    tuple((p + s) % side for p, s, side in zip(place, (3, 2), padded, strict=True))
                    for place in (rolled, rolled_too)
                )
                was_near = all(a - b == c - d for a, b, c, d in zip(first, second, rolled, rolled_too, strict=True))
                assert mask[one, other] == was_near


@pytest.mark.parametrize(('grid', 'kinds'), [((5, 5), 1), ((5, 20), 2), ((20, 5), 2), ((20, 20), 4)])
def test_shift_masks_of_small_maps(grid, kinds):
    assert len(draw_shift_masks(grid, (7, 7)).axes) == kinds


def test_shift_masks_of_huge_maps_equal_those_of_small_maps():
    smaller, huge = ([ax.images[0].get_array() for ax in draw_shift_masks(grid, (4, 6)).axes] for grid in (
        (9, 16), (4 * 10**30 + 1, 6 * 10**30 + 4)
    ))  # fmt: skip
    assert all(map(np.array_equal, smaller, huge))
    assert len(smaller) == len(huge) == 4
    with pytest.raises(ValueError, match='window_size must be at most 64'):
        draw_shift_masks((1000, 1000), (1000, 1000))


@pytest.mark.parametrize('suffix', ['png', 'pdf'])
@pytest.mark.parametrize(
    'args',
    [
        ('pyramid', '{image}'),
        ('attention', '{image}', '--stage', '1', '--block', '1', '--pixel', '30', '40', '--heads', '0', '1'),
        ('grad-cam', '{image}', '--stages', '1', '3', '--channel', '5'),
        ('grad-cam', '{image}'),
        ('windows', '{image}', '--stage', '0'),
        ('masks', '--grid', '12', '20'),
    ],
    ids=lambda args: args[0],
)
def test_command_line(backbone, monkeypatch, tmp_path, args, suffix):
    monkeypatch.setitem(create.BACKBONES, 'swin', lambda *args, **options: backbone)
    Image.fromarray(PHOTOGRAPH).save(tmp_path / 'ein Bild.png')
    out = tmp_path / f'picture.{suffix}'
    command = [arg.format(image=tmp_path / 'ein Bild.png') for arg in args]
    assert main(['visualize', *command, '--out', str(out)]) == 0
    assert out.read_bytes().startswith(b'\x89PNG' if suffix == 'png' else b'%PDF')


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (('attention', '{image}', '--block', '9', '--pixel', '0', '0', '--out', 'x.png'), '--block must lie'),
        (('grad-cam', '{image}', '--channel', '999', '--out', 'x.png'), '--channel must lie'),
        (('windows', '{image}', '--out', '/missing/folder/x.png'), 'there is no folder'),
        (('windows', '{image}', '--window-size', '0', '--out', 'x.png'), '--window-size must be at least 1'),
        (('masks', '--grid', '5', '5', '--window-size', '0', '--out', 'x.png'), '--window-size must be at least 1'),
        (('masks', '--grid', '5', '5', '--out', 'x.png', '--dpi', '2'), '--dpi must be at least 10'),
        (('masks', '--grid', '5', '5', '--out', 'x.gif'), '--out must end in .png or .pdf'),
        (('masks', '--grid', '0', '0', '--out', 'x.png'), '--grid must be at least 1'),
    ],
)
def test_command_line_refuses(backbone, monkeypatch, tmp_path, capsys, args, message):
    monkeypatch.setitem(create.BACKBONES, 'swin', lambda *args, **options: backbone)
    monkeypatch.chdir(tmp_path)
    Image.fromarray(PHOTOGRAPH).save(tmp_path / 'image.png')
    assert main(['visualize', *(arg.format(image=tmp_path / 'image.png') for arg in args)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    'args',
    [
        ('attention', 'x.png', '--stage', '9', '--pixel', '0', '0', '--out', 'x.png'),
        ('grad-cam', 'x.png', '--stages', '1', '9', '--out', 'x.png'),
        ('windows', 'x.png', '--stage', '-1', '--out', 'x.png'),
        ('windows', 'x.png', '--stage', '9', '--out', 'x.png'),
    ],
)
def test_wrong_usage(args):
    with pytest.raises(SystemExit) as error:
        main(['visualize', *args])
    assert error.value.code == 2


def test_a_missing_package_is_reported_in_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(PHOTOGRAPH).save('image.png')

    def create_backbone(*args, **options):
        raise ImportError('install huggingface_hub')

    monkeypatch.setitem(create.BACKBONES, 'swin', create_backbone)
    assert main(['visualize', 'pyramid', 'image.png', '--out', 'x.png']) == 2
    assert capsys.readouterr().err.endswith('error: install huggingface_hub\n')
