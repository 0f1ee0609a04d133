"""Changes to the modules of a block have the effect that they have on the reference, recomputed or not."""

import contextlib
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from swin_dense import SwinBackbone, SwinV2Backbone
from tests.conftest import assert_same
from tests.derivatives import doubles, maps_and_gradients

CHANNELS = 8
OPTIONS = {
    'embed_dims': CHANNELS,
    'depths': (2, 2),
    'num_heads': (2, 2),
    'strides': (4, 2),
    'window_size': 4,
}


VERSIONS = [SwinBackbone, SwinV2Backbone]
WITH_CP = [False, True, 'mlp']


def make(backend, kind=SwinBackbone, **options):
    torch.manual_seed(0)
    options = {**OPTIONS, 'drop_path_rate': 0.0, **options}
    model = kind(**options, attn_backend=backend).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def make_image():
    values = torch.linspace(-2, 2, 11_100, dtype=torch.float64)
    return values.sin().view(2, 3, 37, 50).requires_grad_()


def block_input():
    values = torch.linspace(-1, 1, 198 * CHANNELS, dtype=torch.float64)
    return values.view(2, 9, 11, CHANNELS).requires_grad_()


def run(model, img):
    """Return the maps without and with gradients, and the gradients of the image and of all trained parameters."""
    torch.manual_seed(1)
    with torch.no_grad():
        alone = model(img)
    torch.manual_seed(1)
    return [*alone, *maps_and_gradients(model, img)]


# --- changes to a model -----------------------------------------------------------------------------------------------


def double_by_a_hook(model, name):
    model.get_submodule(name).register_forward_hook(lambda module, args, out: 2 * out)


def double_by_a_global_hook(model, name):
    target = model.get_submodule(name)
    return torch_module.register_module_forward_hook(
        lambda module, args, out: 2 * out if module is target else None
    ).remove


