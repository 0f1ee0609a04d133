"""The backbone under tools that watch, replace, move or quantise its modules."""

import copy
import functools
import io
import pickle
from unittest import mock

import pytest
import torch
from torch import nn

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.models import layers
from swin_dense.models.layers import Linear
from swin_dense.ops import linear
from tests.conftest import TINY, assert_near, assert_same, randomize
from tests.derivatives import doubles

VERSIONS = [SwinBackbone, SwinV2Backbone]
SIZE = (1, 3, 50, 71)  # every stage has padding


def make(kind=SwinBackbone, **options):
    model = kind(**TINY, window_size=4, drop_path_rate=0.0, **options)
    return randomize(model).double().eval()


def make_image(batch=1):
    generator = torch.Generator().manual_seed(0)
    return doubles(batch, *SIZE[1:], generator=generator)


def lend_by_hooks(module, lend, take_back):
    module.register_forward_pre_hook(lambda *_: lend())
    module.register_forward_hook(lambda *_: take_back())


def lend_by_replacing_forward(module, lend, take_back):
    """As accelerate's cpu_offload does."""
    original = module.forward

    def forward(*args):
        lend()
        out = original(*args)
        take_back()
        return out

    module.forward = forward


def lend_parameters(module, lend, names, name):
    """Let the module's own parameters be NaN outside of its forward pass."""
    own = dict(module.named_parameters(recurse=False))
    values = {key: parameter.detach().clone() for key, parameter in own.items()}

    def fill():
        names.append(name)
        for key, parameter in own.items():
            parameter.data.copy_(values[key])

    def empty():
        for parameter in own.values():
            parameter.data.fill_(torch.nan)

    lend(module, fill, empty)
    empty()


@pytest.mark.parametrize('lend', [lend_by_hooks, lend_by_replacing_forward])
@pytest.mark.parametrize('kind', VERSIONS)
def test_a_module_reads_its_parameters_only_in_its_own_forward(kind, lend):
    model = make(kind, use_abs_pos_embed=True)
    expected = model(make_image())
    with_parameters = {name.rpartition('.')[0] for name, _ in model.named_parameters()}
    lent = []
    for name in with_parameters:
        lend_parameters(model.get_submodule(name), lend, lent, name)
    with torch.no_grad():
        assert_same(model(make_image()), expected)
    assert set(lent) == with_parameters


def per_sample_gradients_by_hooks(model, names, images):
    """Return the gradients of biases and convolution weights per image, as Opacus computes them, by hooks."""
    inputs, found = {}, {}

    def keep(module, args, out, name):
        assert args[0].is_contiguous()  # Opacus unfolds images by their strides
        inputs[name] = args[0]

    def collect(module, grad_input, grad_output, name):
        grad = grad_output[0]
        if isinstance(module, nn.Conv2d):
            patches = nn.functional.unfold(
                inputs[name],
                module.kernel_size,
                stride=module.stride,
            )
            products = torch.einsum('bcl,bkl->bck', grad.flatten(2), patches)
            found[name] = products.unflatten(2, module.weight.shape[1:])
        else:
            found[name] = grad.flatten(1, -2).sum(1)

    for name in names:
        module = model.get_submodule(name)
        module.register_forward_hook(functools.partial(keep, name=name))
        module.register_full_backward_hook(functools.partial(collect, name=name))
    sum(out.square().sum() for out in model(images)).backward()
    return found


@pytest.mark.filterwarnings('ignore:Full backward hook')
def test_gradients_per_sample_by_hooks():
    """Padding tokens, and the layout of the image, must be those that the hooks see."""
    parameters = {
        'patch_embed.projection': 'weight',
        'stages.0.blocks.0.attn.w_msa.qkv': 'bias',
        'stages.1.blocks.1.attn.w_msa.qkv': 'bias',
    }
    model, images = make(), make_image(batch=2)
    wanted = [getattr(model.get_submodule(name), parameter) for name, parameter in parameters.items()]
    expected = []
    for image in images:
        loss = sum(out.square().sum() for out in model(image[None]))
        expected.append(torch.autograd.grad(loss, wanted))
    found = per_sample_gradients_by_hooks(model, parameters, images)
    for name, per_image in zip(parameters, zip(*expected, strict=True), strict=True):
        assert_same(found[name], per_image, rtol=1e-8, atol=1e-8)


class Half(nn.Module):
    def forward(self, weights):
        return weights / 2


@pytest.mark.parametrize('kind', VERSIONS)
def test_a_module_in_place_of_attention_dropout_is_called(kind):
    """Half of the weights is half of the sum of the values."""
    model = make(kind)
    expected = model(make_image())
    w_msa = model.stages[0].blocks[0].attn.w_msa
    w_msa.attn_drop = Half()
    with torch.no_grad():
        w_msa.proj.weight.mul_(2)
    assert_same(model(make_image()), expected)


