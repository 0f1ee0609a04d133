"""The counts of a backbone against independent counters: torch's on SwinBackbone, mmengine's on mmdet's Swin."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from swin_dense import SwinBackbone
from swin_dense.analysis.complexity import PARTS, backbone_costs, msa_flops, window_msa_flops
from swin_dense.analysis.flop_counter import count
from tests.conftest import TINY


def counted_multiply_adds(function, *args):
    with torch.device('meta'), torch.no_grad(), FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops() // 2


def attend(x, channels):
    """Apply single-head attention within each row of tokens, (rows, tokens, C)."""
    q, k, v = torch.nn.Linear(channels, 3 * channels, device='meta')(x).chunk(3, -1)
    return torch.nn.Linear(channels, channels, device='meta')((q @ k.transpose(1, 2)).softmax(-1) @ v)


@pytest.mark.parametrize(
    ('height', 'width', 'channels', 'window'), [(14, 21, 8, 7), (24, 12, 16, 12), (112, 112, 128, 7)]
)
def test_attention_formulas_equal_the_counts_of_torch(height, width, channels, window):
    tokens = height * width
    global_tokens = torch.zeros(1, tokens, channels, device='meta')
    window_tokens = torch.zeros(tokens // window**2, window**2, channels, device='meta')
    assert msa_flops(height, width, channels) == counted_multiply_adds(attend, global_tokens, channels)
    assert window_msa_flops(height, width, channels, (window, window)) == counted_multiply_adds(
        attend, window_tokens, channels
    )


@settings(max_examples=6)
@given(st.integers(1, 150), st.integers(1, 150), st.integers(1, 9), st.integers(1, 5))
def test_computed_flops_equal_the_counts_of_torch(height, width, window, in_channels):
    with torch.device('meta'):
        backbone = SwinBackbone(**TINY, window_size=window, in_channels=in_channels, attn_backend='reference').eval()
    image = torch.zeros(1, in_channels, height, width, device='meta')
    counted = count(backbone, height, width)
    assert counted.computed_flops == counted_multiply_adds(backbone, image)
    assert counted.parameters[''] == sum(parameter.numel() for parameter in backbone.parameters())


def test_global_attention_is_one_window_over_the_whole_map():
    one_stage = {'embed_dims': 16, 'depths': (3,), 'num_heads': (2,)}
    assert backbone_costs(one_stage, 40, 56, window_size=(10, 14)).stages[0].keys() == set(PARTS)
    whole_map, windows = (backbone_costs(one_stage, 40, 56, window) for window in ((10, 14), 7))
    assert whole_map.global_flops == windows.global_flops == whole_map.count.flops[''] > windows.count.flops['']
    attention = sum(whole_map.stages[0][part] for part in ('qkv', 'attention', 'projection'))
    assert attention == 3 * msa_flops(10, 14, 16)


@pytest.mark.parametrize(('height', 'width'), [(64, 64), (75, 101)])
def test_every_part_equals_the_counts_of_mmengine_on_mmdets_swin(height, width):
    """mmdet projects the outputs of padding tokens too, as the published FLOPs assume."""
    from mmdet.models.backbones import SwinTransformer
    from mmengine.analysis import FlopAnalyzer

    theirs = SwinTransformer(**TINY, window_size=7)
    theirs.eval()
    analyzer = FlopAnalyzer(theirs, torch.zeros(1, 3, height, width)).unsupported_ops_warnings(False)
    analyzer.set_op_handle('aten::layer_norm', lambda inputs, outputs: 0)
    flops = analyzer.by_module()

    costs = backbone_costs(TINY, height, width, window_size=7)
    for stage, parts in enumerate(costs.stages):
        block = f'stages.{stage}.blocks.{{}}'
        modules = {
            'qkv': 'attn.w_msa.qkv',
            'projection': 'attn.w_msa.proj',
            'mlp': 'ffn',
            'norms': 'norm1',
        }
        expected = {part: sum(flops[f'{block.format(b)}.{name}'] for b in (0, 1)) for part, name in modules.items()}
        whole = sum(flops[f'{block.format(b)}.attn.w_msa'] for b in (0, 1))
        expected['attention'] = whole - expected['qkv'] - expected['projection']
        expected['merging'] = flops.get(f'stages.{stage}.downsample', 0)
        expected['patch embedding'] = flops['patch_embed'] if stage == 0 else 0
        assert parts == expected
        assert set(parts) == set(PARTS)
        parameters = sum(parameter.numel() for parameter in theirs.stages[stage].parameters())
        assert costs.count.parameters[f'stages.{stage}'] == parameters
    assert costs.count.flops[''] == sum(sum(parts.values()) for parts in costs.stages) == flops['']


@pytest.mark.parametrize(
    ('options', 'error'),
    [
        ({'arch': 'x', 'height': 8, 'width': 8}, 'arch must be one of'),
        ({'arch': 't', 'height': 0, 'width': 8}, 'height must be at least 1, got 0'),
        ({'arch': 't', 'height': 8, 'width': 8, 'window_size': -7}, 'window_size must be at least 1'),
    ],
)
def test_wrong_options_are_named(options, error):
    with pytest.raises(ValueError, match=error):
        backbone_costs(**options)