def double_by_a_module_that_has_only_forward(model, name):
    class Doubled(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.window_size = getattr(inner, 'window_size', None)  # which ShiftedWindowAttention reads

        def forward(self, *args):
            return 2 * self.inner(*args)

    parent, _, child = name.rpartition('.')
    setattr(model.get_submodule(parent), child, Doubled(model.get_submodule(name)))


def double_by_a_subclass(model, name):
    module = model.get_submodule(name)
    original = type(module)

    class Doubled(original):
        def forward(self, *args):
            return 2 * super().forward(*args)

    module.__class__ = Doubled


def double_by_another_forward(model, name):
    module = model.get_submodule(name)
    original = module.forward
    module.forward = lambda *args: 2 * original(*args)


def double_by_the_class(model, name):
    """Replace the method of the class, also of torch's classes, for this one module."""
    target = model.get_submodule(name)
    kind = next(kind for kind in type(target).__mro__ if 'forward' in vars(kind))
    original = kind.forward

    def undo():
        kind.forward = original

    def forward(self, *args):
        out = original(self, *args)
        return 2 * out if self is target else out

    kind.forward = forward
    return undo


# The first is the one that the others are compared with.
WAYS = [
    double_by_a_hook,
    double_by_a_global_hook,
    double_by_a_module_that_has_only_forward,
    double_by_a_subclass,
    double_by_another_forward,
    double_by_the_class,
]
OF_A_BLOCK = [
    '',
    '.norm1',
    '.attn',
    '.attn.w_msa',
    '.attn.w_msa.qkv',
    '.attn.w_msa.proj',
    '.attn.w_msa.proj_drop',
    '.drop_path',
    '.norm2',
    '.ffn',
    '.ffn.layers',
    '.ffn.layers.0.0',
    '.ffn.layers.0.1',
    '.ffn.layers.1',
]
MODULES = [
    'patch_embed',
    'patch_embed.projection',
    'patch_embed.norm',
    'pos_drop',
    'norm0',
    'norm1',
    'stages.0.downsample',
    'stages.0.downsample.norm',
    'stages.0.downsample.reduction',
    *(f'stages.0.blocks.1{name}' for name in OF_A_BLOCK),
    *(f'stages.1.blocks.0{name}' for name in OF_A_BLOCK),
]


@contextlib.contextmanager
def doubled(way, name, *models):
    undos = [way(model, name) for model in models]
    try:
        yield
    finally:
        for undo in reversed(undos):
            if undo:
                undo()


def narrow_the_heads(model):
    """Prune one of two heads."""
    w_msa = model.stages[0].blocks[1].attn.w_msa
    qkv = nn.Linear(CHANNELS, 3 * CHANNELS // 2).double()
    proj = nn.Linear(CHANNELS // 2, CHANNELS).double()
    with torch.no_grad():
        qkv.weight.copy_(w_msa.qkv.weight[::2])
        qkv.bias.fill_(0.1)
        proj.weight.copy_(w_msa.proj.weight[:, ::2])
        proj.bias.fill_(0.2)
    w_msa.qkv = qkv
    w_msa.proj = proj
    w_msa.num_heads = 1
    w_msa.relative_position_bias_table = nn.Parameter(w_msa.relative_position_bias_table[:, :1].clone())


# These combinations have each version and each way of training; test_any_combination draws from all.
@pytest.mark.parametrize(
    ('with_cp', 'version'),
    [
        (False, SwinBackbone),
        (True, SwinV2Backbone),
        ('mlp', SwinBackbone),
    ],
)
@pytest.mark.parametrize(
    'way',
    WAYS[1:],
    ids=lambda way: way.__name__,
)
def test_what_replaces_the_result_of_any_module_is_used(way, with_cp, version):
    def run_doubled(name, how):
        model = make('auto', version, with_cp=with_cp)
        with doubled(how, name, model):
            return run(model, make_image())

    untouched = run(make('auto', version, with_cp=with_cp), make_image())
    for name in MODULES:
        found = run_doubled(name, way)
        assert_same(found, run_doubled(name, double_by_a_hook))
        assert not all(map(torch.allclose, found[:2], untouched[:2])), name


def test_pruned_heads():
    ours, plain = make('auto'), make('reference')
    narrow_the_heads(ours)
    narrow_the_heads(plain)
    assert_same(run(ours, make_image()), run(plain, make_image()))


def flops_by_module(model, is_training):
    # Before torch 2.4 the counter sees only the modules that it is given.
    tracked = None if find_spec('torch.utils.module_tracker') else model
    if tracked is not None and is_training and isinstance(model, SwinV2Backbone):
        pytest.skip('the counter of torch before 2.4 asserts a backward order of modules that V2 does not follow')
    with FlopCounterMode(tracked, display=False) as counter, torch.set_grad_enabled(is_training):
        loss = sum(out.sum() for out in model(make_image()))
        if is_training:
            loss.backward()
    return {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}


@pytest.mark.parametrize('version', VERSIONS)
@pytest.mark.parametrize('is_training', [False, True])
def test_a_flop_counter_sees_every_product(is_training, version):
    found = flops_by_module(make('auto', version), is_training)
    assert found == flops_by_module(make('reference', version), is_training)
    layers = ('qkv', 'proj', 'layers.0.0', 'layers.1', 'projection', 'reduction')
    assert sum(name.endswith(layers) for name in found) == 4 * 4 + 2


def gradients_under_autocast(model, forward, backward):
    """Return the gradients, as one tensor, of passes of which autocast is around the forward and backward pass."""
    with torch.autocast('cpu', torch.bfloat16, enabled=forward):
        outs = model(make_image().float())
        loss = sum(out.float().square().mean() for out in outs)
    with torch.autocast('cpu', torch.bfloat16, enabled=backward):
        grads = torch.autograd.grad(loss, list(model.parameters()))
    assert {grad.dtype for grad in grads} == {torch.float32}
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize('version', VERSIONS)
@pytest.mark.parametrize(
    ('forward', 'tolerance'),
    [
        (False, 0.05),
        (True, 0.1),
    ],
)
@pytest.mark.parametrize('with_cp', [False, 'mlp'])
def test_autocast_around_forward_and_backward_passes(forward, tolerance, version, with_cp):
    expected = gradients_under_autocast(make('auto', version).float(), forward, False)
    distance = tolerance * expected.abs().max().item()
    for backend in ('auto', 'reference'):
        for backward in (False, True):
            model = make(backend, version, with_cp=with_cp).float()
            found = gradients_under_autocast(model, forward, backward)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=distance)


@pytest.mark.parametrize('with_cp', WITH_CP)
@pytest.mark.parametrize('version', VERSIONS)
@pytest.mark.parametrize('backend', ['auto', 'reference'])
def test_torch_func(backend, version, with_cp):
    """Test grad, vjp, jacrev and per-sample gradients against autograd."""
    model = make(backend, version, with_cp=with_cp)
    parameters = dict(model.named_parameters())
    img = make_image().detach()[:, :, :20, :24]

    def loss(parameters, img):
        outs = torch.func.functional_call(model, parameters, (img,))
        return sum(out.square().mean() for out in outs)

    def gradients(img):
        return torch.autograd.grad(loss(parameters, img), list(parameters.values()))

    assert_same(torch.func.grad(loss)(parameters, img).values(), gradients(img))
    per_image = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))
    singles = per_image(parameters, img[:, None])
    second = [single[1] for single in singles.values()]
    assert_same(second, gradients(img[1:]), rtol=1e-8, atol=1e-9)

    values, pull = torch.func.vjp(lambda img: model(img)[1], img)
    pulled = pull(torch.ones_like(values))
    total = model(img.requires_grad_())[1].sum()
    assert_same(pulled, torch.autograd.grad(total, img))

    block = model.stages[0].blocks[1]
    x = block_input()

    def totals(x):
        return block(x).flatten(1).sum(1)

    rows = [torch.autograd.grad(total, x, retain_graph=True)[0] for total in totals(x)]
    assert_same(torch.func.jacrev(totals)(x), rows)