@pytest.mark.parametrize('kind', VERSIONS)
def test_another_forward_of_attention_dropout_is_called(kind):
    """As dropout that stays on in evaluation needs it; without gradients, torch's attention would take its place."""
    model = make(kind)
    w_msa = model.stages[0].blocks[0].attn.w_msa
    expected = model(make_image())
    w_msa.attn_drop.forward = lambda weights: weights / 2
    with torch.no_grad():
        w_msa.proj.weight.mul_(2)
        assert_same(model(make_image()), expected)


def test_any_module_may_embed_the_patches():
    class Embed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 16, 8, stride=4, padding=2)

        def forward(self, img):
            return self.conv(img).permute(0, 2, 3, 1)

    model = make()
    model.patch_embed = Embed().double()
    outs = model(doubles(1, 3, 64, 96))
    assert outs[0].shape[2:] == (16, 24)
    with pytest.raises(TypeError, match=r'float32, .* weights .* torch.float64'):
        model(torch.rand(1, 3, 64, 96))
    model.patch_embed = nn.Identity()  # without parameters, any dtype may fit
    with pytest.raises(TypeError, match='got list'):
        model([1])


def test_parameters_may_be_converted_when_the_patch_embedding_runs():
    """As FSDP2 does, whose parameters are in float32 until then."""
    model = make().bfloat16()
    expected = model(make_image().bfloat16())
    model.patch_embed.float()
    model.patch_embed.register_forward_pre_hook(lambda module, args: module.bfloat16() and None)
    assert_same(model(make_image().bfloat16()), expected, rtol=0.1, atol=0.1)


def test_an_error_of_the_patch_embedding_that_is_not_about_dtypes_is_raised():
    model = make()
    model.patch_embed.forward = mock.Mock(side_effect=RuntimeError('out of memory'))
    with pytest.raises(RuntimeError, match='out of memory'):
        model(make_image())


def test_the_window_size_is_fixed():
    model = make()
    with pytest.raises(AttributeError, match='window_size'):
        model.window_size = 8
    assert model.window_size == (4, 4)
    model.stages[0].blocks[0].attn.w_msa.window_size = (8, 8)
    with pytest.raises(RuntimeError, match=r'\[15, 15, -1\].* is invalid for input of size 49'):
        model(make_image())


def test_a_layer_is_computed_by_onednn_where_it_is_faster_and_can(monkeypatch):
    by_onednn = mock.Mock(return_value='by oneDNN')
    monkeypatch.setattr(linear, 'linear_by_onednn', by_onednn)
    monkeypatch.setattr(linear, 'LEAST_WORK', 0)
    is_here = 'forward' in vars(Linear)
    assert is_here is linear.IS_FASTER_BY_ONEDNN
    monkeypatch.setattr(Linear, 'forward', layers._forward_by_onednn, raising=False)
    layer, x = Linear(7, 5), torch.ones(3, 7)
    assert layer(x) == 'by oneDNN'
    assert layer.double()(x.double()).shape == (3, 5)


@pytest.mark.filterwarnings('ignore')  # torch warns of its own deprecations
@pytest.mark.parametrize('kind', VERSIONS)
def test_dynamic_quantisation(kind):
    """It finds layers by their exact type, so they are made torch's own first."""
    model = make(kind).float()
    for layer in model.modules():
        if type(layer) is Linear:
            layer.__class__ = nn.Linear
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear})
    assert 'DynamicQuantizedLinear' in str(quantised)
    img = make_image().float()
    for out, exact in zip(quantised(img), model(img), strict=True):
        assert (out - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize('kind', VERSIONS)
def test_copies_and_pickles_give_the_same_maps_also_with_functions_among_the_options(kind):
    model = make(
        kind,
        norm_cfg=lambda channels: nn.LayerNorm(channels),
        act_cfg=lambda: nn.GELU(),
    )
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for twin in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_near(twin(make_image()), model(make_image()), 0)


def test_a_stage_returns_its_map_and_the_input_of_the_next():
    model = make()
    inputs, outs, merged = [], [], []

    def record(module, args, result):
        inputs.append(args[0])
        outs.append(result[0])
        merged.append(result[1])

    for stage in model.stages:
        stage.register_forward_hook(record)
    maps = model(make_image())
    for given, made in zip(inputs[1:], merged[:-1], strict=True):
        assert given is made
    for index, out in enumerate(outs):
        normed = getattr(model, f'norm{index}')(out)
        assert_same([normed.permute(0, 3, 1, 2)], [maps[index]])
    assert_near(model.forward_stages(make_image()), outs[:4], 0)
