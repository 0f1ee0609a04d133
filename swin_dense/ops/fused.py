"""The fused block of a CPU: each residual branch of a standard block with a backward pass by hand.

A branch goes through the map in bands, forward and backward (see :mod:`swin_dense.ops.bands`), and keeps only what is
dear to compute again: the results of matrix products, and attention weights where windows are small. Norms and
activations are computed again; where a branch keeps its input alone, everything is. Images whose branch stochastic
depth drops are left out of the work altogether. Gradients of gradients come from the plain formula and torch.

Which blocks are computed so is decided in :mod:`swin_dense.block`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense import compat
from swin_dense.ops import bands, batched, reference, surroundings
from swin_dense.windows import Pair


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
        num_heads: A.
        window: (height, width) in tokens.
        shift: (height, width) in tokens.
        scale: factor on the scores.
    """

    num_heads: int
    window: Pair
    shift: Pair
    scale: float


class Kept(NamedTuple):
    """The images whose branch is computed, as runs of neighbours, and the one factor on all these branches."""

    runs: tuple[slice, ...]
    factor: float

    @classmethod
    def of(cls, factors: Tensor | None, batch: int) -> Kept:
        """Return what the factors of a batch's branches, (B,), say; None are ones.

        Raises:
            ValueError: two factors differ and neither is zero.
        """
        if factors is None:
            return cls((slice(0, batch),), 1.0)
        values = factors.tolist()
        kept = {value for value in values if value != 0.0}
        if len(kept) > 1:
            raise ValueError(f'images that are kept must share one factor, got {sorted(kept)}')
        runs: list[slice] = []
        for image, value in enumerate(values):
            if value != 0.0:
                start = runs.pop().start if runs and runs[-1].stop == image else image
                runs.append(slice(start, image + 1))
        return cls(tuple(runs), kept.pop() if kept else 0.0)

    def images(self) -> list[int]:
        return [image for run in self.runs for image in range(run.start, run.stop)]


def reason_not_to_run(x: Tensor) -> str | None:
    """Say why the branches of x, (B, H, W, C), cannot be computed here, or return None."""
    reason = surroundings.reason_for_plain_operations(x)
    if reason is not None:
        return reason
    if x.device.type != 'cpu':
        return f'the map is on {x.device.type}, not on a CPU'
    if type(x) is not Tensor or x.dtype not in (torch.float32, torch.float64):
        return f'the map is a {type(x).__name__} of {x.dtype}, not a plain one of torch.float32 or float64'
    if x.numel() == 0:
        return 'the map is empty'
    return 'autocast is on' if compat.is_autocast_enabled('cpu') else None


def attention_branch(
    x: Tensor, kept: Kept, norm: Norm, qkv: Linear, proj: Linear, bias: Tensor, attention: Attention, saves: bool
) -> Tensor:
    """Return ``x + factor * proj(attention(qkv(norm(x))))``.

    Args:
        x: (B, H, W, C).
        kept: which images have the branch, and its factor.
        norm: over C channels.
        qkv: C to 3C.
        proj: C to C.
        bias: (A, T, T) for A heads and T tokens per window.
        attention: what is done between qkv and proj.
        saves: whether to keep more than x for a backward pass, which computes the rest again.

    Returns:
        (B, H, W, C).
    """
    options = (kept, norm.eps, attention)
    return _AttentionBranch.apply(options, saves, x, norm.weight, norm.bias, *qkv, *proj, bias)


def mlp_branch(x: Tensor, kept: Kept, norm: Norm, fc1: Linear, fc2: Linear, approximate: str, saves: bool) -> Tensor:
    """Return ``x + factor * fc2(gelu(fc1(norm(x))))``, with arguments as in :func:`attention_branch`.

    Args:
        x: (B, H, W, C).
        kept: which images have the branch, and its factor.
        norm: over C channels.
        fc1: C to the hidden channels.
        fc2: the hidden channels to C.
        approximate: 'none' or 'tanh', as in :class:`torch.nn.GELU`.
        saves: whether to keep more than x for a backward pass, which computes the rest again.

    Returns:
        (B, H, W, C).
    """
    options = (kept, norm.eps, approximate)
    return _MLPBranch.apply(options, saves, x.contiguous(), norm.weight, norm.bias, *fc1, *fc2)


class _Branch(torch.autograd.Function):
    """What both branches share: they take (options, saves, tensors) and know their formula in plain operations."""

    plain: Callable[..., Tensor]
    by_hand: Callable[..., tuple[Tensor | None, ...]]

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, saved = ctx.saved_tensors[: ctx.inputs], ctx.saved_tensors[ctx.inputs :]
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # for gradients of gradients
            out = cls.plain(*ctx.options, *tensors)
            inputs = [tensor for tensor, wants in zip(tensors, wanted, strict=True) if wants]
            grads = iter(torch.autograd.grad(out, inputs, grad, create_graph=True, allow_unused=True))
            return None, None, *(next(grads) if wants else None for wants in wanted)
        # The forward pass ran outside of autocast, wherever this is called.
        with torch.autocast('cpu', enabled=False):
            return None, None, *cls.by_hand(ctx, grad.contiguous(), tensors, saved, wanted)


