"""The fused block against textbook attention and torch's own gradients."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.block import reason_not_to_fuse
from swin_dense.ops import bands, batched, fused

CHANNELS, HEADS = 8, 2
VERSIONS = [SwinBackbone, SwinV2Backbone]


def make_blocks(shift=True, kind=SwinBackbone, **options):
    """Return a block that is fused, and one with the same weights that takes plain torch operations."""
    torch.manual_seed(0)
    options = {'embed_dims': CHANNELS, 'depths': (2,), 'num_heads': (HEADS,), 'strides': (4,), **options}
    ours, plain = (
        kind(**options, attn_backend=backend).double().layers[0].blocks[int(shift)] for backend in ('auto', 'reference')
    )
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.5)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


def run(block, x):
    """Return the output and the gradients of x and of all parameters that want one."""
    torch.manual_seed(1)
    out = block(x)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    wanted = [tensor for tensor in (x, *block.parameters()) if tensor.requires_grad]
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), wanted)]


def assert_same(ours, plain, x):
    assert reason_not_to_fuse(ours, x) is None
    for found, expected in zip(run(ours, x), run(plain, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def an_input(*shape):
    return torch.randn(*shape, CHANNELS, dtype=torch.float64, requires_grad=True)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_map_in_any_bands(data):
    window = (data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8)))
    options = {
        'kind': data.draw(st.sampled_from(VERSIONS)),
        'window_size': window,
        'drop_path_rate': data.draw(st.sampled_from([0.0, 0.6])),
        'with_cp': data.draw(st.booleans()),
    }
    if options['kind'] is SwinBackbone:
        options['qk_scale'] = data.draw(st.sampled_from([None, 0.3]))
    ours, plain = make_blocks(data.draw(st.booleans()), **options)
    x = an_input(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 30)), data.draw(st.integers(1, 15)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bands, 'BAND_TOKENS', data.draw(st.sampled_from([30, 100, 2048])))
        assert_same(ours, plain, x)
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), plain.eval()(x), rtol=1e-9, atol=1e-10)


def branch(kind, saves, kept=None):
    """Return a branch as a function of tensors, and tensors for it."""
    kept = kept or fused.Kept.of(None, 1)
    norm_is_last = kind.endswith('of V2')
    x = an_input(3 if len(kept.runs) > 1 else 1, 3, 4)

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def linear(inputs, outputs):
        return draw(outputs, inputs), draw(outputs)

    def attend(x, w, b, wq, bq, wp, bp, bias, scales=None):
        attention = fused.Attention(HEADS, (2, 3), (1, 1), 0.7)
        if scales is not None:  # keys have no bias
            bq = torch.cat([bq[:CHANNELS], torch.zeros_like(bp), bq[2 * CHANNELS :]])
        norm, qkv, proj = fused.Norm(w, b, 1e-5, norm_is_last), fused.Linear(wq, bq), fused.Linear(wp, bp)
        return fused.attention_branch(x, kept, norm, qkv, proj, bias, scales, attention, saves)

    def mlp(x, w, b, w1, b1, w2, b2):
        linears = fused.Linear(w1, b1), fused.Linear(w2, b2)
        return fused.mlp_branch(x, kept, fused.Norm(w, b, 1e-5, norm_is_last), *linears, 'none', saves)

    tensors = x, draw(CHANNELS), draw(CHANNELS)
    if kind.startswith('mlp'):
        return mlp, (*tensors, *linear(CHANNELS, 12), *linear(12, CHANNELS))
    scales = (draw(HEADS),) if norm_is_last else ()
    linears = *linear(CHANNELS, 3 * CHANNELS), *linear(CHANNELS, CHANNELS)
    return attend, (*tensors, *linears, draw(HEADS, 6, 6), *scales)


BRANCHES = ['attention', 'mlp', 'attention of V2', 'mlp of V2']


@pytest.mark.parametrize('saves', [False, True])
@pytest.mark.parametrize('kind', BRANCHES)
def test_gradcheck(kind, saves):
    assert torch.autograd.gradcheck(*branch(kind, saves))


@pytest.mark.slow
@pytest.mark.parametrize('kind', BRANCHES)
def test_gradients_of_gradients(kind):
    kept = fused.Kept.of(torch.tensor([1.5, 0.0, 1.5]), 3)
    assert torch.autograd.gradgradcheck(*branch(kind, saves=True, kept=kept), fast_mode=True)


@pytest.mark.parametrize('version', VERSIONS)
def test_a_gradient_penalty_trains_a_model(version):
    """Differentiating twice works as with any backend."""
    penalties = []
    for block in make_blocks(kind=version, drop_path_rate=0.0):
        x = torch.linspace(-1, 1, 81 * CHANNELS, dtype=torch.float64).view(1, 9, 9, CHANNELS).requires_grad_()
        (grad,) = torch.autograd.grad(block(x).square().mean(), x, create_graph=True)
        penalties.append(torch.autograd.grad(grad.square().mean(), list(block.parameters()), allow_unused=True))
    for ours, expected in zip(*penalties, strict=True):
        if expected is not None:
            torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


def test_factors_of_images_are_one_value_or_refused():
    assert fused.Kept.of(torch.tensor([0.0, 2.0, 2.0, 0.0, 2.0]), 5) == ((slice(1, 3), slice(4, 5)), 2.0)
    assert fused.Kept.of(torch.zeros(2), 2) == ((), 0.0)
    assert fused.Kept.of(torch.tensor([-2.0, 0.0]), 2) == ((slice(0, 1),), -2.0)
    with pytest.raises(ValueError, match=r'must share one factor, got \[0.5, 2.0\]'):
        fused.Kept.of(torch.tensor([2.0, 0.5, 0.0]), 3)


@pytest.mark.parametrize('version', VERSIONS)
@pytest.mark.parametrize('with_cp', [False, True])
def test_a_dropped_image_is_left_out_of_the_work(with_cp, version):
    block, _ = make_blocks(kind=version, with_cp=with_cp, drop_path_rate=0.5)
    x = torch.randn(20, 9, 9, CHANNELS, dtype=torch.float64)
    torch.manual_seed(3)
    is_dropped = sum(block.drop_path.draw(x) for _ in range(2)) == 0
    assert 0 < is_dropped.sum() < 20
    x[is_dropped] = torch.nan
    torch.manual_seed(3)
    assert reason_not_to_fuse(block, x) is None
    out = block(x)
    out[~is_dropped].sum().backward()
    assert out[is_dropped].isnan().all()
    assert not out[~is_dropped].isnan().any()
    assert all(parameter.grad.isfinite().all() for parameter in block.parameters())


@pytest.mark.parametrize(('version', 'maps'), [(SwinBackbone, 10), (SwinV2Backbone, 12)])
def test_checkpointing_keeps_the_input_of_each_branch_and_nothing_else(version, maps):
    kept = {}
    x = an_input(1, 21, 21)
    for with_cp in (False, True):
        block, _ = make_blocks(kind=version, with_cp=with_cp, window_size=7, drop_path_rate=0.0)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            block(x)
        # The rest are parameters, and two lengths for each head of a token.
        kept[with_cp] = sum(t.numel() for t in saved if t.numel() % x.numel() == 0)
    assert kept[True] == 2 * x.numel()
    assert kept[False] == maps * x.numel()


def products_of(wanted):
    """Return how many matrix products a backward pass takes for the gradients of some parameters of a block."""
    block, _ = make_blocks(drop_path_rate=0.0)
    block.requires_grad_(False)
    for name in wanted:
        block.get_parameter(name).requires_grad_(True)
    loss = block(torch.randn(1, 9, 9, CHANNELS, dtype=torch.float64)).sum()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        loss.backward()
    names = [event.name for event in record.events()]
    return sum(name in ('aten::mm', 'aten::addmm_', 'aten::bmm', 'aten::baddbmm') for name in names)


def test_a_gradient_that_nobody_wants_is_not_computed():
    assert products_of(['mlp.fc2.bias']) == 0
    assert products_of(['mlp.fc2.weight']) == 1
    assert products_of(['mlp.fc1.weight']) == 2
    # Through the MLP, two products; proj, one; its weight, one.
    assert products_of(['attn.proj.weight']) == 3
    everything = [name for name, _ in make_blocks()[0].named_parameters()]
    assert products_of(everything) > 10


@pytest.mark.parametrize(
    ('version', 'wanted'),
    [
        (SwinBackbone, ['attn.proj.weight', 'mlp.fc1.bias']),
        (SwinBackbone, ['norm1.bias']),
        (SwinBackbone, ['attn.qkv.bias']),
        (SwinBackbone, ['norm2.weight', 'mlp.fc2.bias']),
        (SwinBackbone, ['attn.relative_position_bias_table']),
        (SwinV2Backbone, ['attn.proj.weight', 'mlp.fc1.bias']),
        (SwinV2Backbone, ['norm1.bias']),
        (SwinV2Backbone, ['attn.q_bias']),
        (SwinV2Backbone, ['norm2.weight', 'mlp.fc2.bias']),
        (SwinV2Backbone, ['attn.logit_scale']),
        (SwinV2Backbone, ['attn.cpb_mlp.0.weight']),
    ],
    ids=lambda value: ' '.join(value) if isinstance(value, list) else value.__name__,
)
@pytest.mark.parametrize('with_cp', [False, True])
def test_a_block_that_is_frozen_in_part(version, wanted, with_cp):
    ours, plain = make_blocks(kind=version, with_cp=with_cp)
    for block in (ours, plain):
        block.requires_grad_(False)
        for name in wanted:
            block.get_parameter(name).requires_grad_(True)
    assert_same(ours, plain, an_input(2, 9, 9).detach())
    assert_same(ours, plain, an_input(2, 9, 9))


def test_the_tanh_approximation():
    ours, plain = make_blocks(act_cfg={'type': 'GELU', 'approximate': 'tanh'})
    assert_same(ours, plain, an_input(2, 9, 9))


@pytest.mark.parametrize('version', VERSIONS)
def test_a_copy_of_a_block_that_has_run(version):
    ours, plain = make_blocks(kind=version)
    run(ours, an_input(1, 9, 9))
    assert_same(copy.deepcopy(ours), plain, an_input(1, 9, 9))


@pytest.mark.parametrize('version', VERSIONS)
def test_a_backward_pass_inside_autocast(version):
    """The forward pass ran outside; the region shall not change the gradients of what is fused."""
    block, _ = make_blocks(kind=version, drop_path_rate=0.0)
    block.float()
    wanted = [parameter for name, parameter in block.named_parameters() if 'cpb_mlp' not in name]
    gradients = []
    for enabled in (False, True):
        loss = block(torch.linspace(-1, 1, 81 * CHANNELS).view(1, 9, 9, CHANNELS)).square().sum()
        with torch.autocast('cpu', torch.bfloat16, enabled=enabled):
            gradients.append(torch.autograd.grad(loss, wanted))
    for ours, expected in zip(*gradients, strict=True):
        assert torch.equal(ours, expected)


def test_a_thousand_sizes_do_not_grow_the_cache():
    for size in range(1000):
        batched.layout_of((1, 1 + size % 17, 100 + size), (7, 7), (3, 3), 3)
        assert 0 < batched._cache.bytes <= batched.CACHE_BYTES
    assert batched._cache.bytes == sum(kept.bytes for kept in batched._cache._entries.values())


def test_threads_with_different_sizes_get_right_answers():
    ours, plain = make_blocks(drop_path_rate=0.0)
    inputs = [torch.randn(1, 9 + i, 20 - i, CHANNELS, dtype=torch.float64) for i in range(8)]
    expected = [plain(x).detach() for x in inputs]

    def work(start):
        order = [(start + i) % len(inputs) for i in range(40)]
        return all(torch.allclose(ours(inputs[i]), expected[i], atol=1e-10) for i in order)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
