"""Window attention through torch's scaled_dot_product_attention: the default.

Padding, roll and partition are one gather of the real tokens, their inverses another, and only the windows at the
edges of a shifted map get a mask; see :mod:`swin_dense.ops.plan`. None of that changes a number.

torch's fused CPU kernel gives the bias no gradient. Training on a CPU therefore goes through an operator with a
backward pass of its own, which saves qkv alone and recomputes the probabilities. To torch.compile the operator is
opaque: nothing in it depends on the size of the map as far as the graph is concerned.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from swin_dense.ops import reference
from swin_dense.ops.plan import Group, Plan, plan_windows
from swin_dense.windows import Pair


def reason_not_to_run(qkv: Tensor, window_size: Pair, num_heads: int, dropout_p: float) -> str | None:
    return None


def window_attention(
    qkv: Tensor,
    relative_bias: Tensor | None,
    pad_kv: Tensor | None,
    num_heads: int,
    window_size: Pair,
    shift: Pair,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`."""
    if not has_values(qkv):
        return reference.window_attention(qkv, relative_bias, pad_kv, num_heads, window_size, shift, scale, dropout_p)
    bias = None if relative_bias is None else relative_bias.to(qkv.dtype)
    pad = None if pad_kv is None else pad_kv.to(qkv.dtype)
    wants_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (qkv, bias, pad))
    if dropout_p == 0.0 and (torch.compiler.is_compiling() or (wants_grad and qkv.device.type == 'cpu')):
        return _operator(qkv, bias, pad, num_heads, window_size, shift, scale)
    return _attend(qkv, bias, pad, num_heads, window_size, shift, scale, dropout_p)


def has_values(qkv: Tensor) -> bool:
    """Tell whether plans can be used: not while a graph is recorded that must hold for other sizes and machines."""
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        return False
    return torch.compiler.is_compiling() or not (qkv.is_meta or isinstance(qkv, FakeTensor))


