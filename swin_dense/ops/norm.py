"""LayerNorm on a GPU: by a kernel, because torch's takes several times as long as to read and write the map."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swin_dense.ops import context
from swin_dense.utils import compat

# Numbers of a map from which on the kernel is used in eager training. On an H200 it saves the device 130 microseconds
# of a norm of 33,600 x 192 numbers and 40 of one of 8,400 x 384, forward and backward; its calls cost the host 40 to
# 120 microseconds more than those of torch's operator.
LEAST_IN_TRAINING = 2**22


def is_faster_by_kernel(x: Tensor, weight: Tensor | None, bias: Tensor | None, feeds_linear: bool) -> bool:
    """Return whether the kernel normalises a map on a CUDA device, (..., C), over its last axis, and faster."""
    if context.is_tracing() or context.needs_reference(x) or weight is None or bias is None:
        return False
    if weight.dtype != x.dtype and not compat.is_autocast_enabled('cuda'):
        return False  # torch raises an error
    for parameter in (weight, bias):
        # Subclasses, such as sharded tensors, have operations of their own.
        is_plain = type(parameter) in (Tensor, nn.Parameter) and parameter.device == x.device
        if not is_plain or parameter.shape != x.shape[-1:] or parameter.dtype != weight.dtype:
            return False
    from swin_dense.ops.triton import choice

    # A small norm is tried too, for the CUDA graphs to come: the host launches nothing there.
    if type(x) is not Tensor or not choice.is_norm_kernel(x, weight, _dtype_of_norm(x, feeds_linear)):
        return False
    is_small = torch.is_grad_enabled() and x.numel() < LEAST_IN_TRAINING
    return not is_small or torch.cuda.is_current_stream_capturing()


def layer_norm_by_kernel(x: Tensor, weight: Tensor, bias: Tensor, eps: float, feeds_linear: bool) -> Tensor:
    """Return the norm of a map, (..., C), where :func:`is_faster_by_kernel` holds.

    The dtype is that of torch's norm. But under autocast, if ``feeds_linear``, it is the one to which the linear layer
    that reads the norm would convert it.
    """
    from swin_dense.ops.triton import norm

    return norm.layer_norm(x, weight, bias, eps, _dtype_of_norm(x, feeds_linear))


def _dtype_of_norm(x: Tensor, feeds_linear: bool) -> torch.dtype:
    if not compat.is_autocast_enabled('cuda'):
        return x.dtype
    return compat.get_autocast_dtype('cuda') if feeds_linear else torch.float32
