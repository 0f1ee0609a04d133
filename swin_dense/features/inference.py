"""Running a backbone for its features alone: in evaluation mode, grouped by size, from any thread."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swin_dense import checks


def check_levels(backbone: Any, levels: Sequence[int] | None) -> tuple[int, ...]:
    """Return the strides to extract, in the backbone's order."""
    stride, count = Counter(backbone.out_strides).most_common(1)[0]
    if count > 1:
        raise ValueError(
            f'{count} of the maps have stride {stride}, so a stride does not name one; '
            'choose among them with out_indices when building the backbone'
        )
    if levels is None:
        return tuple(backbone.out_strides)
    chosen = checks.integers('levels', levels)
    for stride in chosen:
        checks.one_of('every entry of levels', stride, backbone.out_strides)
    return tuple(stride for stride in backbone.out_strides if stride in chosen)


def group_by_size(images: Iterable[Tensor], batch_size: int) -> list[list[int]]:
    """Return the indices of images that run together: of equal size, at most ``batch_size`` of them."""
    by_shape: dict[torch.Size, list[int]] = {}
    for index, image in enumerate(images):
        by_shape.setdefault(image.shape, []).append(index)
    return [
        members[start : start + batch_size]
        for members in by_shape.values()
        for start in range(0, len(members), batch_size)
    ]


def run_batch(
    backbone: Any,
    batch: Tensor,
    strides: Sequence[int],
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    gradients: bool = False,
) -> list[dict[int, Tensor]]:
    """Compute the maps of normalised images of one size.

    Args:
        backbone: what runs.
        batch: (B, C, H, W), on any device and of any floating dtype.
        strides: of the maps to return.
        dtype: of the maps, None for the dtype that the backbone computes in.
        autocast: dtype of ``torch.autocast``, None for none.
        gradients: record the graph.

    Returns:
        Per image, {stride: (C, ceil(H / stride), ceil(W / stride))}.
    """
    parameter = next(backbone.parameters())
    mode = contextlib.nullcontext() if gradients else torch.inference_mode()
    with evaluation_mode(backbone), mode:
        batch = batch.to(parameter.device, parameter.dtype)
        with contextlib.nullcontext() if autocast is None else torch.autocast(parameter.device.type, autocast):
            outs = backbone(batch)
    maps = dict(zip(backbone.out_strides, outs, strict=True))
    return [
        # The copy, made outside inference mode, is an ordinary tensor that a head can be trained on, and keeps one
        # image's map from holding the whole batch in memory.
        {stride: maps[stride][index].to(dtype or maps[stride].dtype, copy=True) for stride in strides}
        for index in range(len(batch))
    ]


_modes_lock = threading.Lock()
_modes: dict[int, tuple[int, list[tuple[nn.Module, bool]]]] = {}


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the block and restore each submodule's mode after it.

    Threads may use one module at the same time: the first to enter switches, the last to leave restores.
    """
    with _modes_lock:
        users, modes = _modes.get(id(module), (0, []))
        if users == 0:
            modes = [(part, part.training) for part in module.modules()]
            for part, is_training in modes:
                if is_training:
                    part.training = False
        _modes[id(module)] = (users + 1, modes)
    try:
        yield
    finally:
        with _modes_lock:
            users, modes = _modes.pop(id(module))
            if users > 1:
                _modes[id(module)] = (users - 1, modes)
            else:
                for part, is_training in modes:
                    part.training = is_training
