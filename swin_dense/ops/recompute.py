"""Save memory in training by recomputing cheap results in the backward pass instead of saving them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from swin_dense.ops import context


@contextlib.contextmanager
def computed_again(
    result: Tensor, source: Tensor, function: Callable[[Tensor], Tensor], through: nn.Module | None = None
) -> Iterator[None]:
    """Make autograd recompute ``result`` in the backward pass instead of saving it, within this context.

    Autograd saves ``source`` instead, so this saves memory only if autograd saves ``source`` anyway. The context has no
    effect if ``through`` has hooks, if ``function`` works in place, or if the saved tensors are managed elsewhere:
    while a graph is being recorded, under torch.func, and under saved-tensor hooks such as those of
    activation checkpointing.

    Args:
        result: the result of ``function(source)``.
        source: the argument of ``function``.
        function: a cheap, deterministic function; only the precision, chosen by autocast, may differ later.
        through: the module that ``function`` calls, or None.
    """
    is_saved = result.requires_grad and torch.is_grad_enabled()
    has_hooks = through is not None and context.has_hooks(through)
    if not is_saved or has_hooks or context.manages_saved_tensors() or _share_memory(result, source):
        yield
        return
    # The hooks live as long as the graph, so they must not reference the result.
    source, dtype, numel, memory = source.detach(), result.dtype, result.numel(), result.untyped_storage()._cdata

    def is_result(tensor: Tensor) -> bool:
        is_all_of_it = tensor.untyped_storage()._cdata == memory and tensor.numel() == numel
        return is_all_of_it and tensor.dtype == dtype and tensor.is_contiguous()

    def pack(tensor: Tensor) -> Tensor | torch.Size:
        return tensor.shape if is_result(tensor) else tensor

    def unpack(saved: Tensor | torch.Size) -> Tensor:
        return saved if isinstance(saved, Tensor) else function(source).to(dtype).reshape(saved)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata
