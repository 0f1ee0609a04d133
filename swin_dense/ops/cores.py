"""What stands between the two linear layers of a residual branch: attention within windows, or an activation.

A core computes one band of a map at a time, forward and backward, and sums up the gradients of its own tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.ops import bands, batched, reference
from swin_dense.windows import Pair

# Tensors that a core has found in a band, or None for what is to be computed again.
Found = Sequence[Any]


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


class Place(NamedTuple):
    """A band: its size, (images, height, width), and the shift of its windows."""

    size: tuple[int, int, int]
    shift: Pair


class AttentionCore:
    """Attention within windows, after a linear layer to queries, keys and values.

    Its tensors are the position bias, (A, T, T), and the factors on cosines, (A,), or None. In a band of L tokens it
    finds its output, (L, C), and then what is in :class:`batched.Attended`.
    """

    def __init__(
        self, attention: Attention, tensors: Sequence[Tensor], wanted: Sequence[bool] = (False, False)
    ) -> None:
        self.attention = attention
        self.bias, self.cosine_scales = tensors
        self.grads = [
            torch.zeros_like(tensor) if wants else None for tensor, wants in zip(tensors, wanted, strict=True)
        ]

    def cut(self, run: slice, x: Tensor) -> Iterator[bands.Band]:
        return bands.cut(run, x, self.attention.window, self.attention.shift)

    def enter(self, source: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return what the first linear layer gives L tokens and a padding token: (L + 1, 3C)."""
        qkv = source.new_empty(len(source) + 1, len(weight))
        torch.addmm(bias, source, weight.t(), out=qkv[:-1])
        # A linear layer maps the official code's zero padding to its bias. Nobody reads the query.
        qkv[-1] = bias
        return qkv

    def forward(self, qkv: Tensor, place: Place) -> Found:
        layout, scale = self._layout(place), self.attention.scale
        out, attended = batched.attend(qkv, self.bias, layout, scale, self.cosine_scales)
        return out, *attended

    def reached(self, found: Found) -> Tensor:
        """Return what the last linear layer takes."""
        return found[0]

    def backward(
        self, grad_branch: Tensor, last_weight: Tensor, found: Found, place: Place, grad_first_bias: Tensor | None
    ) -> Tensor:
        """Return the gradient of what the first linear layer gave, and add that of its padding to that of its bias."""
        channels, scale, layout = len(last_weight), self.attention.scale, self._layout(place)
        attended = batched.Attended(*found[1:])
        grad_out = grad_branch.new_empty(len(grad_branch) + 1, channels)
        torch.mm(grad_branch, last_weight, out=grad_out[:-1])
        grad_out[-1] = 0.0
        grad_qkv, grad_pad, *grads = batched.attend_backward(
            grad_out, attended, self.bias, layout, scale, self.cosine_scales
        )
        if grad_first_bias is not None:
            grad_first_bias[channels:] += grad_pad
        for total, grad in zip(self.grads, grads, strict=True):
            if total is not None and grad is not None:
                total += grad
        return grad_qkv

    def plain(self, qkv: Tensor, qkv_bias: Tensor) -> Tensor:
        heads, window, shift, scale = self.attention
        pad_kv = qkv_bias[len(qkv_bias) // 3 :]
        if self.cosine_scales is not None:
            q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(-3)
            q = F.normalize(q, dim=-1) * self.cosine_scales.view(-1, 1)
            qkv = torch.stack([q, F.normalize(k, dim=-1), v], dim=-3).flatten(-3)
        return reference.window_attention(qkv, self.bias, pad_kv, heads, window, shift, scale, 0.0)

    def gradients(self) -> Sequence[Tensor | None]:
        return self.grads

    def _layout(self, place: Place) -> batched.Layout:
        return batched.layout_of(place.size, self.attention.window, place.shift, self.attention.num_heads)


class MLPCore:
    """GELU. It has no tensors, and finds what the first linear layer gave."""

    def __init__(self, approximate: str, tensors: Sequence[Tensor], wanted: Sequence[bool] = ()) -> None:
        self.approximate = approximate

    def cut(self, run: slice, x: Tensor) -> Iterator[bands.Band]:
        return bands.cut(run, x, (1, 1), (0, 0))

    def enter(self, source: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return what the first linear layer gives."""
        return torch.addmm(bias, source, weight.t())

    def forward(self, hidden: Tensor, place: Place) -> Found:
        return (hidden,)

    def reached(self, found: Found) -> Tensor:
        """Return what the last linear layer takes."""
        return F.gelu(found[0], approximate=self.approximate)

    def backward(
        self, grad_branch: Tensor, last_weight: Tensor, found: Found, place: Place, grad_first_bias: Tensor | None
    ) -> Tensor:
        """Return the gradient of what the first linear layer gave."""
        return torch.ops.aten.gelu_backward(grad_branch @ last_weight, found[0], approximate=self.approximate)

    def plain(self, hidden: Tensor, first_bias: Tensor) -> Tensor:
        return F.gelu(hidden, approximate=self.approximate)

    def gradients(self) -> Sequence[Tensor | None]:
        return ()


class LinearGradients:
    """Gradients of a linear layer's weight and bias, summed over bands; None where nobody wants one."""

    def __init__(self, weight: Tensor, bias: Tensor, wants_weight: bool, wants_bias: bool) -> None:
        self.weight = torch.zeros_like(weight) if wants_weight else None
        self.bias = torch.zeros_like(bias) if wants_bias else None

    def add(self, grad_out: Tensor, tokens: Tensor) -> None:
        if self.weight is not None:
            self.weight.addmm_(grad_out.t(), tokens)
        if self.bias is not None:
            self.bias += grad_out.sum(0)
