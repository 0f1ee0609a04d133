"""Saving memory in training: what is cheap to compute again is not kept for the backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from swin_dense.ops import surroundings


@contextlib.contextmanager
def computed_again(
    result: Tensor, source: Tensor, function: Callable[[Tensor], Tensor], through: nn.Module | None = None
) -> Iterator[None]:
    """While this context is open, whoever would keep ``result`` for a backward pass has it computed again there.

    The source is kept in its place, so this pays where somebody keeps it anyway. It stands back where somebody listens
    to the module that the function calls, and where torch looks after what is kept by other means: in a graph that is
    recorded, under torch.func, and under hooks on saved tensors, such as those of a checkpoint.

    Args:
        result: what ``function(source)`` gave.
        source: what the function took.
        function: cheap, and at any time the same function of its argument, but for the precision that autocast chose.
        through: the module that the function calls, if it does.
    """
    is_kept = result.requires_grad and torch.is_grad_enabled()
    has_hooks = through is not None and surroundings.has_hooks(through)
    if not is_kept or has_hooks or surroundings.looks_after_saved_tensors():
        yield
        return
    # The hooks live as long as the graph: they must not hold the result itself.
    source, dtype, numel, memory = source.detach(), result.dtype, result.numel(), result.untyped_storage()._cdata

    def is_result(tensor: Tensor) -> bool:
        is_all_of_it = tensor.untyped_storage()._cdata == memory and tensor.numel() == numel
        return is_all_of_it and tensor.dtype == dtype and tensor.is_contiguous()

    def pack(tensor: Tensor) -> Tensor | torch.Size:
        return tensor.shape if is_result(tensor) else tensor

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        return kept if isinstance(kept, Tensor) else function(source).to(dtype).reshape(kept)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
