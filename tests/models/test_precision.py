"""Low precision with extreme inputs: finite outputs and gradients, and bounded errors against float64."""

import copy

import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone
from tests.conftest import FLOAT16, TINY, needs_half, randomize

# Allowed relative errors of the outputs against float64, about three times the measured ones.
BOUNDS = {torch.float32: 1.5e-6, torch.bfloat16: 0.03, torch.float16: 0.004}
IMAGES = {
    'noise': lambda: torch.randn(2, 3, 40, 56),
    'zeros': lambda: torch.zeros(2, 3, 40, 56),
    'constant': lambda: torch.full((2, 3, 40, 56), 3.7),
    'huge': lambda: torch.full((2, 3, 40, 56), 1e4) * torch.randn(2, 3, 40, 56).sign(),
}


def error(outs, reference):
    return max(
        ((out.double() - ref).norm() / ref.norm().clamp_min(1e-6)).item()
        for out, ref in zip(outs, reference, strict=True)
    )


def check_gradients(model, outs):
    sum(out.float().mean() for out in outs).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@pytest.mark.parametrize('image', IMAGES)
@pytest.mark.parametrize('backend', ['sdpa', 'reference'])
@pytest.mark.parametrize(
    ('dtype', 'is_autocast'),
    [
        *((dtype, False) for dtype in (torch.float64, torch.float32, torch.bfloat16)),
        (torch.bfloat16, True),
        *(pytest.param(torch.float16, is_autocast, marks=needs_half) for is_autocast in (False, True)),
    ],
    ids=str,
)
def test_low_precision_is_finite_and_follows_float64(dtype, is_autocast, backend, image):
    options = {'drop_path_rate': 0.0, 'attn_backend': backend, 'use_abs_pos_embed': True}
    reference = SwinBackbone(**TINY, **options).double()
    model = copy.deepcopy(reference).to(torch.float32 if is_autocast else dtype)
    images = IMAGES[image]()
    with torch.autocast('cpu', dtype if is_autocast else torch.bfloat16, enabled=is_autocast):
        outs = model(images if is_autocast else images.to(dtype))
    assert all(out.isfinite().all() for out in outs)
    assert is_autocast or {out.dtype for out in outs} == {dtype}
    if image == 'noise' and dtype in BOUNDS:
        assert error(outs, reference(images.double())) <= BOUNDS[dtype]
    check_gradients(model, outs)


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
    check_gradients(model, outs)


def with_norms_at_one(model):
    """Let the blocks of a new Swin V2, which start as the identity, do what they do after some training."""
    for name, parameter in model.named_parameters():
        if 'norm' in name and name.endswith('weight'):
            torch.nn.init.ones_(parameter)
    return model


@needs_half
@pytest.mark.parametrize('kind', [SwinBackbone, SwinV2Backbone])
def test_gradients_of_padded_maps_are_finite_in_float16(kind):
    """The key of a padding token is zero, where the direction of a vector has no derivative."""
    model = with_norms_at_one(kind(**TINY, window_size=4))
    with torch.autocast('cpu', torch.float16):
        outs = model(torch.randn(2, 3, 60, 60))
    loss = sum((out.float() - 1).square().mean() for out in outs)
    (65_536 * loss).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name


def losses_of_training(kind, size, dtype):
    """Train for 60 steps under a gradient scaler; return the losses and the scaler's last factor."""
    torch.manual_seed(0)
    options = {'embed_dims': 16, 'depths': (2, 1), 'num_heads': (2, 2), 'strides': (4, 2), 'window_size': 4}
    model = with_norms_at_one(kind(**options, drop_path_rate=0.0))
    images = torch.randn(1, 3, size, size)
    targets = [torch.randn_like(out) for out in model(images)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler('cpu', init_scale=256.0, enabled=dtype == torch.float16)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast('cpu', torch.float16, enabled=dtype == torch.float16):
            outs = model(images)
        loss = sum((out.float() - target).square().mean() for out, target in zip(outs, targets, strict=True))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, scaler.get_scale()


@needs_half
@pytest.mark.skipif(torch.__version__ < '2.3', reason='older versions have no gradient scaler for a CPU')
@pytest.mark.parametrize('size', [60, 64], ids=['padded', 'not padded'])
@pytest.mark.parametrize('kind', [SwinBackbone, SwinV2Backbone])
def test_training_in_float16_follows_float32_and_skips_no_step(kind, size):
    expected, _ = losses_of_training(kind, size, torch.float32)
    losses, scale = losses_of_training(kind, size, torch.float16)
    assert scale == 256  # each skipped step would have halved it
    assert expected[-1] < 0.8 * expected[0]
    assert losses[-1] == pytest.approx(expected[-1], rel=0.1)


@pytest.mark.slow
@needs_half
def test_a_hundred_steps_under_a_grad_scaler_stay_finite():
    model = SwinBackbone(**TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler('cpu', init_scale=2.0**12)
    first = None
    for _ in range(100):
        optimizer.zero_grad()
        with torch.autocast('cpu', torch.float16):
            loss = sum((out.float() - 1).square().mean() for out in model(torch.randn(2, 3, 32, 32)))
        assert loss.isfinite()
        first = loss.item() if first is None else first
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() >= 1
    assert loss.item() < first
    assert all(parameter.isfinite().all() for parameter in model.parameters())
