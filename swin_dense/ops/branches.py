"""The residual branches of a standard Swin block with backward passes of their own, on a CPU.

Each branch goes through the map in bands, forward and backward (see :mod:`swin_dense.ops.bands`), and keeps only what
is dear to compute again: the results of matrix products, and attention weights where windows are small. Norms and
activations are computed again; where a branch keeps its input alone, everything is. Images whose branch stochastic
depth drops are left out of the work altogether.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from swin_dense.ops import bands, batched, cpp
from swin_dense.windows import Pair

_logger = logging.getLogger(__name__)


class Norm(NamedTuple):
    """What a LayerNorm over C channels consists of; weight and bias are (C,)."""

    weight: Tensor
    bias: Tensor
    eps: float

    @classmethod
    def of(cls, norm: nn.LayerNorm) -> Norm:
        return cls(norm.weight, norm.bias, norm.eps)


class Linear(NamedTuple):
    """What a linear layer consists of: (outputs, inputs) and (outputs,)."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, linear: nn.Linear) -> Linear:
        return cls(linear.weight, linear.bias)


class Attention(NamedTuple):
    """How a map is attended to; see :func:`swin_dense.ops.window_attention`.

    Attributes:
        relative_bias: (A, T, T) for A heads and T tokens per window.
        num_heads: A.
        window: (height, width) in tokens.
        shift: (height, width) in tokens.
        scale: factor on the scores.
        in_cpp: whether the C++ kernel attends where nothing is kept for a backward pass.
    """

    relative_bias: Tensor
    num_heads: int
    window: Pair
    shift: Pair
    scale: float
    in_cpp: bool


def can_run(x: Tensor) -> bool:
    """Tell whether the branches of x, (B, H, W, C), can be computed here: eagerly, on a CPU and at full precision."""
    return (
        x.device.type == 'cpu'
        and type(x) is Tensor
        and x.numel() > 0
        and x.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled('cpu')
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
    )


def attention_branch(
    x: Tensor,
    keep: Tensor | None,
    norm: Norm,
    qkv: Linear,
    proj: Linear,
    attention: Attention,
    saves: bool,
) -> Tensor:
    """Return ``x + keep * proj(attention(qkv(norm(x))))``.

    Args:
        x: (B, H, W, C).
        keep: (B,) the factor of each image's branch, zero or one value for all others, or None for ones.
        norm: over C channels.
        qkv: C to 3C.
        proj: C to C.
        attention: what is done between qkv and proj.
        saves: whether to keep more than x for a backward pass, which computes the rest again.

    Returns:
        (B, H, W, C).
    """
    _log_once()
    return _AttentionBranch.apply(x, *norm, *qkv, *proj, *attention, keep, saves)


def mlp_branch(
    x: Tensor, keep: Tensor | None, norm: Norm, fc1: Linear, fc2: Linear, approximate: str, saves: bool
) -> Tensor:
    """Return ``x + keep * fc2(gelu(fc1(norm(x))))``, with arguments as in :func:`attention_branch`.

    Args:
        x: (B, H, W, C).
        keep: (B,) or None.
        norm: over C channels.
        fc1: C to the hidden channels.
        fc2: the hidden channels to C.
        approximate: 'none' or 'tanh', as in :class:`torch.nn.GELU`.
        saves: whether to keep more than x for a backward pass, which computes the rest again.

    Returns:
        (B, H, W, C).
    """
    return _MLPBranch.apply(x, *norm, *fc1, *fc2, keep, approximate, saves)


