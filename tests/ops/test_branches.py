"""The residual branches of a block against textbook attention and torch's own gradients, and which blocks take them."""

import copy
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from swin_dense import SwinBackbone
from swin_dense.ops import bands, batched, branches

CHANNELS, HEADS = 8, 2


def make_blocks(shift=True, **options):
    """Return a block that takes the branches, and one with the same weights that takes plain torch operations."""
    torch.manual_seed(0)
    options = {'embed_dims': CHANNELS, 'depths': (2,), 'num_heads': (HEADS,), 'strides': (4,), **options}
    ours, plain = (
        SwinBackbone(**options, attn_backend=backend).double().layers[0].blocks[int(shift)]
        for backend in ('auto', 'reference')
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
    for found, expected in zip(run(ours, x), run(plain, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def an_input(*shape):
    return torch.randn(*shape, CHANNELS, dtype=torch.float64, requires_grad=True)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_map_in_any_bands(data):
    window = (data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8)))
    options = {
        'window_size': window,
        'drop_path_rate': data.draw(st.sampled_from([0.0, 0.6])),
        'with_cp': data.draw(st.booleans()),
        'qk_scale': data.draw(st.sampled_from([None, 0.3])),
    }
    ours, plain = make_blocks(data.draw(st.booleans()), **options)
    x = an_input(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 30)), data.draw(st.integers(1, 15)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bands, 'BAND_TOKENS', data.draw(st.sampled_from([30, 100, 2048])))
        patch.setattr(branches, 'attention_branch', count := Counted(branches.attention_branch))
        assert_same(ours, plain, x)
    assert count.calls == 1
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(x), plain.eval()(x), rtol=1e-9, atol=1e-10)


class Counted:
    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args):
        self.calls += 1
        return self.function(*args)


@pytest.mark.parametrize('saves', [False, True])
def test_gradcheck(saves):
    x = an_input(1, 3, 4)
    norm = [torch.randn(CHANNELS, dtype=torch.float64, requires_grad=True) for _ in range(2)]

    def linear(inputs, outputs):
        shapes = (outputs, inputs), (outputs,)
        return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    bias = torch.randn(HEADS, 6, 6, dtype=torch.float64, requires_grad=True)

    def attend(x, w, b, wq, bq, wp, bp, bias):
        attention = branches.Attention(bias, HEADS, (2, 3), (1, 1), 0.7, in_cpp=False)
        linears = branches.Linear(wq, bq), branches.Linear(wp, bp)
        return branches.attention_branch(x, None, branches.Norm(w, b, 1e-5), *linears, attention, saves)

    def mlp(x, w, b, w1, b1, w2, b2):
        linears = branches.Linear(w1, b1), branches.Linear(w2, b2)
        return branches.mlp_branch(x, None, branches.Norm(w, b, 1e-5), *linears, 'none', saves)

    qkv, proj = linear(CHANNELS, 3 * CHANNELS), linear(CHANNELS, CHANNELS)
    assert torch.autograd.gradcheck(attend, (x, *norm, *qkv, *proj, bias))
    assert torch.autograd.gradcheck(mlp, (x, *norm, *linear(CHANNELS, 12), *linear(12, CHANNELS)))


@pytest.mark.parametrize('with_cp', [False, True])
def test_a_dropped_image_is_left_out_of_the_work(with_cp):
    block, _ = make_blocks(with_cp=with_cp)
    block.drop_path.draw = lambda x, branches: torch.tensor([[2.0, 2.0], [0.0, 0.0], [2.0, 2.0]])
    x = torch.randn(3, 9, 9, CHANNELS, dtype=torch.float64)
    x[1] = torch.nan
    out = block(x)
    out[[0, 2]].sum().backward()
    assert out[1].isnan().all()
    assert not out[[0, 2]].isnan().any()
    assert all(parameter.grad.isfinite().all() for parameter in block.parameters())


