"""Saving memory in training by computing again what is cheap."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def recompute_cheap(x: Tensor, *functions: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``functions`` to x one after the other, and keep x alone for the backward pass.

    Meant for cheap functions followed by one matrix product: norm and linear, or activation and linear. Recomputation
    stops as soon as the input of the product is there again, so the product is not done twice.
    """

    def chain(x: Tensor) -> Tensor:
        for function in functions:
            x = function(x)
        return x

    # torch.compile decides by itself what to recompute, and a trace records no backward pass.
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return chain(x)
    draws = any(isinstance(function, nn.Dropout) and function.training and function.p > 0 for function in functions)
    return checkpoint(chain, x, use_reentrant=False, preserve_rng_state=draws)