@pytest.mark.parametrize('backend', ['auto', 'reference'])
def test_a_different_default_device(backend):
    """A tensor created on the default device by mistake would lose its values on 'meta'."""
    model = make(backend, use_abs_pos_embed=True, drop_path_rate=0.5, drop_rate=0.1)
    img = make_image()
    expected = run(model, img)
    with torch.device('meta'):
        found = run(model, img)
        with torch.no_grad():  # a size that no cache contains yet
            img = doubles(1, 3, 41, 67, device='cpu')
            model.eval()(img)
    assert_same(found, expected)


def test_parameters_of_a_fully_dropped_branch_get_zero_gradients():
    model = make('auto', drop_path_rate=1.0).train()
    sum(out.sum() for out in model(make_image())).backward()
    assert model.stages[0].blocks[0].norm1.weight.grad.any()
    for parameter in model.stages[-1].blocks[-1].parameters():
        assert not parameter.grad.any()


@pytest.mark.parametrize('version', VERSIONS)
@pytest.mark.parametrize('frozen_stages', [-1, 2])
def test_a_reentrant_checkpoint_drops_the_same_attention_weights(version, frozen_stages):
    """It computes the maps without gradients, and again with them: both must be one function of the random state."""
    model = make('auto', version, attn_drop_rate=0.3, frozen_stages=frozen_stages).train()
    found = []
    for function in (model, lambda img: checkpoint(model, img, use_reentrant=True)):
        img = make_image()
        torch.manual_seed(1)
        maps = function(img)
        sum(level.square().mean() for level in maps).backward()
        found.append([*maps, img.grad])
    assert_same(*found)


def test_forward_mode_gradients():
    model, img = make('auto').eval(), make_image()
    tangent = torch.randn_like(img)
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(img.detach(), tangent))[1]
        forward = forward_ad.unpack_dual(out).tangent
    total = model(img)[1].sum()
    (backward,) = torch.autograd.grad(total, img)
    torch.testing.assert_close(forward.sum(), (backward * tangent).sum())


