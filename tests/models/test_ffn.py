"""``with_cp='mlp'`` computes the MLP of a block again in the backward pass, with the results of keeping everything."""

import copy

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.models.layers import ACTIVATIONS, FFN
from tests.conftest import assert_same

TOKENS, CHANNELS = 48, 8
VERSIONS = [SwinBackbone, SwinV2Backbone]
IN_PLACE = [{'type': act, 'inplace': True} for act in ('SiLU', 'Hardswish', 'Mish', 'ReLU', 'LeakyReLU', 'ELU')]


def make(with_cp='mlp', kind=SwinBackbone, act_cfg='GELU', **options):
    """Return a block."""
    torch.manual_seed(0)
    act_cfg = {'type': act_cfg} if isinstance(act_cfg, str) else act_cfg
    options = {'window_size': 4, 'drop_path_rate': 0.0, 'act_cfg': act_cfg, 'with_cp': with_cp, **options}
    model = kind(embed_dims=CHANNELS, depths=(2,), num_heads=(2,), strides=(4,), **options).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.stages[0].blocks[1]


def make_input():
    return torch.linspace(-2, 2, TOKENS * CHANNELS, dtype=torch.float64).view(1, 8, -1, CHANNELS).requires_grad_()


def gradients(block):
    """Return the output, and the gradients of the input and of all parameters, for the same random numbers."""
    torch.manual_seed(1)
    x = make_input()
    out = block(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])]


def assert_gradients_of_keeping_everything(block):
    plain = copy.deepcopy(block)
    plain.with_cp = False
    torch.testing.assert_close(gradients(block), gradients(plain), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('kind', VERSIONS)
@pytest.mark.parametrize('act', ACTIVATIONS)
def test_gradients_with_every_activation(act, kind):
    assert_gradients_of_keeping_everything(make(act_cfg=act, kind=kind))


@pytest.mark.parametrize('act_cfg', IN_PLACE, ids=lambda act_cfg: act_cfg['type'])
def test_gradients_with_activations_in_place(act_cfg):
    """They overwrite what the first layer returns, in both computations."""
    assert_gradients_of_keeping_everything(make(act_cfg=act_cfg))
    found, expected = gradients(make(act_cfg=act_cfg)), gradients(make(False, act_cfg=act_cfg['type']))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    'act_cfg',
    [nn.RReLU, nn.PReLU, lambda: nn.Sequential(nn.GELU(), nn.Dropout(0.5, inplace=True))],
    ids=['RReLU', 'PReLU', 'with dropout in place'],
)
def test_gradients_with_random_activations(act_cfg):
    assert_gradients_of_keeping_everything(make(act_cfg=lambda: act_cfg().double()))


@pytest.mark.parametrize('with_cp', ['mlp', True])
@pytest.mark.parametrize('kind', VERSIONS)
def test_gradients_with_dropout_and_stochastic_depth(kind, with_cp):
    block = make(with_cp, kind, drop_rate=0.5, attn_drop_rate=0.3, drop_path_rate=0.4)
    assert_gradients_of_keeping_everything(block)
    assert not torch.equal(block(make_input()), block(make_input()))


def test_a_gradient_by_finite_differences_with_dropout():
    """An oracle that does not depend on autograd."""
    block = make(drop_rate=0.5)
    weight = block.ffn.layers[1].weight

    def loss():
        torch.manual_seed(1)
        return block(make_input()).square().sum()

    (gradient,) = torch.autograd.grad(loss(), weight)
    losses = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            weight[0, 0] += step
            losses.append(loss())
    torch.testing.assert_close((losses[0] - losses[1]) / 2e-6, gradient[0, 0], rtol=1e-6, atol=0)


def kept_bytes(block):
    """Return the bytes that a forward pass leaves allocated, including its result."""
    x = make_input()
    block(x)  # one-time allocations
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        out = block(x)
    assert out.grad_fn is not None
    return sum(event.self_cpu_memory_usage for event in record.events())


