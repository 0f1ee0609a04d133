"""The MLP computes its activation again in the backward pass, unless that could change a result."""

import copy

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from swin_dense.models.layers import ACTIVATIONS, FFN
from swin_dense.utils import compat

TOKENS, CHANNELS = 50, 8


needs_detection_of_hooks = pytest.mark.skipif(
    compat.has_saved_tensors_hooks(),
    reason='torch before 2.5 cannot report saved-tensor hooks, so nothing is computed again',
)


def make(act_cfg='GELU', drop_rate=0.0, **options):
    torch.manual_seed(0)
    act_cfg = {'type': act_cfg, **options} if isinstance(act_cfg, str) else act_cfg
    return FFN(CHANNELS, 4 * CHANNELS, act_cfg, drop_rate).double()


def make_input():
    return torch.linspace(-2, 2, TOKENS * CHANNELS, dtype=torch.float64).view(1, 5, -1, CHANNELS).requires_grad_()


def gradients(function, ffn):
    """Return the gradients of the input and of all parameters for the same random numbers."""
    torch.manual_seed(1)
    x = make_input()
    return torch.autograd.grad(function(x).square().sum(), [x, *ffn.parameters()])


def assert_gradients_of_the_container(ffn):
    """Compare with a plain call of the container, which saves everything."""
    ours, expected = gradients(ffn, ffn), gradients(ffn.layers, ffn)
    assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))


def retained_bytes(function, x):
    """Return the bytes that a forward pass leaves allocated, including its result."""
    function(x)  # one-time allocations
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        out = function(x)
    assert out.grad_fn is not None
    return sum(event.self_cpu_memory_usage for event in record.events())


@needs_detection_of_hooks
@pytest.mark.parametrize('act', ACTIVATIONS)
def test_the_result_of_the_activation_is_not_saved(act):
    ffn = make(act)
    out_and_hidden = 8 * TOKENS * (1 + 4) * CHANNELS  # ReLU, Tanh and Sigmoid save their result, but not their input
    assert retained_bytes(ffn, make_input()) == out_and_hidden
    assert_gradients_of_the_container(ffn)


def test_dropout():
    assert_gradients_of_the_container(make(drop_rate=0.5))


@pytest.mark.parametrize('act', ['SiLU', 'Hardswish', 'Mish', 'ReLU', 'LeakyReLU', 'ELU'])
def test_activations_in_place(act):
    """They overwrite the input of a second computation."""
    ours, expected = make(act, inplace=True), make(act)
    for a, e in zip(gradients(ours, ours), gradients(expected.layers, expected), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    'act_cfg',
    [
        nn.RReLU,
        nn.PReLU,
        lambda: nn.Dropout(0.5),
        lambda: nn.Sequential(nn.GELU(), nn.Dropout(0.5)),
        lambda: nn.Sequential(nn.GELU(), nn.Dropout(0.5, inplace=True)),
    ],
    ids=['RReLU', 'PReLU', 'dropout', 'with dropout', 'with dropout in place'],
)
def test_other_activations_may_be_random(act_cfg):
    assert_gradients_of_the_container(make(act_cfg))


def test_dropout_in_place():
    ffn = make(drop_rate=0.5)
    ffn.layers[0][2].inplace = True
    assert_gradients_of_the_container(ffn)


def test_a_gradient_by_finite_differences_with_a_random_activation():
    """An oracle that does not depend on autograd."""
    ffn = make(lambda: nn.Sequential(nn.GELU(), nn.Dropout(0.5)))
    weight = ffn.layers[1].weight

    def loss():
        torch.manual_seed(1)
        return ffn(make_input()).square().sum()

    (gradient,) = torch.autograd.grad(loss(), weight)
    losses = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            weight[0, 0] += step
            losses.append(loss())
    torch.testing.assert_close((losses[0] - losses[1]) / 2e-6, gradient[0, 0], rtol=1e-6, atol=0)


def test_prelu_under_autocast():
    ffn = make(nn.PReLU).float()
    with torch.autocast('cpu', torch.bfloat16):
        out = ffn(make_input().float())
    out.float().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in ffn.parameters())