def test_checkpointing_keeps_the_input_of_each_branch_and_nothing_else():
    kept = {}
    x = an_input(1, 21, 21)
    for with_cp in (False, True):
        block, _ = make_blocks(with_cp=with_cp, drop_path_rate=0.0)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            block(x)
        kept[with_cp] = sum(t.numel() for t in saved if t.numel() % (21 * 21) == 0)  # the rest are parameters
    assert kept[True] == 2 * x.numel()
    assert kept[False] == 10 * x.numel()


def double_fc1(block):
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    new = Twice(CHANNELS, 4 * CHANNELS).double()
    new.load_state_dict(block.mlp.fc1.state_dict())
    block.mlp.fc1 = new


def double_by_hook(block):
    block.mlp.fc1.register_forward_hook(lambda module, args, out: 2 * out)


def double_by_method(block):
    fc1 = block.mlp.fc1
    fc1.forward = lambda x: 2 * nn.functional.linear(x, fc1.weight, fc1.bias)


@pytest.mark.parametrize('change', [double_fc1, double_by_hook, double_by_method])
def test_what_is_replaced_or_hooked_is_called(change):
    ours, plain = make_blocks()
    x = an_input(1, 9, 9)
    before = ours(x)
    for block in (ours, plain):
        change(block)
    assert_same(ours, plain, x)
    assert not torch.allclose(ours(x), before)


def test_a_backward_hook_is_called():
    ours, _ = make_blocks()
    seen = []
    ours.attn.proj.register_full_backward_hook(lambda *_: seen.append(1))
    ours(an_input(1, 9, 9)).sum().backward()
    assert seen == [1]


@pytest.mark.parametrize(
    'options',
    [
        {'qkv_bias': False},
        {'use_rel_pos_bias': False},
        {'act_cfg': {'type': 'ReLU'}},
        {'act_cfg': {'type': 'GELU', 'approximate': 'tanh'}},
        {'norm_cfg': {'type': 'LN', 'elementwise_affine': False}},
        {'drop_rate': 0.5},
    ],
    ids=str,
)
def test_every_option_of_a_block_is_respected(options):
    ours, plain = make_blocks(**options)
    assert_same(ours, plain, an_input(2, 9, 9))


def test_a_block_that_is_frozen_in_part():
    ours, plain = make_blocks()
    for block in (ours, plain):
        block.requires_grad_(False)
        block.attn.proj.requires_grad_(True)
        block.mlp.fc1.bias.requires_grad_(True)
    assert_same(ours, plain, an_input(2, 9, 9).detach())


def test_a_second_derivative_is_refused():
    block, _ = make_blocks()
    x = an_input(1, 9, 9)
    (grad,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='once_differentiable'):
        grad.sum().backward()


def test_a_copy_of_a_block_that_has_run():
    ours, plain = make_blocks()
    run(ours, an_input(1, 9, 9))
    assert_same(copy.deepcopy(ours), plain, an_input(1, 9, 9))


def test_autocast_goes_through_the_modules():
    block, _ = make_blocks()
    block.float()
    products = []
    x = torch.randn(1, 9, 9, CHANNELS)
    with torch.autocast('cpu', torch.bfloat16):
        block.mlp.fc1.register_forward_hook(lambda module, args, out: products.append(out.dtype))
        assert not branches.can_run(x)
        block(x)
    assert branches.can_run(x)
    assert not branches.can_run(x.bfloat16())
    assert products == [torch.bfloat16]


@pytest.mark.filterwarnings('ignore:There is a performance drop')
def test_vmap_goes_through_the_modules():
    block, _ = make_blocks()
    x = torch.randn(2, 1, 9, 9, CHANNELS, dtype=torch.float64)
    block.eval()
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(block)(x), torch.stack([block(part) for part in x]))


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


def test_the_choice_is_logged_once(caplog):
    branches._log_once.cache_clear()
    block, _ = make_blocks()
    with caplog.at_level(logging.INFO, logger='swin_dense.ops'):
        for _ in range(3):
            block(an_input(1, 9, 9))
    assert [record.levelname for record in caplog.records] == ['INFO']
    assert 'batched' in caplog.text