class _AttentionBranch(_Branch):
    @staticmethod
    def forward(ctx, options, saves, x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, bias):
        kept, eps, (heads, window, shift, scale) = options
        channels = x.shape[3]
        out = _start(x, kept)
        ctx.bands = [band for run in kept.runs for band in bands.cut(run, x, window, shift)]
        saved: list[Tensor | None] = []
        for band in ctx.bands:
            part = band.of(x)
            tokens = part.reshape(-1, channels)
            qkv = _qkv(F.layer_norm(tokens, (channels,), norm_weight, norm_bias, eps), qkv_weight, qkv_bias)
            layout = batched.layout_of(part.shape[:3], window, band.shift, heads)
            attended, packed, weights = batched.attend(qkv, bias, layout, scale)
            target = band.of(out)
            update = torch.add(tokens, proj_bias, alpha=kept.factor, out=target.view_as(tokens))
            update.addmm_(attended, proj_weight.t(), alpha=kept.factor)
            if not band.is_view:
                band.put(out, target)
            if saves and any(ctx.needs_input_grad):
                # Weights of small windows are dearer to compute again than to keep.
                is_small = weights.shape[2] <= 2 * packed.shape[3]
                saved += [attended, packed, weights if is_small else None]
        tensors = x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, bias
        ctx.save_for_backward(*tensors, *saved)
        ctx.inputs, ctx.options = len(tensors), options
        return out

    @staticmethod
    def plain(kept, eps, attention, x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, bias):
        images, channels = torch.tensor(kept.images(), dtype=torch.long, device=x.device), x.shape[3]
        heads, window, shift, scale = attention
        qkv = F.linear(F.layer_norm(x[images], (channels,), norm_weight, norm_bias, eps), qkv_weight, qkv_bias)
        attended = reference.window_attention(qkv, bias, qkv_bias[channels:], heads, window, shift, scale, 0.0)
        return x.index_add(0, images, F.linear(attended, proj_weight, proj_bias), alpha=kept.factor)

    @staticmethod
    def by_hand(ctx, grad, tensors, saved, wanted):
        x, norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias, bias = tensors
        wants_x, *wants_norm, wants_qkv_weight, wants_qkv_bias, wants_proj_weight, wants_proj_bias, wants_bias = wanted
        kept, eps, (heads, window, _, scale) = ctx.options
        channels = x.shape[3]
        grad_x = _start(grad, kept) if wants_x else None
        norm = _NormGradients(norm_weight, norm_bias, eps, [wants_x, *wants_norm])
        qkv_grads = _LinearGradients(qkv_weight, qkv_bias, wants_qkv_weight, wants_qkv_bias)
        proj_grads = _LinearGradients(proj_weight, proj_bias, wants_proj_weight, wants_proj_bias)
        grad_bias = torch.zeros_like(bias) if wants_bias else None
        wants_normed = any(norm.wanted)
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
                attended, packed, weights = batched.attend(_qkv(normed, qkv_weight, qkv_bias), bias, layout, scale)
            grad_branch = grad_out if kept.factor == 1.0 else grad_out * kept.factor
            proj_grads.add(grad_branch, attended)
            if not (wants_normed or wants_qkv_weight or wants_qkv_bias or wants_bias):
                continue
            grad_attended = _through_proj(grad_branch, proj_weight)
            grad_qkv, grad_bias_of_band, grad_pad = batched.attend_backward(
                grad_attended, packed, weights, layout, scale
            )
            if grad_bias is not None:
                grad_bias += grad_bias_of_band
            qkv_grads.add(grad_qkv, normed)
            if qkv_grads.bias is not None:
                qkv_grads.bias[channels:] += grad_pad
            if not wants_normed:
                continue
            grad_tokens = norm.backward(grad_qkv @ qkv_weight)
            if grad_x is not None:
                target = band.of(grad_x)
                torch.add(grad_out, grad_tokens, out=target.view_as(tokens))
                if not band.is_view:
                    band.put(grad_x, target)
        linear_grads = qkv_grads.weight, qkv_grads.bias, proj_grads.weight, proj_grads.bias
        return grad_x, norm.weight_grad, norm.bias_grad, *linear_grads, grad_bias