class _AttentionBranch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, norm_weight, norm_bias, eps, qkv_weight, qkv_bias, proj_weight, proj_bias,
        bias, heads, window, shift, scale, in_cpp, keep, saves,
    ):  # fmt: skip
        channels = x.shape[3]
        runs, factor = _kept(keep, len(x))
        out = _start(x, runs)
        ctx.bands = [band for run in runs for band in bands.cut(run, x, window, shift)]
        saved: list[Tensor | None] = []
        for band in ctx.bands:
            part = band.of(x)
            tokens = part.reshape(-1, channels)
            normed = F.layer_norm(tokens, (channels,), norm_weight, norm_bias, eps)
            qkv = _qkv(normed, qkv_weight, qkv_bias)
            if in_cpp and not saves:
                image, pad = qkv[:-1].view(*part.shape[:3], -1), qkv_bias[channels:]
                attended = cpp.window_attention(image, bias, pad, heads, window, band.shift, scale).view_as(tokens)
            else:
                layout = batched.layout_of(part.shape[:3], window, band.shift, heads)
                attended, packed, weights = batched.attend(qkv, bias, layout, scale)
            target = band.of(out)
            update = torch.add(tokens, proj_bias, alpha=factor, out=target.view_as(tokens))
            update.addmm_(attended, proj_weight.t(), alpha=factor)
            if not band.is_view:
                band.put(out, target)
            if saves:
                # Weights of small windows are dearer to compute again than to keep.
                is_small = weights.shape[2] <= 2 * packed.shape[3]
                saved += [attended, packed, weights if is_small else None]
        ctx.save_for_backward(x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, bias, *saved)
        ctx.options = eps, runs, factor, heads, window, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, bias, *saved = ctx.saved_tensors
        eps, runs, factor, heads, window, scale = ctx.options
        channels = x.shape[3]
        grad_x = _start(grad, runs)
        norm = _NormGradients(norm_weight, norm_bias, eps)
        qkv_grads, proj_grads = _LinearGradients(qkv_weight), _LinearGradients(proj_weight)
        grad_bias = torch.zeros_like(bias)
        for index, band in enumerate(ctx.bands):
            part = band.of(x)
            tokens, grad_out = part.reshape(-1, channels), band.of(grad).reshape(-1, channels)
            normed = norm(tokens)
            layout = batched.layout_of(part.shape[:3], window, band.shift, heads)
            if saved:
                attended, packed, weights = saved[3 * index : 3 * index + 3]
                if weights is None:
                    weights = batched.attention_weights(packed, bias, layout, scale)
            else:
                qkv = _qkv(normed, qkv_weight, qkv_bias)
                attended, packed, weights = batched.attend(qkv, bias, layout, scale)
            grad_branch = grad_out if factor == 1.0 else grad_out * factor
            proj_grads.add(grad_branch, attended)
            grad_attended = _through_proj(grad_branch, proj_weight)
            grad_qkv, grad_bias_of_band, grad_pad = batched.attend_backward(
                grad_attended, packed, weights, layout, scale
            )
            grad_bias += grad_bias_of_band
            qkv_grads.add(grad_qkv, normed)
            qkv_grads.bias[channels:] += grad_pad
            target = band.of(grad_x)
            torch.add(grad_out, norm.backward(grad_qkv @ qkv_weight), out=target.view_as(tokens))
            if not band.is_view:
                band.put(grad_x, target)
        return (
            grad_x, norm.weight_grad, norm.bias_grad, None, qkv_grads.weight, qkv_grads.bias,
            proj_grads.weight, proj_grads.bias, grad_bias, *(None,) * 7,
        )  # fmt: skip


class _MLPBranch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, norm_weight, norm_bias, eps, fc1_weight, fc1_bias, fc2_weight, fc2_bias, keep, approximate, saves
    ):
        channels = x.shape[3]
        runs, factor = _kept(keep, len(x))
        out = _start(x, runs)
        saved: list[Tensor] = []
        for tokens, target in _chunks(runs, x, out):
            normed = F.layer_norm(tokens, (channels,), norm_weight, norm_bias, eps)
            hidden = torch.addmm(fc1_bias, normed, fc1_weight.t())
            torch.add(tokens, fc2_bias, alpha=factor, out=target)
            target.addmm_(F.gelu(hidden, approximate=approximate), fc2_weight.t(), alpha=factor)
            if saves:
                saved.append(hidden)
        ctx.save_for_backward(x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, *saved)
        ctx.options = eps, runs, factor, approximate
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, *saved = ctx.saved_tensors
        eps, runs, factor, approximate = ctx.options
        grad = grad.contiguous()
        grad_x = _start(grad, runs)
        norm = _NormGradients(norm_weight, norm_bias, eps)
        fc1_grads, fc2_grads = _LinearGradients(fc1_weight), _LinearGradients(fc2_weight)
        for index, (tokens, grad_out, target) in enumerate(_chunks(runs, x, grad, grad_x)):
            normed = norm(tokens)
            hidden = saved[index] if saved else torch.addmm(fc1_bias, normed, fc1_weight.t())
            grad_branch = grad_out if factor == 1.0 else grad_out * factor
            fc2_grads.add(grad_branch, F.gelu(hidden, approximate=approximate))
            grad_hidden = torch.ops.aten.gelu_backward(grad_branch @ fc2_weight, hidden, approximate=approximate)
            fc1_grads.add(grad_hidden, normed)
            torch.add(grad_out, norm.backward(grad_hidden @ fc1_weight), out=target)
        return (
            grad_x, norm.weight_grad, norm.bias_grad, None, fc1_grads.weight, fc1_grads.bias,
            fc2_grads.weight, fc2_grads.bias, *(None,) * 3,
        )  # fmt: skip


