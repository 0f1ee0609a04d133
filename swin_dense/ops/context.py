"""Detect the context of an operation: tracing, compilation, torch.func transforms, torch modes and hooks."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from swin_dense.utils import compat
from swin_dense.utils.private import FakeTensor, count_modes, forward_level, get_tracing_state, is_transformed


def is_exporting() -> bool:
    """Return whether torch.jit.trace or an exporter is recording a graph, to be run outside of this process."""
    return torch.jit.is_tracing() or compat.is_exporting()


def is_tracing() -> bool:
    """Return whether torch.compile or an exporter is recording a graph, which must be valid for other sizes."""
    return compat.is_compiling() or get_tracing_state() is not None


def needs_reference(x: Tensor, is_tracing: bool) -> bool:
    """Return whether ``x`` must be computed only by composable ATen operations, as the backend 'reference' does."""
    if is_tracing:
        return is_exporting() or is_transformed()  # torch.compile cannot trace the rest
    # FlopCounterMode, for one, does not count torch's fused attention on a CPU.
    has_mode = x.is_cpu and count_modes() > 0
    return has_mode or is_transformed() or forward_level() >= 0 or isinstance(x, FakeTensor)


def needs_single_operations(x: Tensor) -> bool:
    """Return whether operations on ``x`` must run one by one: something records, transforms or counts them."""
    if compat.is_compiling() or get_tracing_state() is not None or type(x) is not Tensor:
        return True
    return is_transformed() or forward_level() >= 0 or count_modes() > 0


def torchs_forward(module: ModuleType, name: str) -> Callable[..., Any]:
    """Return the ``forward`` of a class in a module of torch, or a function equal to none if a library replaced it."""
    forward = getattr(module, name).forward
    return forward if getattr(forward, '__globals__', None) is vars(module) else torchs_forward