@pytest.mark.parametrize('kind', VERSIONS)
def test_the_hidden_channels_are_not_kept(kind):
    everything, without_mlp, nothing = (kept_bytes(make(with_cp, kind)) for with_cp in (False, 'mlp', True))
    hidden = 8 * TOKENS * 4 * CHANNELS
    # GELU keeps its input, and the second layer its own; a random generator's state is kept for dropout.
    states = torch.get_rng_state().nbytes
    assert everything - without_mlp >= 2 * hidden - 2 * states
    assert nothing < without_mlp


@pytest.mark.parametrize(
    ('with_cp', 'is_training', 'passes'),
    [
        (False, True, {'norm1': 1, 'attn': 1, 'norm2': 1, 'ffn': 1}),
        ('mlp', True, {'norm1': 1, 'attn': 1, 'norm2': 1, 'ffn': 2}),
        (True, True, {'norm1': 2, 'attn': 2, 'norm2': 2, 'ffn': 2}),
        ('mlp', False, {'norm1': 1, 'attn': 1, 'norm2': 1, 'ffn': 1}),
    ],
)
def test_what_is_called_again_in_the_backward_pass(with_cp, is_training, passes):
    block, calls = make(with_cp), dict.fromkeys(passes, 0)
    for name in passes:
        block.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    with torch.set_grad_enabled(is_training):
        out = block(make_input())
    assert set(calls.values()) == {1}
    if is_training:
        out.sum().backward()
    assert calls == passes


def test_every_stage_may_have_its_own():
    options = {'embed_dims': 8, 'depths': (1, 1, 1), 'num_heads': (1, 1, 1), 'strides': (4, 2, 2)}
    model = SwinBackbone(**options, with_cp=[False, 'mlp', True])
    assert [stage.blocks[0].with_cp for stage in model.stages] == [False, 'mlp', True]


@pytest.mark.parametrize('frozen', ['ffn.layers.0.0', 'ffn.layers.1', 'ffn', 'attn', ''])
def test_frozen_layers(frozen):
    blocks = make(), make(False)
    for block in blocks:
        block.get_submodule(frozen).requires_grad_(False)
    x = make_input().detach()
    if not frozen:
        assert not blocks[0](x).requires_grad
        return
    results = []
    for block in blocks:
        wanted = [parameter for parameter in block.parameters() if parameter.requires_grad]
        results.append(torch.autograd.grad(block(x).square().sum(), wanted))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_second_order_gradients_and_torch_func():
    results = []
    for block in (make(), make(False)):
        x = make_input()
        (first,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
        results.append(list(torch.autograd.grad(first.square().sum(), [x, *block.parameters()], allow_unused=True)))
        results[-1].append(torch.func.grad(lambda x, f=block: f(x).square().sum())(make_input()))
        results[-1].append(torch.func.jacrev(lambda x, f=block: f(x).sum((1, 2)))(make_input()))
    assert_same(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('kind', VERSIONS)
def test_compiled(kind):
    torch._dynamo.reset()
    block = make(kind=kind)
    compiled = torch.compile(block, backend='aot_eager', fullgraph=True)
    x, results = make_input(), []
    for run in (compiled, make(False, kind)):
        out = run(x)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *run.parameters()])])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)
    torch._dynamo.reset()


def test_autocast_is_the_same_in_both_computations():
    block, dtypes = make().float(), []
    block.ffn.layers[0][0].register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    with torch.autocast('cpu', torch.bfloat16):
        out = block(make_input().float())
    out.float().sum().backward()
    assert dtypes == [torch.bfloat16] * 2
    assert all(parameter.grad.isfinite().all() for parameter in block.parameters())


def test_an_mlp_is_its_layers():
    ffn = FFN(CHANNELS, 4 * CHANNELS, {'type': 'GELU'}, drop_rate=0.5).double()
    outs = []
    for function in (ffn, ffn.layers):
        torch.manual_seed(1)
        outs.append(function(make_input()))
    assert torch.equal(*outs)
