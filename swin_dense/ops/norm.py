"""LayerNorm on a GPU: by a kernel, because torch's takes several times as long as to read and write the map."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swin_dense.ops import context
from swin_dense.utils import compat

# Numbers of a map from which on the kernel is used in eager training. On an H200 it saves the device 128 microseconds
# of a norm of 33,600 x 192 numbers and 28 of one of 8,400 x 384, in bfloat16, forward and backward; its calls cost the
# slow host there 30 to 380 microseconds more than those of torch's operator.
LEAST_IN_TRAINING = 2**22


def layer_norm_by_kernel(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, feeds_linear: bool
) -> Tensor | None:
    """Return the norm of a map on a CUDA device, (..., C), over its last axis, or None where torch's is to be used.

    The dtype is that of torch's norm. But under autocast, if ``feeds_linear``, it is the one to which the linear layer
    that reads the norm would convert it.
    """
    if weight is None or bias is None or context.needs_single_operations(x):
        return None
    dtype = x.dtype
    if compat.is_autocast_enabled('cuda'):
        dtype = compat.get_autocast_dtype('cuda') if feeds_linear else torch.float32
    elif weight.dtype != dtype:
        return None  # torch raises an error
    for parameter in (weight, bias):
        # Subclasses, such as sharded tensors, have operations of their own.
        is_plain = type(parameter) in (Tensor, nn.Parameter) and parameter.device == x.device
        if not is_plain or parameter.shape != x.shape[-1:] or parameter.dtype != weight.dtype:
            return None
    import swin_dense.ops.triton.choice as choice
    import swin_dense.ops.triton.norm as kernel
    import swin_dense.ops.triton.trials as trials

    # A small norm is tried too, for the CUDA graphs to come: the host launches nothing there.
    trial = (trials.NormTrial, x.device, dtype, x.dtype, weight.dtype, x.shape[-1], torch.is_grad_enabled())
    is_right = choice.reasons[trial] is None
    is_small = torch.is_grad_enabled() and x.numel() < LEAST_IN_TRAINING
    if not is_right or (is_small and not torch.cuda.is_current_stream_capturing()):
        return None
    return kernel.layer_norm(x, weight, bias, eps, dtype)