@functools.cache
def _log_once() -> None:
    _logger.info('blocks on a CPU run as fused branches, with attention as batched matrix products')


def _qkv(tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return (L + 1, 3C) queries, keys and values of L tokens and of a padding token."""
    qkv = tokens.new_empty(len(tokens) + 1, len(weight))
    torch.addmm(bias, tokens, weight.t(), out=qkv[:-1])
    # A linear layer maps the official code's zero padding to its bias. Nobody reads the query.
    qkv[-1] = bias
    return qkv


def _through_proj(grad: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of what attention gave L tokens and, zero, a padding token: (L + 1, C)."""
    grad_attended = grad.new_empty(len(grad) + 1, weight.shape[1])
    torch.mm(grad, weight, out=grad_attended[:-1])
    grad_attended[-1] = 0.0
    return grad_attended


class _LinearGradients:
    """Gradients of a linear layer's weight and bias, summed over bands."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = torch.zeros_like(weight)
        self.bias = weight.new_zeros(len(weight))

    def add(self, grad_out: Tensor, tokens: Tensor) -> None:
        self.weight.addmm_(grad_out.t(), tokens)
        self.bias += grad_out.sum(0)


class _NormGradients:
    """A LayerNorm with its gradients, those of weight and bias summed over bands."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.parameters = weight, bias
        self.eps = eps
        self.weight_grad, self.bias_grad = torch.zeros_like(weight), torch.zeros_like(bias)

    def __call__(self, tokens: Tensor) -> Tensor:
        self.tokens = tokens
        normed, *self.statistics = torch.native_layer_norm(tokens, tokens.shape[1:], *self.parameters, self.eps)
        return normed

    def backward(self, grad: Tensor) -> Tensor:
        """Return the gradient of the tokens of the last call."""
        grad_tokens, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad, self.tokens, grad.shape[1:], *self.statistics, *self.parameters, [True, True, True]
        )
        self.weight_grad += grad_weight
        self.bias_grad += grad_bias
        return grad_tokens


def _kept(keep: Tensor | None, batch: int) -> tuple[list[slice], float]:
    """Return the runs of images whose branch is kept, and the factor that they share."""
    if keep is None:
        return [slice(0, batch)], 1.0
    runs: list[slice] = []
    for image in keep.nonzero()[:, 0].tolist():
        start = runs.pop().start if runs and runs[-1].stop == image else image
        runs.append(slice(start, image + 1))
    return runs, keep.max().item()


def _start(x: Tensor, runs: list[slice]) -> Tensor:
    """Return memory for a result of which the runs will be written, and which is x elsewhere."""
    is_whole = sum(run.stop - run.start for run in runs) == len(x)
    return x.new_empty(x.shape) if is_whole else x.clone(memory_format=torch.contiguous_format)


def _chunks(runs: list[slice], *maps: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same tokens of all maps, each time some (tokens, C) views of contiguous (B, H, W, C)."""
    for run in runs:
        parts = (x[run].view(-1, x.shape[3]).split(bands.band_tokens(x.shape[3])) for x in maps)
        yield from zip(*parts, strict=True)
