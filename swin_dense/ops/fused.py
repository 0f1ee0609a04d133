"""The fused block of a CPU: each residual branch of a standard block with a backward pass by hand.

A branch is a norm, a linear layer, a core and another linear layer; in Swin V2 the norm stands at the end. The core is
attention within windows, or an activation (:mod:`swin_dense.ops.cores`). A branch goes through the map in bands, going
forward and backward (:mod:`swin_dense.ops.bands`), and keeps only what is dear to compute again: what matrix products
gave, and attention weights where windows are small. Norms and activations are computed again; where a branch keeps its
input alone, everything is. Images whose branch stochastic depth drops are left out of the work altogether. Gradients
of gradients come from the plain formula and torch.

Which blocks are computed so is decided in :mod:`swin_dense.block`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense import compat
from swin_dense.ops import surroundings
from swin_dense.ops.cores import Attention, AttentionCore, LinearGradients, MLPCore, Place


class Norm(NamedTuple):
    """What a LayerNorm over C channels consists of; weight and bias are (C,).

    ``is_last`` says that it stands at the end of its branch, not at the beginning.
    """

    weight: Tensor
    bias: Tensor
    eps: float
    is_last: bool = False

    @classmethod
    def of(cls, norm: nn.LayerNorm, is_last: bool) -> Norm:
        return cls(norm.weight, norm.bias, norm.eps, is_last)


class Linear(NamedTuple):
    """What a linear layer consists of: (outputs, inputs) and (outputs,)."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, linear: nn.Linear) -> Linear:
        return cls(linear.weight, linear.bias)


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
    x: Tensor,
    kept: Kept,
    norm: Norm,
    qkv: Linear,
    proj: Linear,
    bias: Tensor,
    cosine_scales: Tensor | None,
    attention: Attention,
    saves: bool,
) -> Tensor:
    """Return ``x + factor * proj(attention(qkv(norm(x))))``, or with the norm at the end of the branch.

    Args:
        x: (B, H, W, C).
        kept: which images have the branch, and its factor.
        norm: over C channels.
        qkv: C to 3C; where cosines are compared, keys have the bias zero, and no gradient of it.
        proj: C to C.
        bias: (A, T, T) for A heads and T tokens per window.
        cosine_scales: (A,) the factors on cosines where these are the scores; None where products of q and k are.
        attention: what is done between qkv and proj.
        saves: whether to keep more than x for a backward pass, which computes the rest again.

    Returns:
        (B, H, W, C).
    """
    options = _Options(kept, norm.eps, norm.is_last, attention)
    return _AttentionBranch.apply(options, saves, x, norm.weight, norm.bias, *qkv, *proj, bias, cosine_scales)


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
    options = _Options(kept, norm.eps, norm.is_last, approximate)
    return _MLPBranch.apply(options, saves, x.contiguous(), norm.weight, norm.bias, *fc1, *fc2)


class _Options(NamedTuple):
    """What of a branch is no tensor: ``core`` is what the core is made with."""

    kept: Kept
    eps: float
    norm_is_last: bool
    core: Any


