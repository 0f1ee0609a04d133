"""Changes to the modules of a block have the effect that they have on the reference, recomputed or not."""

import contextlib
import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.flop_counter import FlopCounterMode

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.models.attention import WindowAttention
from swin_dense.models.layers import DropPath

CHANNELS = 8
OPTIONS = {'embed_dims': CHANNELS, 'depths': (2, 2), 'num_heads': (2, 2), 'strides': (4, 2), 'window_size': 4}


VERSIONS = [SwinBackbone, SwinV2Backbone]
WITH_CP = [False, True, 'mlp']


def make(backend, kind=SwinBackbone, **options):
    torch.manual_seed(0)
    model = kind(**{**OPTIONS, 'drop_path_rate': 0.0, **options}, attn_backend=backend).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def make_image():
    values = torch.linspace(-2, 2, 2 * 3 * 37 * 50, dtype=torch.float64).sin()
    return values.view(2, 3, 37, 50).requires_grad_()


def block_input(**options):
    return torch.linspace(-1, 1, 2 * 9 * 11 * CHANNELS, **options).view(2, 9, 11, CHANNELS)


def run(model, img):
    """Return the maps without and with gradients, and the gradients of the image and of all trainable parameters."""
    torch.manual_seed(1)
    with torch.no_grad():
        alone = model(img)
    torch.manual_seed(1)
    outs = model(img)
    wanted = [tensor for tensor in (img, *model.parameters()) if tensor.requires_grad]
    grads = torch.autograd.grad(sum((out * out).mean() for out in outs), wanted, allow_unused=True)
    return [*alone, *(out.detach() for out in outs), *grads]


def assert_same(ours, expected):
    for found, wanted in zip(ours, expected, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-9)


# --- changes to a model -----------------------------------------------------------------------------------------------


def monte_carlo_dropout(model):
    model.eval()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()


def listen_to_all(model):
    """Register a global hook that doubles the output of every GELU; return a function that removes it."""
    handle = torch_module.register_module_forward_hook(
        lambda module, args, out: 2 * out if isinstance(module, nn.GELU) else None
    )
    return handle.remove


def listen_to_one(model):
    model.stages[0].blocks[1].ffn.layers[0][0].register_forward_hook(lambda module, args, out: 2 * out)


def change_an_input(model):
    model.stages[1].blocks[0].attn.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def subclass_a_block(model):
    block = model.stages[0].blocks[1]
    original = type(block)
    block.__class__ = type(
        'Doubled',
        (original,),
        {'forward_modules': lambda self, x: 2 * original.forward_modules(self, x)},
    )


def subclass_attention(model):
    attn = model.stages[0].blocks[0].attn
    original = type(attn)
    attn.__class__ = type('Halved', (original,), {'forward': lambda self, x: original.forward(self, x) / 2})


def attend_to_the_whole_map(model):
    class Mean(nn.Module):
        def forward(self, x):
            return x - x.mean((1, 2), keepdim=True)

    model.stages[0].blocks[0].attn = Mean()