def _attend(
    qkv: Tensor,
    bias: Tensor | None,
    pad: Tensor | None,
    num_heads: int,
    window: Sequence[int],
    shift: Sequence[int],
    scale: float,
    dropout_p: float,
) -> Tensor:
    batch, height, width, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2], qkv.shape[3] // 3
    plan = plan_windows(height, width, (window[0], window[1]), (shift[0], shift[1]), qkv.device)
    outs = []
    for group in plan.groups:
        windows = _gather(qkv, group, pad)
        q, k, v = windows.view(-1, window[0] * window[1], 3, num_heads, channels // num_heads).permute(2, 0, 3, 1, 4)
        mask = _score_bias(bias, group.mask, qkv.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, scale=scale)
        outs.append(out.transpose(1, 2).reshape(batch, len(group.tokens), channels))
    return _to_raster(outs, plan).view(batch, height, width, channels)


@torch.library.custom_op('swin_dense::window_attention', mutates_args=())
def _operator(
    qkv: Tensor,
    bias: Tensor | None,
    pad: Tensor | None,
    num_heads: int,
    window: Sequence[int],
    shift: Sequence[int],
    scale: float,
) -> Tensor:
    if bias is not None:
        bias = bias.detach()  # or torch would take its slow kernel, the only one with a gradient for the bias
    return _attend(qkv, bias, pad, num_heads, window, shift, scale, dropout_p=0.0)


@_operator.register_fake
def _(qkv, bias, pad, num_heads, window, shift, scale):
    return qkv.new_empty(*qkv.shape[:3], qkv.shape[3] // 3)


@torch.library.custom_op('swin_dense::window_attention_backward', mutates_args=())
def _backward_operator(
    grad_out: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    pad: Tensor | None,
    num_heads: int,
    window: Sequence[int],
    shift: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of qkv, bias and pad; those of the last two are zeros where they are None."""
    batch, height, width, channels = grad_out.shape
    plan = plan_windows(height, width, (window[0], window[1]), (shift[0], shift[1]), qkv.device)
    exact = torch.promote_types(qkv.dtype, torch.float32)
    tokens, head_dim = window[0] * window[1], channels // num_heads
    grad_bias = qkv.new_zeros(num_heads, tokens, tokens, dtype=exact)
    grad_pad = qkv.new_zeros(2 * channels, dtype=exact)
    grads = []
    for group in plan.groups:
        heads = _gather(qkv, group, pad).to(exact).view(-1, tokens, 3, num_heads, head_dim).permute(2, 0, 3, 1, 4)
        grad_windows = _gather(grad_out, group, None).to(exact)
        grad_heads = grad_windows.view(-1, tokens, num_heads, head_dim).transpose(1, 2)
        mask = _score_bias(bias, group.mask, exact)
        grad_qkv, grad_scores = _backward_of_windows(heads.contiguous(), grad_heads.contiguous(), mask, scale)
        grad_bias += grad_scores.sum(0)
        grad = grad_qkv.permute(1, 3, 0, 2, 4).reshape(batch, len(group.tokens), 3 * channels)
        if len(group.padding):
            grad_pad += grad.index_select(1, group.padding)[:, :, channels:].sum((0, 1))
        grads.append(grad)
    grad_qkv = _to_raster(grads, plan).view_as(qkv).to(qkv.dtype)
    return grad_qkv, grad_bias.to(qkv.dtype), grad_pad.to(qkv.dtype)


@_backward_operator.register_fake
def _(grad_out, qkv, bias, pad, num_heads, window, shift, scale):
    tokens = window[0] * window[1]
    return torch.empty_like(qkv), qkv.new_empty(num_heads, tokens, tokens), qkv.new_empty(qkv.shape[3] // 3 * 2)


def _save_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.geometry = inputs[3:]


def _backward(ctx, grad_out):
    qkv, bias, pad = ctx.saved_tensors
    grad_qkv, grad_bias, grad_pad = _backward_operator(grad_out.contiguous(), qkv, bias, pad, *ctx.geometry)
    return (grad_qkv, None if bias is None else grad_bias, None if pad is None else grad_pad, *(None,) * 4)


_operator.register_autograd(_backward, setup_context=_save_inputs)


def _backward_of_windows(qkv: Tensor, grad_out: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Recompute the probabilities and return the gradients of qkv, (3, N, A, T, D), and of the scores."""
    n_windows, heads, tokens, dim = grad_out.shape
    q, k, v = qkv.view(3, n_windows * heads, tokens, dim)
    grad_out = grad_out.view(n_windows * heads, tokens, dim)
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale).view(n_windows, heads, tokens, tokens)
    if mask is not None:
        scores += mask
    weights = scores.softmax(-1).view(n_windows * heads, tokens, tokens)
    grad_weights = torch.bmm(grad_out, v.transpose(1, 2))
    grad_scores = torch.ops.aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
    grad_qkv = torch.empty_like(qkv)
    grad_q, grad_k, grad_v = grad_qkv.view(3, n_windows * heads, tokens, dim)
    torch.bmm(grad_scores, k, out=grad_q).mul_(scale)
    torch.bmm(grad_scores.transpose(1, 2), q, out=grad_k).mul_(scale)
    torch.bmm(weights.transpose(1, 2), grad_out, out=grad_v)
    return grad_qkv, grad_scores.view(n_windows, heads, tokens, tokens)


def _gather(x: Tensor, group: Group, pad: Tensor | None) -> Tensor:
    """Return the group's slots of x, (B, H, W, C), as (B, n * T, C).

    Those without a real token hold ``pad`` in their last channels, one for each of its entries, and zeros before.
    """
    windows = x.flatten(1, 2).index_select(1, group.tokens)
    if not len(group.padding):
        return windows
    if pad is None:
        return windows.index_fill_(1, group.padding, 0.0)
    slot = F.pad(pad, (windows.shape[2] - len(pad), 0))
    return windows.index_copy_(1, group.padding, slot.expand(len(windows), len(group.padding), -1))


def _to_raster(in_groups: list[Tensor], plan: Plan) -> Tensor:
    in_window_order = in_groups[0] if len(in_groups) == 1 else torch.cat(in_groups, 1)
    return in_window_order.index_select(1, plan.slots)


def _score_bias(bias: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None if bias is None else bias[None].to(dtype)
    mask = mask.to(dtype)
    return mask[None, None] if bias is None else (bias + mask)[None]
