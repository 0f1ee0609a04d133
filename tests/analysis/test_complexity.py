"""The counts of a backbone against independent counters: torch's on SwinBackbone, mmengine's on mmdet's Swin."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from swin_dense import SwinBackbone
from swin_dense.analysis.flop_counter import count
from tests.conftest import TINY, needs
from tests.examples import load_example

complexity = load_example('complexity')


def counted_multiply_adds(function, *args):
    with torch.device('meta'), torch.no_grad(), FlopCounterMode(display=False) as counter:
        function(*args)
    return counter.get_total_flops() // 2


def attend(x, channels):
    """Apply single-head attention within each row of tokens, (rows, tokens, C)."""
    q, k, v = torch.nn.Linear(channels, 3 * channels, device='meta')(x).chunk(3, -1)
    return torch.nn.Linear(channels, channels, device='meta')((q @ k.transpose(1, 2)).softmax(-1) @ v)


@pytest.mark.parametrize(
    ('height', 'width', 'channels', 'window'),
    [
        (14, 21, 8, 7),
        (24, 12, 16, 12),
        (112, 112, 128, 7),
    ],
)
def test_attention_formulas_equal_the_counts_of_torch(height, width, channels, window):
    tokens = height * width
    global_tokens = torch.zeros(1, tokens, channels, device='meta')
    window_tokens = torch.zeros(
        tokens // window**2,
        window**2,
        channels,
        device='meta',
    )
    assert complexity.msa_flops(height, width, channels) == counted_multiply_adds(attend, global_tokens, channels)
    by_windows = counted_multiply_adds(attend, window_tokens, channels)
    assert complexity.window_msa_flops(height, width, channels, window) == by_windows


def test_global_attention_is_one_window_over_the_whole_map():
    one_stage = {'embed_dims': 16, 'depths': (3,), 'num_heads': (2,)}
    with torch.device('meta'):
        whole_map, windows = (SwinBackbone(one_stage, window_size=window) for window in (14, 7))
    own, everywhere = complexity.counted(whole_map, 56)
    assert own == everywhere == complexity.counted(windows, 56)[1] > complexity.counted(windows, 56)[0]


@needs('matplotlib')
def test_the_example_has_the_published_flops_of_swin_t(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(complexity, 'SIDES', (224, 448))
    monkeypatch.setattr('sys.argv', ['complexity.py', '--out', str(tmp_path / 'drawn.png')])
    complexity.main()
    assert 'windows of 7, 224: 4.5, 448: ' in capsys.readouterr().out  # Table 1 of the paper
    assert (tmp_path / 'drawn.png').read_bytes().startswith(b'\x89PNG')


@settings(max_examples=6)
@given(
    st.integers(1, 150),
    st.integers(1, 150),
    st.integers(1, 9),
    st.integers(1, 5),
)
def test_computed_flops_equal_the_counts_of_torch(height, width, window, in_channels):
    with torch.device('meta'):
        backbone = SwinBackbone(**TINY, window_size=window, in_channels=in_channels, attn_backend='reference').eval()
    image = torch.zeros(1, in_channels, height, width, device='meta')
    counted = count(backbone, height, width)
    assert counted.computed_flops == counted_multiply_adds(backbone, image)
    assert counted.parameters[''] == sum(parameter.numel() for parameter in backbone.parameters())


@pytest.mark.parametrize(('height', 'width'), [(64, 64), (75, 101)])
def test_every_module_equals_the_counts_of_mmengine_on_mmdets_swin(height, width):
    """mmdet projects the outputs of padding tokens too, as the published FLOPs assume."""
    from mmdet.models.backbones import SwinTransformer
    from mmengine.analysis import FlopAnalyzer

    theirs = SwinTransformer(**TINY, window_size=7)
    theirs.eval()
    analyzer = FlopAnalyzer(theirs, torch.zeros(1, 3, height, width)).unsupported_ops_warnings(False)
    analyzer.set_op_handle('aten::layer_norm', lambda inputs, outputs: 0)
    flops = analyzer.by_module()
    with torch.device('meta'):
        found = count(SwinBackbone(**TINY, window_size=7), height, width).flops
    names = [f'stages.{stage}.blocks.{block}' for stage in range(4) for block in (0, 1)]
    parts = [f'{name}.{part}' for name in names for part in ('attn.w_msa', 'attn.w_msa.qkv', 'attn.w_msa.proj', 'ffn')]
    for name in ['', 'patch_embed', *(f'stages.{stage}' for stage in range(4)), *names, *parts]:
        assert found[name] == flops[name], name
