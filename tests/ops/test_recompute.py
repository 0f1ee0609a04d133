"""Recomputation in the backward pass saves memory, keeps the gradients, and is disabled by hooks."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from swin_dense.models.layers import FFN, PatchMerging
from swin_dense.ops.recompute import computed_again
from swin_dense.utils import compat

TOKENS, CHANNELS = 50, 8


needs_detection_of_hooks = pytest.mark.skipif(
    compat.has_saved_tensors_hooks(),
    reason='torch before 2.5 cannot report saved-tensor hooks, so recomputation is disabled',
)


def retained_bytes(module, x):
    """Return the bytes that a forward pass leaves allocated, including its result."""
    module(x)  # one-time allocations
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        out = module(x)
    assert out.grad_fn is not None
    return sum(event.self_cpu_memory_usage for event in record.events())


class Perceptron(nn.Module):
    def __init__(self, act, again=True):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(CHANNELS, 4 * CHANNELS), act, nn.Linear(4 * CHANNELS, CHANNELS)
        self.again = again

    def forward(self, x):
        hidden = self.fc1(x)
        active = self.act(hidden)
        if not self.again:
            return self.fc2(active)
        with computed_again(active, hidden, self.act, through=self.act):
            return self.fc2(active)


def pair(kind=nn.GELU, **options):
    """Return two perceptrons with equal weights: one that recomputes, and one that saves everything."""
    again, plain = Perceptron(kind(**options)), Perceptron(kind(**options), again=False)
    plain.load_state_dict(again.state_dict())
    return again.double(), plain.double()


def make_input():
    return torch.randn(1, 5, TOKENS // 5, CHANNELS, dtype=torch.float64, requires_grad=True)


def gradients(module, x, **options):
    return torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()], **options)


@needs_detection_of_hooks
def test_the_recomputed_result_is_not_saved():
    again, plain = pair()
    result = 8 * TOKENS * 4 * CHANNELS
    assert retained_bytes(plain, make_input()) - retained_bytes(again, make_input()) == result


@needs_detection_of_hooks
def test_an_mlp_saves_the_hidden_layer_once():
    mlp = FFN(CHANNELS, 4 * CHANNELS, {'type': 'GELU'}, drop_rate=0.0).double()
    assert retained_bytes(mlp, make_input()) == 8 * TOKENS * (4 + 1) * CHANNELS


@needs_detection_of_hooks
def test_patch_merging_saves_no_activation_but_its_input():
    merging = PatchMerging(CHANNELS, 2, {'type': 'LN'}).double()
    x = torch.randn(1, 10, 10, CHANNELS, dtype=torch.float64, requires_grad=True)
    tokens = 25
    statistics = 2 * tokens
    reordered = sum(parameter.numel() for parameter in merging.parameters())
    assert retained_bytes(merging, x) == 8 * (tokens * 2 * CHANNELS + statistics + reordered)


def test_gradients_of_first_and_second_order_are_unchanged():
    for ours, expected in zip(*(gradients(module, x) for module in pair() for x in [seeded()]), strict=True):
        assert torch.equal(ours, expected)
    twice = []
    for module in pair():
        x = seeded()
        (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        twice.append(torch.autograd.grad(first.square().sum(), [x, *module.parameters()], allow_unused=True))
    for ours, expected in zip(*twice, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def seeded():
    return torch.linspace(-2, 2, TOKENS * CHANNELS, dtype=torch.float64).view(1, 5, -1, CHANNELS).requires_grad_()


@pytest.mark.parametrize('kind', [nn.SiLU, nn.Hardswish, nn.Mish, nn.ReLU, nn.LeakyReLU, nn.ELU])
def test_in_place_activations_have_the_same_gradients(kind):
    """An in-place activation overwrites the input of the recomputation."""
    again, _ = pair(kind, inplace=True)
    _, plain = pair(kind)
    plain.load_state_dict(again.state_dict())
    for ours, expected in zip(gradients(again, seeded()), gradients(plain, seeded()), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_a_hook_is_called_once_and_what_it_returns_is_used():
    again, plain = pair()
    calls = []
    for module in (again, plain):
        module.act.register_forward_hook(lambda module, args, out: calls.append(module) or 2 * out)
    for ours, expected in zip(gradients(again, seeded()), gradients(plain, seeded()), strict=True):
        assert torch.equal(ours, expected)
    assert calls == [again.act, plain.act]


def test_saved_tensor_hooks_see_the_same_tensors():
    seen = {}
    for module in pair():
        sizes = seen[module] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.shape) or t, lambda t: t):
            module(seeded())
    ours, expected = seen.values()
    assert ours == expected


def test_a_checkpoint_saves_only_its_input():
    again, _ = pair()

    def run(x):
        return checkpoint(again, x, use_reentrant=False, preserve_rng_state=False)

    assert retained_bytes(run, make_input()) == 8 * TOKENS * CHANNELS  # the output


def test_under_torch_func():
    again, plain = pair()
    ours, expected = (torch.func.grad(lambda x, module=m: module(x).square().sum())(seeded()) for m in (again, plain))
    assert torch.equal(ours, expected)
