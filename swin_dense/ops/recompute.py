"""Less memory in training: what is cheap to recompute is not saved for the backward pass."""

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
    """Let autograd recompute ``result`` in the backward pass instead of saving it, while this context is open.

    The source is saved in its place, so this pays where autograd saves it anyway. Nothing changes where the module
    that the function calls has hooks, where the function works in place, and where other means decide what is saved: in
    a graph that is recorded, under torch.func, and under hooks on saved tensors, such as those of a checkpoint.

    Args:
        result: what ``function(source)`` gave.
        source: what the function took.
        function: cheap, and at any time the same function of its argument, but for the precision that autocast chose.
        through: the module that the function calls, if it does.
    """
    is_saved = result.requires_grad and torch.is_grad_enabled()
    has_hooks = through is not None and context.has_hooks(through)
    if not is_saved or has_hooks or context.manages_saved_tensors() or _share_memory(result, source):
        yield
        return
    # The hooks live as long as the graph: they must not hold the result itself.
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
