"""Saving memory in training by computing again what is cheap."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recompute_cheap(function: Callable[[Tensor], Tensor], x: Tensor, is_random: bool) -> Tensor:
    """Return ``function(x)``, of which the backward pass keeps x alone.

    Meant for a cheap function followed by a matrix product, such as the second half of an MLP. Recomputation stops
    as soon as all that was saved is there again, which is before the product is done a second time.

    Args:
        function: what to compute.
        x: its argument.
        is_random: whether the function draws random numbers, which the second time must be the same.
    """
    # torch.compile decides by itself what to recompute, and a trace records no backward pass.
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return function(x)
    return checkpoint(function, x, use_reentrant=False, preserve_rng_state=is_random)