def mix_tokens_in_the_mlp(model):
    class Depthwise(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4 * CHANNELS, 4 * CHANNELS, 3, padding=1, groups=4 * CHANNELS).double()
            nn.init.constant_(self.conv.weight, 0.1)
            nn.init.constant_(self.conv.bias, 0.1)

        def forward(self, x):
            return self.conv(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    model.stages[0].blocks[1].ffn.layers[0].append(Depthwise())


def project_by_a_module_that_has_only_forward(model):
    class LoRA(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear
            self.down = nn.Linear(linear.in_features, 2).double()
            self.up = nn.Linear(2, linear.out_features).double()
            for parameter in (*self.down.parameters(), *self.up.parameters()):
                nn.init.constant_(parameter, 0.1)

        def forward(self, x):
            return self.linear(x) + self.up(self.down(x))

    for module in [*model.modules()]:
        if isinstance(module, WindowAttention):
            module.qkv = LoRA(module.qkv)


def replace_the_stem(model):
    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.Conv2d(4, CHANNELS, 2, 2)).double()
            for parameter in self.parameters():
                nn.init.constant_(parameter, 0.1)

        def forward(self, img):
            return self.convs(img)

    model.patch_embed.projection = Stem()


def replace_the_reduction(model):
    class Doubled(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return 2 * self.linear(x)

    model.stages[0].downsample.reduction = Doubled(model.stages[0].downsample.reduction)


def listen_to_the_merging(model):
    model.stages[0].downsample.reduction.register_forward_hook(lambda module, args, out: 2 * out)


def replace_the_way_through_a_block(model):
    block = model.stages[0].blocks[0]
    block.forward_modules = lambda x: x + block.attn(block.norm1(x))


def replace_a_method_of_a_class(model):
    original = DropPath.forward
    DropPath.forward = lambda self, x: 3 * original(self, x)

    def undo():
        DropPath.forward = original

    return undo


def replace_a_method_of_a_base_class(model):
    original = WindowAttention.forward
    WindowAttention.forward = lambda self, x, *windows: 3 * original(self, x, *windows)

    def undo():
        WindowAttention.forward = original

    return undo


def replace_the_forward_of_torchs_layer_norm(model):
    original = nn.LayerNorm.forward
    nn.LayerNorm.forward = lambda self, x: 3 * original(self, x)

    def undo():
        nn.LayerNorm.forward = original

    return undo


def replace_the_forward_of_torchs_linear(model):
    original = nn.Linear.forward
    nn.Linear.forward = lambda self, x: 3 * original(self, x)

    def undo():
        nn.Linear.forward = original

    return undo


def replace_a_layer(model):
    class Low(nn.Linear):  # similar to LoRA
        def forward(self, x):
            return super().forward(x) + x.sum(-1, keepdim=True)

    first = model.stages[0].blocks[0].ffn.layers[0]
    new = Low(CHANNELS, 4 * CHANNELS).double()
    new.load_state_dict(first[0].state_dict())
    first[0] = new


class MapNorm(nn.LayerNorm):
    """A norm whose statistics are those of the whole map."""

    def forward(self, x):
        return nn.functional.layer_norm(x, x.shape[1:]) * self.weight + self.bias


class Centring(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return x - x.mean((1, 2), keepdim=True)


def subclass_a_norm_with_statistics_of_the_map(model):
    block = model.stages[0].blocks[1]
    new = MapNorm(CHANNELS).double()
    new.load_state_dict(block.norm1.state_dict())
    block.norm1 = new


def subclass_a_linear_layer_that_centres_the_map(model):
    ffn = model.stages[0].blocks[1].ffn
    new = Centring(4 * CHANNELS, CHANNELS).double()
    new.load_state_dict(ffn.layers[1].state_dict())
    ffn.layers[1] = new


def replace_a_norm(model):
    model.stages[0].blocks[1].norm2 = nn.Identity()


def put_a_linear_layer_where_a_norm_was(model):
    torch.manual_seed(5)
    model.stages[0].blocks[1].norm2 = nn.Linear(CHANNELS, CHANNELS).double()


def parametrize(model):
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    nn.utils.parametrize.register_parametrization(model.stages[0].blocks[1].ffn.layers[1], 'weight', Double())


def patch_a_forward(model):
    fc1 = model.stages[0].blocks[0].ffn.layers[0][0]
    fc1.forward = lambda x: 2 * nn.functional.linear(x, fc1.weight, fc1.bias)


def narrow_the_heads(model):
    """Prune one of two heads."""
    w_msa = model.stages[0].blocks[1].attn.w_msa
    qkv, proj = nn.Linear(CHANNELS, 3 * CHANNELS // 2).double(), nn.Linear(CHANNELS // 2, CHANNELS).double()
    with torch.no_grad():
        qkv.weight.copy_(w_msa.qkv.weight[::2])
        proj.weight.copy_(w_msa.proj.weight[:, ::2])
        qkv.bias.fill_(0.1)
        proj.bias.fill_(0.2)
    table = nn.Parameter(w_msa.relative_position_bias_table[:, :1].clone())
    w_msa.qkv, w_msa.proj, w_msa.num_heads, w_msa.relative_position_bias_table = qkv, proj, 1, table


GLOBAL_CHANGES = [
    listen_to_all,
    replace_a_method_of_a_class,
    replace_a_method_of_a_base_class,
    replace_the_forward_of_torchs_layer_norm,
    replace_the_forward_of_torchs_linear,
]
CHANGES = [
    monte_carlo_dropout,
    *GLOBAL_CHANGES,
    listen_to_one,
    listen_to_the_merging,
    change_an_input,
    subclass_a_block,
    subclass_attention,
    attend_to_the_whole_map,
    mix_tokens_in_the_mlp,
    project_by_a_module_that_has_only_forward,
    replace_the_stem,
    replace_the_reduction,
    replace_the_way_through_a_block,
    replace_a_layer,
    subclass_a_norm_with_statistics_of_the_map,
    subclass_a_linear_layer_that_centres_the_map,
    replace_a_norm,
    put_a_linear_layer_where_a_norm_was,
    parametrize,
    patch_a_forward,
]


@contextlib.contextmanager
def changed(change, *models):
    is_for_all = change in GLOBAL_CHANGES
    undos = [change(model) for model in models[: 1 if is_for_all else None]]
    try:
        yield
    finally:
        for undo in undos:
            if callable(undo):
                undo()


# These combinations have each version and each way of training; test_any_combination draws from all.
@pytest.mark.parametrize(('with_cp', 'version'), [(False, SwinBackbone), (True, SwinV2Backbone), ('mlp', SwinBackbone)])
@pytest.mark.parametrize('change', CHANGES, ids=lambda change: change.__name__)
def test_changes_have_the_same_effect_as_on_the_reference(change, with_cp, version):
    options = {'kind': version, 'with_cp': with_cp, 'drop_rate': 0.3 if change is monte_carlo_dropout else 0.0}
    ours, plain = make('auto', **options), make('reference', **options)
    before = run(ours.eval() if change is monte_carlo_dropout else ours, make_image())
    with changed(change, ours, plain):
        after = run(ours, make_image())
        assert_same(after, run(plain, make_image()))
    assert not torch.allclose(before[0], after[0]) or not torch.allclose(before[1], after[1])


def test_pruned_heads():
    ours, plain = make('auto'), make('reference')
    for model in (ours, plain):
        narrow_the_heads(model)
    assert_same(run(ours, make_image()), run(plain, make_image()))


def test_attention_dropout_follows_the_mode_of_its_module():
    """Monte-Carlo dropout puts only the dropout modules into training mode."""
    model = make('auto', attn_drop_rate=0.5).eval()
    still = model(make_image())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    assert not torch.allclose(model(make_image())[0], still[0])
    assert model.stages[0].blocks[0].attn.w_msa.attn_drop.p == 0.5


def test_global_hooks_see_every_layer():
    names = []
    handle = torch_module.register_module_forward_hook(lambda module, args, out: names.append(type(module).__name__))
    try:
        make('auto', depths=(2, 2, 2, 2), num_heads=(2, 2, 2, 2), strides=(4, 2, 2, 2))(make_image())
    finally:
        handle.remove()
    assert names.count('Linear') == 8 * 4 + 3
    assert names.count('SwinBlock') == 8


@pytest.mark.parametrize('version', VERSIONS)
@pytest.mark.parametrize('is_training', [False, True])
def test_a_flop_counter_sees_every_product(is_training, version):
    totals = []
    for backend in ('auto', 'reference'):
        model = make(backend, version)
        # Before torch 2.4 the counter sees only the modules that it is given.
        tracked = None if find_spec('torch.utils.module_tracker') else model
        if tracked is not None and is_training and version is SwinV2Backbone:
            pytest.skip('the counter of torch before 2.4 asserts a backward order of modules that V2 does not follow')
        with FlopCounterMode(tracked, display=False) as counter, torch.set_grad_enabled(is_training):
            loss = sum(out.sum() for out in model(make_image()))
            if is_training:
                loss.backward()
        totals.append({name: sum(count.values()) for name, count in counter.get_flop_counts().items()})
    assert totals[0] == totals[1]
    layers = ('qkv', 'proj', 'layers.0.0', 'layers.1', 'projection', 'reduction')
    assert sum(name.endswith(layers) for name in totals[0]) == 4 * 4 + 2


@pytest.mark.parametrize('with_cp', WITH_CP)
def test_a_hook_is_called_once_per_pass_of_its_module(with_cp):
    """Each forward pass of a module calls it once; checkpointing runs a second forward pass."""
    model, calls = make('auto', with_cp=with_cp), {}
    for name, module in model.named_modules():
        if name and not name.endswith('.attn_drop'):
            module.register_forward_hook(lambda *_, name=name: calls.update({name: calls.get(name, 0) + 1}))
    sum(out.sum() for out in model(make_image())).backward()
    for name, count in calls.items():
        is_recomputed = with_cp and '.blocks.' in name and name.count('.') > 3
        if with_cp == 'mlp':
            is_recomputed = '.ffn' in name
        times = 2 if name.endswith('drop_path') else 1
        # Recomputation stops early once all saved tensors are restored.
        assert times <= count <= 2 * times if is_recomputed else count == times, name
    assert 'stages.0.downsample.norm' in calls
    assert 'stages.1.blocks.1.ffn.layers.0.1' in calls


def test_backward_hooks():
    seen = []
    model = make('auto')
    model.stages[0].blocks[0].attn.w_msa.proj.register_full_backward_hook(lambda *_: seen.append('proj'))
    model.stages[1].blocks[0].register_full_backward_hook(lambda *_: seen.append('block'))
    run(model, make_image())
    assert seen == ['block', 'proj']


def test_without_gradients_a_hook_sees_the_whole_map_once():
    model, seen = make('auto').eval(), []
    model.stages[0].blocks[1].norm2.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    model.stages[0].blocks[0].register_forward_hook(lambda module, args, out: seen.append(out.shape))
    with torch.no_grad():
        model(make_image())
    assert seen == [(2, 10, 13, CHANNELS)] * 2


@pytest.mark.parametrize(
    'options',
    [
        {'qkv_bias': False},
        {'use_rel_pos_bias': False},
        {'act_cfg': {'type': 'ReLU'}},
        {'norm_cfg': {'type': 'LN', 'elementwise_affine': False}},
        {'drop_rate': 0.5},
        {'drop_path_rate': 0.9},
        {'drop_path_rate': 0.9, 'with_cp': True},
        {'drop_path_rate': 0.9, 'drop_rate': 0.5, 'with_cp': 'mlp'},
        {'qk_scale': 0.0},
        {'use_shift': False},
    ],
    ids=str,
)
def test_every_option_of_a_block_gives_the_reference_results(options):
    assert_same(run(make('auto', **options), make_image()), run(make('reference', **options), make_image()))


@pytest.mark.parametrize('version', VERSIONS)
def test_autocast_around_forward_and_backward_passes(version):
    outer = make('auto', version).float(), make('reference', version).float()
    results = []
    for forward, backward in [(False, False), (False, True), (True, False), (True, True)]:
        for model in outer:
            img = make_image().float()
            with torch.autocast('cpu', torch.bfloat16, enabled=forward):
                loss = sum(out.float().square().mean() for out in model(img))
            with torch.autocast('cpu', torch.bfloat16, enabled=backward):
                grads = torch.autograd.grad(loss, list(model.parameters()))
            assert all(grad.dtype == torch.float32 and grad.isfinite().all() for grad in grads)
            results.append(torch.cat([grad.flatten() for grad in grads]))
    exact, low = results[0], results[4]
    for index in (1, 2, 3):  # autocast around the backward pass only
        torch.testing.assert_close(results[index], exact, rtol=0.05, atol=0.05 * exact.abs().max().item())
    for index in (5, 6, 7):
        torch.testing.assert_close(results[index], low, rtol=0.1, atol=0.1 * low.abs().max().item())


def test_torch_func():
    """Test grad, vjp, jacrev and per-sample gradients with each backend."""
    img = make_image().detach()[:, :, :20, :24]
    for with_cp in WITH_CP:
        expected = None
        for backend in ('auto', 'sdpa', 'reference'):
            model = make(backend, with_cp=with_cp)
            parameters = dict(model.named_parameters())

            def loss(parameters, img, model=model):
                return sum(out.square().mean() for out in torch.func.functional_call(model, parameters, (img,)))

            grads = torch.func.grad(loss)(parameters, img)
            values, pull = torch.func.vjp(lambda img, model=model: model(img)[1], img)
            (pulled,) = pull(torch.ones_like(values))
            singles = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, img[:, None])
            jacobian = torch.func.jacrev(lambda x, block=model.stages[0].blocks[1]: block(x).sum((1, 2, 3)))(
                block_input(dtype=torch.float64)
            )
            found = [*grads.values(), pulled, *singles.values(), jacobian]
            expected = expected or [
                *torch.autograd.grad(loss(parameters, img), list(parameters.values())),
                *found[len(parameters) :],
            ]
            assert_same([t.detach() for t in found], [t.detach() for t in expected])
            for name, single in zip(parameters, singles.values(), strict=True):
                (alone,) = torch.autograd.grad(loss(parameters, img[1:]), parameters[name])
                torch.testing.assert_close(single[1], alone, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize('backend', ['auto', 'sdpa', 'reference'])
def test_a_different_default_device(backend):
    """A tensor created on the default device by mistake would lose its values on 'meta'."""
    model, img = make(backend, use_abs_pos_embed=True, drop_path_rate=0.5, drop_rate=0.1), make_image()
    expected = run(model, img)
    torch.set_default_device('meta')
    try:
        # Sizes that no cache contains yet.
        found = run(model, img)
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, 41, 67, dtype=torch.float64, device='cpu'))
    finally:
        torch.set_default_device(None)
    assert_same(found, expected)


@pytest.mark.parametrize('version', VERSIONS)
def test_copies_and_pickles_give_the_same_results(version):
    model = make('auto', version)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(run(twin, make_image()), run(make('reference', version), make_image()))


def test_threads():
    ours, plain = make('auto').eval(), make('reference').eval()
    images = [torch.randn(1, 3, 20 + 5 * i, 50 - 3 * i, dtype=torch.float64) for i in range(6)]
    expected = [plain(img)[1].detach() for img in images]

    def wrong_images(start):
        order = [(start + i) % len(images) for i in range(18)]
        return [index for index in order if not torch.allclose(ours(images[index])[1], expected[index], atol=1e-9)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(wrong_images, range(4))) == [[]] * 4


def test_parameters_of_a_fully_dropped_branch_get_zero_gradients():
    model = make('auto', drop_path_rate=1.0).train()
    sum(out.sum() for out in model(make_image())).backward()
    last = model.stages[-1].blocks[-1]
    assert not model.stages[0].blocks[0].norm1.weight.grad.eq(0).all()
    assert all(parameter.grad.eq(0).all() for parameter in last.parameters())


def test_forward_mode_gradients():
    model, img = make('auto').eval(), make_image().detach()
    tangent = torch.randn_like(img)
    with torch.autograd.forward_ad.dual_level():
        out = model(torch.autograd.forward_ad.make_dual(img, tangent))[1]
        forward = torch.autograd.forward_ad.unpack_dual(out).tangent
    img.requires_grad_()
    out = model(img)[1]
    (backward,) = torch.autograd.grad(out, img, torch.ones_like(out))
    torch.testing.assert_close(forward.sum(), (backward * tangent).sum())


@pytest.mark.parametrize('with_cp', WITH_CP)
@pytest.mark.parametrize('version', VERSIONS)
def test_batched_gradients(version, with_cp):
    model, img = make('auto', version, with_cp=with_cp), make_image()
    out = model(img)[1]
    vectors = torch.randn(3, *out.shape, dtype=torch.float64)
    (batched,) = torch.autograd.grad(out, img, vectors, is_grads_batched=True, retain_graph=True)
    for vector, ours in zip(vectors, batched, strict=True):
        torch.testing.assert_close(ours, torch.autograd.grad(out, img, vector, retain_graph=True)[0])


@pytest.mark.parametrize('version', VERSIONS)
def test_second_order_gradients_of_a_block(version):
    penalties = []
    for backend in ('auto', 'reference'):
        block = make(backend, version).stages[0].blocks[1]
        x = block_input(dtype=torch.float64).requires_grad_()
        (grad,) = torch.autograd.grad(block(x).square().mean(), x, create_graph=True)
        penalties.append(torch.autograd.grad(grad.square().mean(), list(block.parameters()), allow_unused=True))
    for ours, expected in zip(*penalties, strict=True):
        if expected is not None:
            torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize('wanted', ['attn.w_msa.proj.weight', 'norm1.bias', 'ffn.layers.0.0.bias', 'norm2.weight'])
@pytest.mark.parametrize('with_cp', WITH_CP)
@pytest.mark.parametrize('version', VERSIONS)
def test_a_partly_frozen_block(version, with_cp, wanted):
    gradients = []
    for backend in ('auto', 'reference'):
        block = make(backend, version, with_cp=with_cp).stages[0].blocks[1].requires_grad_(False)
        block.get_parameter(wanted).requires_grad_(True)
        gradients.append(
            torch.autograd.grad(block(block_input(dtype=torch.float64)).square().sum(), block.get_parameter(wanted))
        )
    torch.testing.assert_close(*gradients)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_combination(data):
    """Combine random changes, modes of modules, frozen modules, checkpointing and sizes."""
    options = {
        'kind': data.draw(st.sampled_from(VERSIONS)),
        'with_cp': data.draw(st.sampled_from(WITH_CP)),
        'drop_path_rate': data.draw(st.sampled_from([0.0, 0.7])),
        'qkv_bias': data.draw(st.booleans()),
        'use_abs_pos_embed': data.draw(st.booleans()),
        'frozen_stages': data.draw(st.sampled_from([-1, 0, 1])),
        'window_size': data.draw(st.sampled_from([2, 4, (3, 5)])),
    }
    # An in-place activation is compared with the same activation out of place.
    act = data.draw(st.sampled_from([None, 'ReLU', 'SiLU', 'Hardswish']))
    ours, plain = (
        make(backend, **options, **({'act_cfg': {'type': act, 'inplace': inplace}} if act else {}))
        for backend, inplace in (('auto', True), ('reference', False))
    )
    changes = data.draw(st.lists(st.sampled_from(CHANGES[1:]), max_size=3, unique=True))
    in_eval = data.draw(
        st.lists(st.sampled_from(['stages.0', 'stages.1.blocks.0', 'stages.1.blocks.1.drop_path']), max_size=2)
    )
    frozen = data.draw(st.lists(st.sampled_from(['stages.0.blocks.1.attn', 'stages.1.blocks.0.ffn']), max_size=2))
    for model in (ours, plain):
        for name in in_eval:
            model.get_submodule(name).eval()
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
    img = torch.randn(
        data.draw(st.integers(1, 2)),
        3,
        data.draw(st.integers(1, 40)),
        data.draw(st.integers(1, 40)),
        dtype=torch.float64,
    )
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(changed(change, ours, plain))
        assert_same(run(ours, img.requires_grad_()), run(plain, img))
        assert_same(run(ours.eval(), img), run(plain.eval(), img))
