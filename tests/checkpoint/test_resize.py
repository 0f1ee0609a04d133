"""Resizing tables, positions and image channels, compared with images."""

import pytest
import torch
import torch.nn.functional as F

from swin_dense import SwinBackbone
from swin_dense.checkpoint import CheckpointError, export_state_dict, load_checkpoint
from swin_dense.checkpoint.resize import adapt_channels, resize_table, window_of_index

ARCH = {'embed_dims': 8, 'depths': (1, 1), 'num_heads': (2, 4)}
TABLE = 'stages.1.blocks.0.attn.w_msa.relative_position_bias_table'


def bicubic(image, size):
    """Resize (H, W, C) channel by channel."""
    channels = [F.interpolate(channel[None, None], size, mode='bicubic')[0, 0] for channel in image.unbind(2)]
    return torch.stack(channels, 2)


@pytest.mark.parametrize(
    ('source', 'target'), [((7, 7), (12, 12)), ((12, 12), (7, 7)), ((7, 7), (4, 9)), ((3, 5), (5, 3))]
)
def test_bicubic_resizes_each_head_as_an_image(source, target):
    table = torch.randn((2 * source[0] - 1) * (2 * source[1] - 1), 3, dtype=torch.float64)
    image = table.reshape(2 * source[0] - 1, 2 * source[1] - 1, 3)
    expected = bicubic(image, (2 * target[0] - 1, 2 * target[1] - 1)).reshape(-1, 3)
    torch.testing.assert_close(resize_table(table, source, target), expected)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    table = torch.randn(9, 2).to(dtype)
    resized = resize_table(table, (2, 2), (4, 4))
    assert resized.dtype == dtype
    assert torch.equal(resized, resize_table(table.float(), (2, 2), (4, 4)).to(dtype))


@pytest.mark.parametrize('window', [(7, 7), (3, 5), (5, 3), (1, 4), (1, 1)])
def test_the_window_is_inferred_from_an_index_buffer(window):
    height, width = window
    tokens = [(row, column) for row in range(height) for column in range(width)]
    index = torch.tensor(
        [[(q[0] - k[0] + height - 1) * (2 * width - 1) + q[1] - k[1] + width - 1 for k in tokens] for q in tokens]
    )
    assert window_of_index(index, (2 * height - 1) * (2 * width - 1)) == window
    assert window_of_index(index.flatten(), (2 * height - 1) * (2 * width - 1)) == window
    assert window_of_index(index, 1000) is None


def test_loading_resizes_to_any_window_and_reports_it():
    source, model = SwinBackbone(**ARCH, window_size=7), SwinBackbone(**ARCH, window_size=(4, 9))
    report = load_checkpoint(model, source.state_dict(), log=None)
    assert report.resized[TABLE] == 'window 7x7 to 4x9, bicubic'
    expected = bicubic(source.state_dict()[TABLE].reshape(13, 13, 4), (7, 17)).reshape(-1, 4)
    torch.testing.assert_close(model.state_dict()[TABLE], expected)


def test_a_non_square_window_must_be_given_or_inferred():
    source, model = SwinBackbone(**ARCH, window_size=(3, 5)), SwinBackbone(**ARCH, window_size=7)
    with pytest.raises(CheckpointError, match=r'its window as `window_size`'):
        load_checkpoint(model, source.state_dict())
    load_checkpoint(model, source.state_dict(), window_size=(3, 5), log=None)
    expected = bicubic(source.state_dict()[TABLE].reshape(5, 9, 4), (13, 13)).reshape(-1, 4)
    torch.testing.assert_close(model.state_dict()[TABLE], expected)
    # The index buffers in files of mmdet determine the window, even if both tables have the same length.
    turned = SwinBackbone(**ARCH, window_size=(5, 3))
    report = load_checkpoint(turned, export_state_dict(source, 'mmdet'), log=None)
    assert report.resized[TABLE] == 'window 3x5 to 5x3, bicubic'


def test_position_is_resized_from_either_layout():
    source = SwinBackbone(**ARCH, use_abs_pos_embed=True, pretrain_img_size=32)
    model = SwinBackbone(**ARCH, use_abs_pos_embed=True, pretrain_img_size=(48, 40))
    expected = bicubic(source.absolute_pos_embed.detach()[0].unflatten(0, (8, 8)), (12, 10)).reshape(120, 8)
    for state in (source.state_dict(), export_state_dict(source, 'official')):
        model.reset_parameters()
        report = load_checkpoint(model, state, log=None)
        assert report.resized == {'absolute_pos_embed': 'grid 8x8 to 12x10, bicubic'}
        torch.testing.assert_close(model.absolute_pos_embed.detach()[0], expected)


def test_a_position_map_of_another_shape_with_as_many_tokens_is_resized():
    source = SwinBackbone(**ARCH, use_abs_pos_embed=True, pretrain_img_size=(16, 64))
    model = SwinBackbone(**ARCH, use_abs_pos_embed=True, pretrain_img_size=(64, 16))
    report = load_checkpoint(model, export_state_dict(source, 'official'), log=None)
    assert report.resized == {'absolute_pos_embed': 'grid 4x16 to 16x4, bicubic'}


@pytest.mark.parametrize('channels', [1, 6, 9])
def test_a_grey_image_keeps_its_response_to_repeated_channels(channels):
    weight, grey = torch.randn(5, 3, 4, 4, dtype=torch.float64), torch.randn(1, 1, 4, 4, dtype=torch.float64)
    response = F.conv2d(grey.expand(-1, 3, -1, -1), weight)
    adapted = adapt_channels(weight, channels)
    torch.testing.assert_close(F.conv2d(grey.expand(-1, channels, -1, -1), adapted), response)


def test_loading_adapts_image_channels_by_repetition():
    source, model = SwinBackbone(**ARCH), SwinBackbone(**ARCH, in_channels=4)
    weight = source.patch_embed.projection.weight
    report = load_checkpoint(model, source.state_dict(), log=None)
    assert report.resized == {'patch_embed.projection.weight': 'image channels 3 to 4'}
    torch.testing.assert_close(model.patch_embed.projection.weight, weight[:, [0, 1, 2, 0]] * 0.75)
