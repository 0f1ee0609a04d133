"""``with_cp='mlp'`` computes the MLP of a block again in the backward pass, with the results of keeping everything."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.models.layers import ACTIVATIONS
from tests.conftest import assert_near
from tests.derivatives import maps_and_gradients

TOKENS, CHANNELS = 48, 8
ARCH = {
    'embed_dims': CHANNELS,
    'depths': (2,),
    'num_heads': (2,),
    'strides': (4,),
}
OPTIONS = {**ARCH, 'window_size': 4, 'drop_path_rate': 0.0, 'with_cp': 'mlp'}
VERSIONS = [SwinBackbone, SwinV2Backbone]


def make(kind=SwinBackbone, **options):
    """Return a block."""
    torch.manual_seed(0)
    model = kind(**{**OPTIONS, **options}).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.stages[0].blocks[1]


def make_input():
    values = torch.linspace(-2, 2, TOKENS * CHANNELS, dtype=torch.float64)
    return values.view(1, 8, -1, CHANNELS).requires_grad_()


def gradients(block):
    """Return the output of each image, and all gradients, for the same random numbers."""
    torch.manual_seed(1)
    return maps_and_gradients(block, make_input())


def assert_gradients_of_keeping_everything(block):
    plain = copy.deepcopy(block)
    plain.with_cp = False
    assert_near(gradients(block), gradients(plain), 1e-12)


@pytest.mark.parametrize('kind', VERSIONS)
@pytest.mark.parametrize('act', ACTIVATIONS)
def test_gradients_with_every_activation(act, kind):
    assert_gradients_of_keeping_everything(make(kind, act_cfg={'type': act}))


@pytest.mark.parametrize('act', ['SiLU', 'Hardswish', 'Mish', 'ReLU', 'LeakyReLU', 'ELU'])
def test_gradients_with_activations_in_place(act):
    """They overwrite the output of the first layer, in both computations."""
    in_place = make(act_cfg={'type': act, 'inplace': True})
    out_of_place = make(act_cfg={'type': act}, with_cp=False)
    assert_near(gradients(in_place), gradients(out_of_place), 1e-12)


RANDOM_ACTIVATIONS = {
    'RReLU': nn.RReLU,
    'PReLU': nn.PReLU,
    'with dropout in place': lambda: nn.Sequential(nn.GELU(), nn.Dropout(0.5, inplace=True)),
}


@pytest.mark.parametrize('act_cfg', RANDOM_ACTIVATIONS.values(), ids=RANDOM_ACTIVATIONS)
def test_gradients_with_random_activations(act_cfg):
    assert_gradients_of_keeping_everything(make(act_cfg=act_cfg))


@pytest.mark.parametrize('with_cp', ['mlp', True])
@pytest.mark.parametrize('kind', VERSIONS)
def test_gradients_with_dropout_and_stochastic_depth(kind, with_cp):
    block = make(
        kind,
        with_cp=with_cp,
        drop_rate=0.5,
        attn_drop_rate=0.3,
        drop_path_rate=0.4,
    )
    assert_gradients_of_keeping_everything(block)
    assert not torch.equal(block(make_input()), block(make_input()))


def kept_bytes(block):
    """Return the bytes that a forward pass leaves allocated, including its result."""
    x = make_input()
    block(x)  # one-time allocations
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        out = block(x)
    assert out.grad_fn is not None
    # record.events() of torch 2.1 counts some allocations twice, for two operators.
    events = record.profiler.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == '[memory]')


@pytest.mark.parametrize('kind', VERSIONS)
def test_the_hidden_channels_are_not_kept(kind):
    everything = kept_bytes(make(kind, with_cp=False))
    without_mlp = kept_bytes(make(kind, with_cp='mlp'))
    nothing = kept_bytes(make(kind, with_cp=True))
    hidden = 8 * TOKENS * 4 * CHANNELS
    # GELU keeps its input, and the second layer its own; a random generator's state is kept for dropout.
    states = torch.get_rng_state().nbytes
    assert everything - without_mlp >= 2 * hidden - 2 * states
    assert nothing < without_mlp


PARTS = ['norm1', 'attn', 'norm2', 'ffn']


@pytest.mark.parametrize(
    ('with_cp', 'is_training', 'recomputed'),
    [
        (False, True, []),
        ('mlp', True, ['ffn']),
        (True, True, PARTS),
        ('mlp', False, []),
    ],
)
def test_what_is_called_again_in_the_backward_pass(with_cp, is_training, recomputed):
    block, calls = make(with_cp=with_cp), Counter()
    for name in PARTS:
        part = block.get_submodule(name)
        part.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    with torch.set_grad_enabled(is_training):
        out = block(make_input())
    assert calls == Counter(PARTS)
    if is_training:
        out.sum().backward()
    assert calls == Counter(PARTS + recomputed)


def test_every_stage_may_have_its_own():
    options = {
        'embed_dims': 8,
        'depths': (1, 1, 1),
        'num_heads': (1, 1, 1),
        'strides': (4, 2, 2),
    }
    model = SwinBackbone(**options, with_cp=[False, 'mlp', True])
    assert [stage.blocks[0].with_cp for stage in model.stages] == [False, 'mlp', True]
    assert [stage.blocks[0].with_cp for stage in SwinBackbone(**options).stages] == [False] * 3


@pytest.mark.parametrize('kind', VERSIONS)
def test_compiled(kind):
    torch._dynamo.reset()
    has_whole_graphs = torch.__version__ >= '2.6'  # earlier versions compile several, with the same results
    compiled = torch.compile(make(kind), backend='aot_eager', fullgraph=has_whole_graphs)
    assert_near(gradients(compiled), gradients(make(kind, with_cp=False)), 1e-10)
    torch._dynamo.reset()