class _MLPBranch(_Branch):
    @staticmethod
    def forward(ctx, options, saves, x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias):
        kept, eps, approximate = options
        channels = x.shape[3]
        out = _start(x, kept)
        saved: list[Tensor] = []
        for tokens, target in _chunks(kept, x, out):
            normed = F.layer_norm(tokens, (channels,), norm_weight, norm_bias, eps)
            hidden = torch.addmm(fc1_bias, normed, fc1_weight.t())
            torch.add(tokens, fc2_bias, alpha=kept.factor, out=target)
            target.addmm_(F.gelu(hidden, approximate=approximate), fc2_weight.t(), alpha=kept.factor)
            if saves and any(ctx.needs_input_grad):
                saved.append(hidden)
        tensors = x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias
        ctx.save_for_backward(*tensors, *saved)
        ctx.inputs, ctx.options = len(tensors), options
        return out

    @staticmethod
    def plain(kept, eps, approximate, x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias):
        images = torch.tensor(kept.images(), dtype=torch.long, device=x.device)
        hidden = F.linear(F.layer_norm(x[images], x.shape[3:], norm_weight, norm_bias, eps), fc1_weight, fc1_bias)
        branch = F.linear(F.gelu(hidden, approximate=approximate), fc2_weight, fc2_bias)
        return x.index_add(0, images, branch, alpha=kept.factor)

    @staticmethod
    def by_hand(ctx, grad, tensors, saved, wanted):
        x, norm_weight, norm_bias, fc1_weight, fc1_bias, fc2_weight, fc2_bias = tensors
        wants_x, *wants_norm, wants_fc1_weight, wants_fc1_bias, wants_fc2_weight, wants_fc2_bias = wanted
        kept, eps, approximate = ctx.options
        grad_x = _start(grad, kept) if wants_x else None
        norm = _NormGradients(norm_weight, norm_bias, eps, [wants_x, *wants_norm])
        fc1_grads = _LinearGradients(fc1_weight, fc1_bias, wants_fc1_weight, wants_fc1_bias)
        fc2_grads = _LinearGradients(fc2_weight, fc2_bias, wants_fc2_weight, wants_fc2_bias)
        wants_normed = any(norm.wanted)
        maps = (x, grad) if grad_x is None else (x, grad, grad_x)
        for index, (tokens, grad_out, *target) in enumerate(_chunks(kept, *maps)):
            normed = norm(tokens)
            hidden = saved[index] if saved else torch.addmm(fc1_bias, normed, fc1_weight.t())
            grad_branch = grad_out if kept.factor == 1.0 else grad_out * kept.factor
            fc2_grads.add(grad_branch, F.gelu(hidden, approximate=approximate) if wants_fc2_weight else hidden)
            if not (wants_normed or wants_fc1_weight or wants_fc1_bias):
                continue
            grad_hidden = torch.ops.aten.gelu_backward(grad_branch @ fc2_weight, hidden, approximate=approximate)
            fc1_grads.add(grad_hidden, normed)
            if not wants_normed:
                continue
            grad_tokens = norm.backward(grad_hidden @ fc1_weight)
            for place in target:
                torch.add(grad_out, grad_tokens, out=place)
        linear_grads = fc1_grads.weight, fc1_grads.bias, fc2_grads.weight, fc2_grads.bias
        return grad_x, norm.weight_grad, norm.bias_grad, *linear_grads


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
    """Gradients of a linear layer's weight and bias, summed over bands; None where nobody wants one."""

    def __init__(self, weight: Tensor, bias: Tensor, wants_weight: bool, wants_bias: bool) -> None:
        self.weight = torch.zeros_like(weight) if wants_weight else None
        self.bias = torch.zeros_like(bias) if wants_bias else None

    def add(self, grad_out: Tensor, tokens: Tensor) -> None:
        if self.weight is not None:
            self.weight.addmm_(grad_out.t(), tokens)
        if self.bias is not None:
            self.bias += grad_out.sum(0)


class _NormGradients:
    """A LayerNorm with its gradients, those of weight and bias summed over bands; None where nobody wants one.

    Attributes:
        wanted: whether there is a wish for the gradient of the tokens, the weight, the bias.
    """

    def __init__(self, weight: Tensor, bias: Tensor, eps: float, wanted: list[bool]) -> None:
        self.parameters = weight, bias
        self.eps = eps
        self.wanted = wanted
        self.weight_grad = torch.zeros_like(weight) if wanted[1] else None
        self.bias_grad = torch.zeros_like(bias) if wanted[2] else None

    def __call__(self, tokens: Tensor) -> Tensor:
        self.tokens = tokens
        normed, *self.statistics = torch.native_layer_norm(tokens, tokens.shape[1:], *self.parameters, self.eps)
        return normed

    def backward(self, grad: Tensor) -> Tensor:
        """Return the gradient of the tokens of the last call, or nothing of use where nobody wants it."""
        grad_tokens, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad, self.tokens, grad.shape[1:], *self.statistics, *self.parameters, self.wanted
        )
        if self.weight_grad is not None:
            self.weight_grad += grad_weight
        if self.bias_grad is not None:
            self.bias_grad += grad_bias
        return grad_tokens


def _start(x: Tensor, kept: Kept) -> Tensor:
    """Return memory for a result of which the runs will be written, and which is x elsewhere."""
    is_whole = sum(run.stop - run.start for run in kept.runs) == len(x)
    return x.new_empty(x.shape) if is_whole else x.clone(memory_format=torch.contiguous_format)


def _chunks(kept: Kept, *maps: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same tokens of all maps, each time some (tokens, C) views of contiguous (B, H, W, C)."""
    for run in kept.runs:
        parts = (x[run].view(-1, x.shape[3]).split(bands.band_tokens(x.shape[3])) for x in maps)
        yield from zip(*parts, strict=True)