@pytest.mark.parametrize(
    'name', ['layers', 'layers.0', 'layers.0.0', 'layers.0.1', 'layers.0.2', 'layers.1', 'layers.2']
)
def test_a_hook_on_any_part_is_called_once_and_its_result_is_used(name):
    ffn, calls = make(drop_rate=0.5), []
    ffn.get_submodule(name).register_forward_hook(lambda module, args, out: calls.append(name) or 2 * out)
    assert_gradients_of_the_container(ffn)
    assert calls == [name, name]


def test_a_pre_hook_that_changes_its_input_in_place():
    ffn = make()
    ffn.layers[1].register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))
    assert_gradients_of_the_container(ffn)


class Halved(nn.Sequential):
    def forward(self, x):
        return super().forward(x) / 2


def subclass_the_container(ffn):
    ffn.layers = Halved(*ffn.layers)


def subclass_the_inner_container(ffn):
    ffn.layers[0] = Halved(*ffn.layers[0])


def patch_the_container(ffn):
    original = ffn.layers.forward
    ffn.layers.forward = lambda x: original(x) / 2


def replace_the_container(ffn):
    layers = ffn.layers
    ffn.layers = nn.Module()
    ffn.layers.inner = layers
    ffn.layers.forward = lambda x: layers(x) / 2


def compile_the_container(ffn):
    ffn.layers = torch.compile(Halved(*ffn.layers), backend='eager')


@pytest.mark.parametrize(
    'change',
    [
        subclass_the_container,
        subclass_the_inner_container,
        patch_the_container,
        replace_the_container,
        pytest.param(compile_the_container, marks=pytest.mark.slow),
    ],
    ids=lambda change: change.__name__,
)
def test_another_container_is_called(change):
    ffn = make()
    before = ffn(make_input())
    change(ffn)
    assert not torch.allclose(ffn(make_input()), before)
    assert torch.equal(ffn(make_input()), ffn.layers(make_input()))


def test_where_saved_tensor_hooks_are_disabled():
    ffn = make()
    with torch.autograd.graph.disable_saved_tensors_hooks('not here'):
        assert_gradients_of_the_container(ffn)


def test_saved_tensor_hooks_see_all_tensors():
    seen = []
    for function in (make(), make().layers):
        seen.append([])
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=seen[-1]: sizes.append(t.shape) or t, lambda t: t
        ):
            function(make_input())
    assert seen[0] == seen[1]


def test_a_checkpoint_saves_only_its_input():
    ffn = make()

    def run(x):
        return checkpoint(ffn, x, use_reentrant=False, preserve_rng_state=False)

    assert retained_bytes(run, make_input()) == 8 * TOKENS * CHANNELS  # the output


def test_weights_that_change_before_the_backward_pass_are_an_error():
    """As they are for the layers alone, where autograd itself raises."""
    ffn = make()
    for function in (ffn, ffn.layers):
        out = function(make_input()).sum()
        with torch.no_grad():
            ffn.layers[1].weight.mul_(2)
        with pytest.raises(RuntimeError, match='modified'):
            out.backward()


def test_second_order_gradients_and_torch_func():
    ffn, results = make(), []
    for function in (ffn, ffn.layers):
        x = make_input()
        (first,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
        results.append(list(torch.autograd.grad(first.square().sum(), [x, *ffn.parameters()], allow_unused=True)))
        results[-1].append(torch.func.grad(lambda x, f=function: f(x).square().sum())(make_input()))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('frozen', ['layers.0.0', 'layers.1', ''])
def test_frozen_layers(frozen):
    ffn = make()
    ffn.get_submodule(frozen).requires_grad_(False)
    x = make_input().detach()
    wanted = [parameter for parameter in ffn.parameters() if parameter.requires_grad]
    if not wanted:
        assert not ffn(x).requires_grad
        return
    results = [torch.autograd.grad(function(x).square().sum(), wanted) for function in (ffn, ffn.layers)]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_copies_compute_the_activation_again_too():
    ffn = copy.deepcopy(make())
    assert retained_bytes(ffn, make_input()) <= retained_bytes(ffn.layers, make_input())
    assert_gradients_of_the_container(ffn)
