"""Resizing tables, positions and image channels, compared with images."""

import pytest
import torch
import torch.nn.functional as F

from swin_dense import SwinBackbone
from swin_dense.checkpoint import CheckpointError, export_state_dict
from swin_dense.checkpoint.resize import adapt_channels, resize_table, window_of_index
from tests.checkpoint.helpers import SMALL, load

TABLE = 'stages.1.blocks.0.attn.w_msa.relative_position_bias_table'


def swin(**options):
    return SwinBackbone(**SMALL, **options)


def bicubic(image, size):
    """Resize an image (H, W, C) channel by channel, and flatten its places."""
    channels = image.permute(2, 0, 1)[:, None]
    return F.interpolate(channels, size, mode='bicubic').flatten(1).T


def resized_table(table, source, target):
    """Resize the table of a window for another as an image of all offsets."""
    of_source, of_target = ((2 * height - 1, 2 * width - 1) for height, width in (source, target))
    return bicubic(table.unflatten(0, of_source), of_target)


@pytest.mark.parametrize(
    ('source', 'target'),
    [
        ((7, 7), (12, 12)),
        ((12, 12), (7, 7)),
        ((7, 7), (4, 9)),
        ((3, 5), (5, 3)),
    ],
)
def test_bicubic_resizes_each_head_as_an_image(source, target):
    offsets = (2 * source[0] - 1) * (2 * source[1] - 1)
    table = torch.randn(offsets, 3, dtype=torch.float64)
    torch.testing.assert_close(resize_table(table, source, target), resized_table(table, source, target))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    table = torch.randn(9, 2).to(dtype)
    resized = resize_table(table, (2, 2), (4, 4))
    assert resized.dtype == dtype
    in_float32 = resize_table(
        table.float(),
        (2, 2),
        (4, 4),
    )
    assert torch.equal(resized, in_float32.to(dtype))


@pytest.mark.parametrize(
    'window',
    [
        (7, 7),
        (3, 5),
        (5, 3),
        (1, 4),
        (1, 1),
    ],
)
def test_the_window_is_inferred_from_an_index_buffer(window):
    height, width = window
    length = (2 * height - 1) * (2 * width - 1)
    rows, columns = torch.cartesian_prod(torch.arange(height), torch.arange(width)).unbind(1)
    down = rows[:, None] - rows + height - 1
    right = columns[:, None] - columns + width - 1
    index = down * (2 * width - 1) + right
    assert window_of_index(index, length) == window
    assert window_of_index(index.flatten(), length) == window
    assert window_of_index(index, 1000) is None


def test_a_non_square_window_must_be_given_or_inferred():
    source, model = swin(window_size=(3, 5)), swin(window_size=7)
    with pytest.raises(CheckpointError, match=r'its window as `window_size`'):
        load(model, source.state_dict())
    report = load(model, source.state_dict(), window_size=(3, 5))
    assert report.resized[TABLE] == 'window 3x5 to 7x7, bicubic'
    expected = resized_table(
        source.state_dict()[TABLE],
        (3, 5),
        (7, 7),
    )
    torch.testing.assert_close(model.state_dict()[TABLE], expected)
    # The index buffers in files of mmdet determine the window, even if both tables have the same length.
    report = load(swin(window_size=(5, 3)), export_state_dict(source, 'mmdet'))
    assert report.resized[TABLE] == 'window 3x5 to 5x3, bicubic'


def test_position_is_resized_from_either_layout():
    source = swin(use_abs_pos_embed=True, pretrain_img_size=32)
    model = swin(use_abs_pos_embed=True, pretrain_img_size=(48, 40))
    positions = source.absolute_pos_embed.detach()[0]
    expected = bicubic(positions.unflatten(0, (8, 8)), (12, 10))
    for state in (source.state_dict(), export_state_dict(source, 'official')):
        model.reset_parameters()
        report = load(model, state)
        assert report.resized == {'absolute_pos_embed': 'grid 8x8 to 12x10, bicubic'}
        torch.testing.assert_close(model.absolute_pos_embed.detach()[0], expected)


def test_a_position_map_of_another_shape_with_as_many_tokens_is_resized():
    source = swin(use_abs_pos_embed=True, pretrain_img_size=(16, 64))
    model = swin(use_abs_pos_embed=True, pretrain_img_size=(64, 16))
    report = load(model, export_state_dict(source, 'official'))
    assert report.resized == {'absolute_pos_embed': 'grid 4x16 to 16x4, bicubic'}


@pytest.mark.parametrize('channels', [1, 6, 9])
def test_a_grey_image_keeps_its_response_to_repeated_channels(channels):
    weight = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    grey = torch.randn(1, 1, 4, 4, dtype=torch.float64)
    response = F.conv2d(grey.expand(-1, 3, -1, -1), weight)
    adapted = adapt_channels(weight, channels)
    found = F.conv2d(grey.expand(-1, channels, -1, -1), adapted)
    torch.testing.assert_close(found, response)


def test_loading_adapts_image_channels_by_repetition():
    source, model = swin(), swin(in_channels=4)
    report = load(model, source.state_dict())
    assert report.resized == {'patch_embed.projection.weight': 'image channels 3 to 4'}
    repeated = source.patch_embed.projection.weight[:, [0, 1, 2, 0]]
    torch.testing.assert_close(model.patch_embed.projection.weight, repeated * 0.75)
