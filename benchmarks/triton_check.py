"""Compare the Triton kernel of window attention with torch in float64 on the GPU at hand, and time it."""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.ops import window_attention
from swin_dense.ops.triton import gpu
from swin_dense.ops.windows import WindowSpec

ROUNDS = 20
# A kernel is right if its error in float64 is at most this many times that of torch in the same dtype, plus rounding.
ALLOWED = 2.0
_ROUNDING = 2e-5


class Case(NamedTuple):
    """A map of a Swin-T: height and width in tokens, channels, heads, the side of its windows, and its dtype."""

    height: int
    width: int
    channels: int
    heads: int
    window: int
    dtype: torch.dtype


# The first and the third stage at 800 x 1344 pixels, with padding, and windows of one tile and of several.
CASES = [
    Case(height, width, channels, heads, window, dtype)
    for height, width, channels, heads in ((200, 336, 96, 3), (50, 84, 384, 12))
    for window in (7, 12)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
]


def examine() -> str:
    """Return what the kernel gains on the first GPU, and whether to set it; raise RuntimeError if it is wrong."""
    if not torch.cuda.is_available():
        return 'not run: torch sees no GPU'
    device = torch.device('cuda', 0)
    reason = gpu.unsupported_device_reason(device)
    if reason is not None:
        return f'not run: {reason}'
    for case in CASES:
        check(case, device)
    timed = [case for case in CASES if case.dtype == torch.bfloat16]
    inference, training = (mean_gain(timed, device, is_training) for is_training in (False, True))
    advice = "set attn_backend='triton'" if min(inference, training) > 1 else "leave attn_backend='auto'"
    return (
        f'{torch.cuda.get_device_name(device)}: right in {len(CASES)} cases; {inference:.2f} times as fast as sdpa in '
        f'inference and {training:.2f} times in training (bfloat16): {advice}'
    )


def check(case: Case, device: torch.device) -> None:
    """Raise RuntimeError if the kernel's output or a gradient errs more than torch in the same dtype may."""
    exact = _results(case, 'reference', torch.float64, device)
    ours, torchs = (errors(_results(case, backend, case.dtype, device), exact) for backend in ('triton', 'reference'))
    for name, error in ours.items():
        if not error <= ALLOWED * torchs[name] + _ROUNDING:
            raise RuntimeError(
                f'{name} of the Triton kernel errs by {error:.1e} on {case}, torch in the same dtype by '
                f"{torchs[name]:.1e}: leave attn_backend='auto'"
            )


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest error of each result, relative to its largest value."""
    return {
        name: ((found[name].double() - truth).abs().max() / truth.abs().max()).item() for name, truth in exact.items()
    }


def mean_gain(cases: list[Case], device: torch.device, is_training: bool) -> float:
    """Return how many times as fast as sdpa the kernel is, the geometric mean over cases."""
    gains = []
    for case in cases:
        seconds = {name: _seconds(case, name, device, is_training) for name in ('sdpa', 'triton')}
        gains.append(seconds['sdpa'] / seconds['triton'])
    return statistics.geometric_mean(gains)


def _inputs(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a map, the weight and the bias of its projection, and a position bias, the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (1, case.height, case.width, case.channels),
        (3 * case.channels, case.channels),
        (3 * case.channels,),
        (case.heads, case.window**2, case.window**2),
    )
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    drawn[1] /= case.channels**0.5
    return tuple(x.to(case.dtype).to(device, dtype).requires_grad_() for x in drawn)  # type: ignore[return-value]


def _attend(case: Case, inputs: tuple[Tensor, ...], backend: str) -> Tensor:
    x, weight, bias, position = inputs
    scale = (case.channels // case.heads) ** -0.5
    spec = WindowSpec(case.heads, (case.window,) * 2, (case.window // 2,) * 2, scale)  # type: ignore[arg-type]
    return window_attention(x, lambda tokens: F.linear(tokens, weight, bias), position, spec, nn.Dropout(0.0), backend)


def _results(case: Case, backend: str, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    inputs = _inputs(case, dtype, device)
    out = _attend(case, inputs, backend)
    factors = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)  # in float16, most would be NaN
    gradients = torch.autograd.grad(out, inputs, factors.to(case.dtype).to(dtype))
    names = ('gradient of the map', 'gradient of the weight', 'gradient of its bias', 'gradient of the position bias')
    return {'output': out.detach(), **dict(zip(names, gradients, strict=True))}


def _seconds(case: Case, backend: str, device: torch.device, is_training: bool) -> float:
    """Return the median time of a pass, or of a pass and its gradients."""
    inputs, times = _inputs(case, case.dtype, device), []
    with torch.set_grad_enabled(is_training):
        for _ in range(ROUNDS):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            out = _attend(case, inputs, backend)
            if is_training:
                torch.autograd.grad(out.sum(), inputs)
            torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
    return statistics.median(times)


if __name__ == '__main__':
    print(examine())