def second_order_gradients(backend, version, with_cp):
    block = make(backend, version, with_cp=with_cp).stages[0].blocks[1]
    x = block_input()
    penalty = block(x).square().mean()
    (grad,) = torch.autograd.grad(penalty, x, create_graph=True)
    wanted = [x, *block.parameters()]
    return torch.autograd.grad(grad.square().mean(), wanted, allow_unused=True)


@pytest.mark.parametrize('with_cp', WITH_CP)
@pytest.mark.parametrize('version', VERSIONS)
def test_second_order_gradients_of_a_block(version, with_cp):
    found = second_order_gradients('auto', version, with_cp)
    assert_same(found, second_order_gradients('reference', version, False), rtol=1e-8, atol=1e-8)


def gradient_penalty(model):
    img = make_image()
    penalty = model(img)[1].square().mean()
    (grad,) = torch.autograd.grad(penalty, img, create_graph=True)
    return grad.square().mean()


def test_a_gradient_penalty_with_frozen_stages_needs_the_reference():
    """Torch's attention, which computes a bias that does not train, has no second derivatives."""
    penalty = gradient_penalty(make('reference', frozen_stages=2))
    torch.testing.assert_close(penalty, gradient_penalty(make('reference')))
    penalty.backward()
    if hasattr(torch.library, 'custom_op'):  # torch 2.1 computes attention with a mask by plain operations
        with pytest.raises(RuntimeError, match=r'derivative for .* is not implemented'):
            gradient_penalty(make('auto', frozen_stages=2)).backward()


OPTIONS_TO_COMBINE = st.fixed_dictionaries(
    {
        'kind': st.sampled_from(VERSIONS),
        'with_cp': st.sampled_from(WITH_CP),
        'drop_path_rate': st.sampled_from([0.0, 0.7]),
        'qkv_bias': st.booleans(),
        'use_abs_pos_embed': st.booleans(),
        'frozen_stages': st.sampled_from([-1, 0, 1]),
        'window_size': st.sampled_from([2, 4, (3, 5)]),
    }
)
ACTS = st.sampled_from(['GELU', 'ReLU', 'SiLU', 'Hardswish'])
CHANGE = st.tuples(st.sampled_from(WAYS), st.sampled_from(MODULES))
CHANGES = st.lists(CHANGE, max_size=2)
IN_EVAL = st.lists(st.sampled_from(['stages.0', 'stages.1.blocks.0', 'stages.1.blocks.1.drop_path']), max_size=2)
FROZEN = ['stages.0.blocks.1.attn', 'stages.1.blocks.0.ffn', 'stages.0.blocks.1.ffn.layers.0.0']
FROZEN = st.lists(st.sampled_from(FROZEN), max_size=2)
SIDES = st.integers(1, 40)
SIZES = st.tuples(
    st.integers(1, 2),
    st.just(3),
    SIDES,
    SIDES,
)


@settings(max_examples=40, deadline=None)
@given(OPTIONS_TO_COMBINE, ACTS, CHANGES, IN_EVAL, FROZEN, SIZES)
def test_any_combination(options, act, changes, in_eval, frozen, size):
    """Combine random changes, modes of modules, frozen modules, checkpointing and sizes."""
    # An in-place activation is compared with the same activation out of place.
    in_place = {'type': act} if act == 'GELU' else {'type': act, 'inplace': True}
    ours = make('auto', **options, act_cfg=in_place)
    plain = make('reference', **options, act_cfg={'type': act})
    for model in (ours, plain):
        for name in in_eval:
            model.get_submodule(name).eval()
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
    img = torch.randn(size, dtype=torch.float64, requires_grad=True)
    with contextlib.ExitStack() as stack:
        # Modules before those that contain them: a module that has only forward hides the names of what it contains.
        for way, name in sorted(changes, key=lambda change: -change[1].count('.')):
            stack.enter_context(doubled(way, name, ours, plain))
        assert_same(run(ours, img), run(plain, img))
        assert_same(run(ours.eval(), img), run(plain.eval(), img))