class _Branch(torch.autograd.Function):
    """A branch on its residual.

    Its arguments are the options, whether it keeps more than x, x, weight and bias of the norm, of the first linear
    layer, of the last one, and the tensors of the core.
    """

    core: type[AttentionCore | MLPCore]

    @classmethod
    def forward(cls, ctx, options, saves, *tensors):
        x, norm_weight, norm_bias, first_weight, first_bias, last_weight, last_bias, *core_tensors = tensors
        kept, eps, norm_is_last, core_options = options
        core, channels = cls.core(core_options, core_tensors), x.shape[3:]
        norm = _layer_norm(channels, norm_weight, norm_bias, eps)
        out = _start(x, kept)
        ctx.bands = [band for run in kept.runs for band in core.cut(run, x)]
        saved: list[Tensor | None] = []
        for band in ctx.bands:
            part, target = band.of(x), band.of(out)
            tokens, place = part.reshape(-1, *channels), Place(part.shape[:3], band.shift)
            update, branch = target.view_as(tokens), None
            # What is not named is freed at once, and the cache holds the rest.
            entered = core.enter(tokens if norm_is_last else norm(tokens), first_weight, first_bias)
            found = core.forward(entered, place)
            if norm_is_last:
                branch = torch.addmm(last_bias, core.reached(found), last_weight.t())
                torch.add(tokens, norm(branch), alpha=kept.factor, out=update)
            else:
                torch.add(tokens, last_bias, alpha=kept.factor, out=update)
                update.addmm_(core.reached(found), last_weight.t(), alpha=kept.factor)
            if not band.is_view:
                band.put(out, target)
            if saves and any(ctx.needs_input_grad):
                saved += [*found, branch]
        ctx.save_for_backward(*tensors, *saved)
        ctx.inputs, ctx.options = len(tensors), options
        return out

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, saved = ctx.saved_tensors[: ctx.inputs], ctx.saved_tensors[ctx.inputs :]
        wanted = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # for gradients of gradients
            out = cls.plain(ctx.options, *tensors)
            inputs = [tensor for tensor, wants in zip(tensors, wanted, strict=True) if wants]
            grads = iter(torch.autograd.grad(out, inputs, grad, create_graph=True, allow_unused=True))
            return None, None, *(next(grads) if wants else None for wants in wanted)
        # The forward pass ran outside of autocast, wherever this is called.
        with torch.autocast('cpu', enabled=False):
            return None, None, *cls.by_hand(ctx, grad.contiguous(), tensors, saved, wanted)

    @classmethod
    def plain(cls, options, x, norm_weight, norm_bias, first_weight, first_bias, last_weight, last_bias, *core_tensors):
        """Compute the branch in operations that torch can differentiate."""
        kept, eps, norm_is_last, core_options = options
        images = torch.tensor(kept.images(), dtype=torch.long, device=x.device)
        norm = _layer_norm(x.shape[3:], norm_weight, norm_bias, eps)
        source = x[images] if norm_is_last else norm(x[images])
        reached = cls.core(core_options, core_tensors).plain(F.linear(source, first_weight, first_bias), first_bias)
        branch = F.linear(reached, last_weight, last_bias)
        return x.index_add(0, images, norm(branch) if norm_is_last else branch, alpha=kept.factor)

    @classmethod
    def by_hand(cls, ctx, grad, tensors, saved, wanted):
        """Return the gradients of the tensors, None of those that nobody wants."""
        x, norm_weight, norm_bias, first_weight, first_bias, last_weight, last_bias, *core_tensors = tensors
        wants_x, *wants_norm = wanted[:3]
        kept, eps, norm_is_last, core_options = ctx.options
        wants_source = wants_x or (not norm_is_last and any(wants_norm))
        goes_through_core = wants_source or any((*wanted[3:5], *wanted[7:]))
        wants_branch = goes_through_core or any(wanted[5:7])
        grad_x = _start(grad, kept) if wants_x else None
        norm = _NormGradients(norm_weight, norm_bias, eps, [wants_branch if norm_is_last else wants_x, *wants_norm])
        first = LinearGradients(first_weight, first_bias, *wanted[3:5])
        last = LinearGradients(last_weight, last_bias, *wanted[5:7])
        core = cls.core(core_options, core_tensors, wanted[7:])
        per_band = len(saved) // max(1, len(ctx.bands))
        for index, band in enumerate(ctx.bands):
            part = band.of(x)
            tokens, place = part.reshape(-1, x.shape[3]), Place(part.shape[:3], band.shift)
            grad_out = band.of(grad).reshape(-1, x.shape[3])
            source = tokens if norm_is_last else norm(tokens)
            if saved:
                *found, branch = saved[per_band * index : per_band * (index + 1)]
            else:
                found, branch = core.forward(core.enter(source, first_weight, first_bias), place), None
            grad_branch = grad_out if kept.factor == 1.0 else grad_out * kept.factor
            lacks_branch = norm_is_last and branch is None
            reached = core.reached(found) if last.weight is not None or lacks_branch else source
            if norm_is_last:
                norm(torch.addmm(last_bias, reached, last_weight.t()) if lacks_branch else branch)
                grad_branch = norm.backward(grad_branch)
            last.add(grad_branch, reached)
            if not goes_through_core:
                continue
            grad_first = core.backward(grad_branch, last_weight, found, place, first.bias)
            first.add(grad_first, source)
            if not wants_source:
                continue
            grad_tokens = grad_first @ first_weight
            if not norm_is_last:
                grad_tokens = norm.backward(grad_tokens)
            if grad_x is not None:
                target = band.of(grad_x)
                torch.add(grad_out, grad_tokens, out=target.view_as(tokens))
                if not band.is_view:
                    band.put(grad_x, target)
        linear_grads = first.weight, first.bias, last.weight, last.bias
        return grad_x, norm.weight_grad, norm.bias_grad, *linear_grads, *core.gradients()


class _AttentionBranch(_Branch):
    core = AttentionCore


class _MLPBranch(_Branch):
    core = MLPCore


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


def _layer_norm(channels: Sequence[int], weight: Tensor, bias: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    return functools.partial(F.layer_norm, normalized_shape=channels, weight=weight, bias=bias, eps=eps)


def _start(x: Tensor, kept: Kept) -> Tensor:
    """Return memory for a result of which the runs will be written, and which is x elsewhere."""
    is_whole = sum(run.stop - run.start for run in kept.runs) == len(x)
    return x.new_empty(x.shape) if is_whole else x.clone(memory_format=torch.contiguous_format)
