"""What is recomputed in a backward pass: no longer saved, right all the same, and left alone where hooks are."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from swin_dense.models.layers import FFN, PatchMerging
from swin_dense.ops.recompute import computed_again
from swin_dense.utils import compat

TOKENS, CHANNELS = 50, 8


needs_hooks_to_be_known = pytest.mark.skipif(
    compat.has_saved_tensors_hooks(),
    reason='torch before 2.5 does not tell of hooks on what is kept, so all is kept',
)


def bytes_kept(module, x):
    """Return how many bytes more are allocated after a forward pass than before it, its result among them."""
    module(x)  # what is allocated once
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
    """Return a perceptron that computes again, and one with the same weights that keeps everything."""
    again, plain = Perceptron(kind(**options)), Perceptron(kind(**options), again=False)
    plain.load_state_dict(again.state_dict())
    return again.double(), plain.double()


def an_input():
    return torch.randn(1, 5, TOKENS // 5, CHANNELS, dtype=torch.float64, requires_grad=True)


def gradients(module, x, **options):
    return torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()], **options)


@needs_hooks_to_be_known
def test_the_result_is_not_kept():
    again, plain = pair()
    result = 8 * TOKENS * 4 * CHANNELS
    assert bytes_kept(plain, an_input()) - bytes_kept(again, an_input()) == result


@needs_hooks_to_be_known
def test_an_mlp_keeps_the_hidden_layer_once():
    mlp = FFN(CHANNELS, 4 * CHANNELS, {'type': 'GELU'}, drop_rate=0.0).double()
    assert bytes_kept(mlp, an_input()) == 8 * TOKENS * (4 + 1) * CHANNELS


@needs_hooks_to_be_known
def test_a_patch_merging_keeps_its_input_alone():
    merging = PatchMerging(CHANNELS, 2, {'type': 'LN'}).double()
    x = torch.randn(1, 10, 10, CHANNELS, dtype=torch.float64, requires_grad=True)
    tokens = 25
    statistics = 2 * tokens
    reordered = sum(parameter.numel() for parameter in merging.parameters())
    assert bytes_kept(merging, x) == 8 * (tokens * 2 * CHANNELS + statistics + reordered)


def test_gradients_of_any_order_are_those_of_keeping():
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
def test_an_activation_in_place_has_the_gradients_of_one_that_is_not(kind):
    """It overwrites what would be recomputed from."""
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


def test_hooks_on_saved_tensors_see_what_they_always_saw():
    seen = {}
    for module in pair():
        sizes = seen[module] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.shape) or t, lambda t: t):
            module(seeded())
    ours, expected = seen.values()
    assert ours == expected


def test_under_a_checkpoint_only_its_input_is_kept():
    again, _ = pair()

    def run(x):
        return checkpoint(again, x, use_reentrant=False, preserve_rng_state=False)

    assert bytes_kept(run, an_input()) == 8 * TOKENS * CHANNELS  # its output


def test_under_torch_func():
    again, plain = pair()
    ours, expected = (torch.func.grad(lambda x, module=m: module(x).square().sum())(seeded()) for m in (again, plain))
    assert torch.equal(ours, expected)
