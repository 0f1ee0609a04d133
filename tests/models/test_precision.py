"""Low precision with extreme inputs: finite outputs and gradients, and bounded errors against float64."""

import copy

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from swin_dense import SwinBackbone, SwinV2Backbone
from tests.conftest import FLOAT16, TINY, needs_half, randomize

# Allowed relative errors of the outputs against float64, about three times the measured ones.
BOUNDS = {torch.float32: 1.5e-6, torch.bfloat16: 0.03, torch.float16: 0.004}
SHAPE = (2, 3, 40, 56)
IMAGES = {
    'noise': lambda: torch.randn(SHAPE),
    'zeros': lambda: torch.zeros(SHAPE),
    'constant': lambda: torch.full(SHAPE, 3.7),
    'huge': lambda: 1e4 * torch.randn(SHAPE).sign(),
}
VERSIONS = [SwinBackbone, SwinV2Backbone]


def largest_error(outs, reference):
    errors = []
    for out, exact in zip(outs, reference, strict=True):
        distance = (out.double() - exact).norm()
        errors.append(distance / exact.norm().clamp_min(1e-6))
    return max(errors).item()


def assert_finite_gradients(model, loss):
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize('image', IMAGES)
@pytest.mark.parametrize('backend', ['sdpa', 'reference'])
@pytest.mark.parametrize(
    ('dtype', 'is_autocast'),
    [
        (torch.float64, False),
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        pytest.param(torch.float16, False, marks=needs_half),
        pytest.param(torch.float16, True, marks=needs_half),
    ],
    ids=str,
)
def test_low_precision_is_finite_and_follows_float64(dtype, is_autocast, backend, image):
    model = SwinBackbone(**TINY, drop_path_rate=0.0, attn_backend=backend, use_abs_pos_embed=True)
    img = IMAGES[image]()
    exact = copy.deepcopy(model).double()(img.double())
    if is_autocast:
        with torch.autocast('cpu', dtype):
            outs = model(img)
    else:
        outs = model.to(dtype)(img.to(dtype))
        assert {out.dtype for out in outs} == {dtype}
    assert all(out.isfinite().all() for out in outs)
    if image == 'noise' and dtype in BOUNDS:
        assert largest_error(outs, exact) <= BOUNDS[dtype]
    assert_finite_gradients(model, sum(out.float().mean() for out in outs))


def test_factors_kept_in_float32_scale_a_swin_v2_in_bfloat16():
    """Recipes keep a few parameters in float32, because bfloat16 cannot express their updates."""
    model = with_norms_at_one(SwinV2Backbone(**TINY, drop_path_rate=0.0)).eval()
    img = IMAGES['noise']()
    exact = copy.deepcopy(model).double()(img.double())
    img = img.bfloat16()
    error_in_bfloat16 = largest_error(model.bfloat16()(img), exact)
    for module in model.modules():
        if hasattr(module, 'logit_scale'):
            module.logit_scale.data = module.logit_scale.data.float()
    outs = model(img)
    assert {out.dtype for out in outs} == {torch.bfloat16}
    assert largest_error(outs, exact) <= 2 * error_in_bfloat16


@pytest.mark.parametrize('dtype', [torch.bfloat16, FLOAT16], ids=str)
def test_huge_logits_are_finite(dtype):
    """Make attention almost one-hot by scaling queries, keys and values by ten."""
    model = randomize(SwinBackbone(**TINY, drop_path_rate=0.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith('qkv.weight'):
                parameter.mul_(10)
    with torch.autocast('cpu', dtype):
        outs = model(torch.randn(1, 3, 40, 56))
    assert all(out.isfinite().all() for out in outs)
    assert_finite_gradients(model, sum(out.float().mean() for out in outs))


def with_norms_at_one(model):
    """Let the blocks of a new Swin V2, which start as the identity, do what they do after some training."""
    for name, parameter in model.named_parameters():
        if 'norm' in name and name.endswith('weight'):
            torch.nn.init.ones_(parameter)
    return model


@needs_half
@pytest.mark.parametrize('kind', VERSIONS)
def test_gradients_of_padded_maps_are_finite_in_float16(kind):
    """The key of a padding token is zero, where the direction of a vector has no derivative."""
    model = with_norms_at_one(kind(**TINY, window_size=4))
    with torch.autocast('cpu', torch.float16):
        outs = model(torch.randn(2, 3, 60, 60))
    loss = sum((out.float() - 1).square().mean() for out in outs)
    assert_finite_gradients(model, 65_536 * loss)


SHALLOW = {
    'embed_dims': 16,
    'depths': (2, 1),
    'num_heads': (2, 2),
    'strides': (4, 2),
    'window_size': 4,
}


def losses_of_training(kind, size, is_half):
    """Train for 60 steps under a gradient scaler; return the losses and the scaler's last factor."""
    torch.manual_seed(0)
    model = with_norms_at_one(kind(**SHALLOW, drop_path_rate=0.0))
    images = torch.randn(1, 3, size, size)
    targets = [torch.randn_like(out) for out in model(images)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler('cpu', init_scale=256.0, enabled=is_half)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast('cpu', torch.float16, enabled=is_half):
            outs = model(images)
        errors = [out.float() - target for out, target in zip(outs, targets, strict=True)]
        loss = sum(error.square().mean() for error in errors)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, scaler.get_scale()


@needs_half
@pytest.mark.skipif(torch.__version__ < '2.3', reason='older versions have no gradient scaler for a CPU')
@pytest.mark.parametrize(
    'size',
    [60, 64],
    ids=['padded', 'not padded'],
)
@pytest.mark.parametrize('kind', VERSIONS)
def test_training_in_float16_follows_float32_and_skips_no_step(kind, size):
    expected, _ = losses_of_training(kind, size, is_half=False)
    losses, scale = losses_of_training(kind, size, is_half=True)
    assert scale == 256  # each skipped step would have halved it
    assert expected[-1] < 0.8 * expected[0]
    assert losses[-1] == pytest.approx(expected[-1], rel=0.1)


class Casts(TorchDispatchMode):
    """Count the casts of tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_autocast_around_two_passes_casts_weights_once():
    """docs/on-a-gpu.md gives the number of weights: those of linear layers and of the patch embedding."""
    model = SwinBackbone('t').eval()
    img = torch.rand(1, 3, 32, 32)
    with torch.autocast('cpu', torch.bfloat16):
        with Casts() as first:
            model(img)
        with Casts() as second:
            model(img)
    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    weights = [parameter for layer in layers for parameter in layer.parameters()]
    assert first.count - second.count == len(weights) == 101
