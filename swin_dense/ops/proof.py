"""A Triton kernel is nobody's default before it has agreed with plain torch on the GPU at hand.

The first time in a process that a kernel would be chosen for a kind of input, it and torch's own operations compute the
same small input, forward and backward. The rule is that of the tests: the kernel may err twice as much as torch does
in the same dtype. A kernel that does not compile, does not run or does not agree is never chosen.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense import windows
from swin_dense.ops import bias, gpu, norm, sdpa, triton
from swin_dense.windows import Pair

_logger = logging.getLogger(__name__)

_HEADS = 2
# Two float32 results of different order differ by this much of their size without either being wrong.
_ROUNDING = 2e-5

_verdicts: dict[Hashable, str | None] = {}
_lock = threading.Lock()
_Function = TypeVar('_Function', bound=Callable[..., object])


def _constant(function: _Function) -> _Function:
    """Let compiled graphs take what a function returns for a constant.

    torch.compiler.assume_constant_result does no more, in torch 2.1 to 2.15, but imports the compiler for it, which
    takes longer than the rest of this package.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def reason_against_attention(
    head_dim: int, window: Pair, dtype: torch.dtype, bias_dtype: torch.dtype, device: torch.device
) -> str | None:
    """Say why the kernel of window attention is not to be trusted with such heads and windows, or return None."""
    channels, tokens = _HEADS * head_dim, window[0] * window[1]
    height, width = 2 * window[0] - 1, 2 * window[1] - 2 + window[1] % 2  # two by two windows, padding, regions
    geometry = (_HEADS, window, (window[0] // 2, window[1] // 2), head_dim**-0.5, 0.0)

    def leaves() -> list[Tensor]:
        shapes = (1, height, width, 3 * channels), (_HEADS, tokens, tokens), (2 * channels,)
        return _draw(shapes, (dtype, bias_dtype, bias_dtype), device)

    def run(backend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *tensors: backend(*tensors, *geometry)

    what = f'of window attention, head dimension {head_dim}, window {window[0]} x {window[1]}, {dtype} and {bias_dtype}'
    return _verdict(what, device, run(triton.window_attention), run(sdpa.window_attention), leaves)


@_constant
def reason_against_bias(window: Pair, dtype: torch.dtype, device: torch.device) -> str | None:
    """Say why the kernels that expand a bias table are not to be trusted with such windows, or return None."""
    places = (2 * window[0] - 1) * (2 * window[1] - 1)
    return _verdict(
        f'of the relative position bias, window {window[0]} x {window[1]}, {dtype}',
        device,
        lambda table: bias.relative_position_bias(table, window),
        lambda table: windows.relative_position_bias(table, window),
        lambda: _draw(((places, _HEADS),), (dtype,), device),
    )


@_constant
def reason_against_norm(
    layout: str,
    channels: int,
    x_dtype: torch.dtype,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Say why the kernels of LayerNorm are not to be trusted with maps of so many channels, or return None.

    Args:
        layout: one of ``norm.LAYOUTS``.
        channels: of x.
        x_dtype: of x.
        dtype: of the result.
        weight_dtype: of weight and bias.
        device: of all of them.
    """
    normed = channels * (4 if layout == 'merged' else 1)
    eps = 1e-5

    def leaves() -> list[Tensor]:
        return _draw(((2, 7, 5, channels), (normed,), (normed,)), (x_dtype, weight_dtype, weight_dtype), device)

    def kernel(x: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
        return norm.LAYOUTS[layout](x, weight, offset, eps, dtype)

    def plain(x: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
        if layout == 'merged':
            x = F.pad(x, (0, 0, 0, 1, 0, 1))
            x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
        wide = torch.promote_types(x.dtype, torch.float32)
        out = F.layer_norm(x.to(wide), (normed,), weight.to(wide), offset.to(wide), eps)
        out = out.to(dtype if x.dtype == x_dtype else wide)  # the exact result stays exact
        return out.permute(0, 3, 1, 2) if layout == 'maps' else out

    what = f'of LayerNorm, {normed} channels into {layout}, {x_dtype} and {weight_dtype} to {dtype}'
    return _verdict(what, device, kernel, plain, leaves)


def _verdict(
    what: str,
    device: torch.device,
    kernel: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    leaves: Callable[[], list[Tensor]],
) -> str | None:
    """Return the reason against the kernel, worked out once."""
    if (what, device) in _verdicts:
        return _verdicts[what, device]
    if gpu.is_capturing(device):
        return 'a CUDA graph is being captured, and the kernel has not been tried before; run the model once first'
    with _lock:
        if (what, device) not in _verdicts:
            _verdicts[what, device] = _try(what, device, kernel, plain, leaves)
    return _verdicts[what, device]


def _try(
    what: str,
    device: torch.device,
    kernel: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    leaves: Callable[[], list[Tensor]],
) -> str | None:
    reasons: list[str | None] = []

    def run() -> None:
        try:
            with torch.cuda.device_of(torch.empty(0, device=device)):
                reasons.append(_disagreement(kernel, plain, leaves()))
        except Exception as error:  # a compiler and a driver may raise anything
            lines = str(error).splitlines()
            reasons.append(f'it failed with {type(error).__name__}: {lines[0] if lines else ""}')

    # A thread of its own has none of the caller's modes: autocast, inference, a trace, a transformation, a counter.
    thread = threading.Thread(target=run, name='swin_dense-proof')
    thread.start()
    thread.join()
    if reasons[0] is None:
        _logger.info('the Triton kernel %s agrees with torch on %s and is used', what, device)
        return None
    _logger.warning('the Triton kernel %s is not used on %s: %s', what, device, reasons[0])
    return reasons[0]


def _disagreement(kernel: Callable[..., Tensor], plain: Callable[..., Tensor], leaves: list[Tensor]) -> str | None:
    """Say where the kernel errs more than twice as much as plain torch in the same dtypes, or return None."""
    exact_dtype = torch.float64 if leaves[0].dtype == torch.float32 else torch.float32
    exact = _results(plain, [leaf.to(exact_dtype) for leaf in leaves])
    names = ('output', 'gradient of the input', 'gradient of the first parameter', 'gradient of the second parameter')
    for name, ours, torchs, truth in zip(names, _results(kernel, leaves), _results(plain, leaves), exact, strict=False):
        truth = truth.double()
        error, allowed = ours.double() - truth, torchs.double() - truth
        for measure in (torch.linalg.vector_norm, lambda x: x.abs().max()):
            limit = 2 * measure(allowed) + _ROUNDING * measure(truth)
            if not measure(error) <= limit:  # also where it is no number
                return f'the {name} is off by {measure(error):.2g}, and torch alone would allow {limit:.2g}'
    return None


def _results(function: Callable[..., Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _draw(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator).to(device, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
