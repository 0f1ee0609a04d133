"""Functions that older versions of torch (2.1 to 2.11) lack, under the names that they have in newer versions.

When the older versions are no longer supported, callers can use torch's functions and this file can be removed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.torch_version import TorchVersion

# Module constants, so that torch.compile does not need to trace the comparisons.
_HAS_2_3, _HAS_2_4, _HAS_2_5, _HAS_2_6, _HAS_2_8, _HAS_2_12 = (
    TorchVersion(torch.__version__) >= f'2.{minor}' for minor in (3, 4, 5, 6, 8, 12)
)

# The dtype of images with 16 bits per channel; torch.uint16 exists since 2.3.
UINT16 = torch.uint16 if _HAS_2_3 else torch.int32
NUMPY_UINT16 = np.uint16 if _HAS_2_3 else np.int32  # as which an array is given to torch


def custom_op(name: str, *, mutates_args: tuple[str, ...], schema: str) -> Callable[[Callable[..., Any]], Any]:
    """See ``torch.library.custom_op``. Before 2.4, the operator is a plain function, which torch.compile traces."""
    if _HAS_2_4:
        return torch.library.custom_op(name, mutates_args=mutates_args, schema=schema)
    return _Operator


class _Operator:
    """A function with a custom backward pass."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._call = function
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def register_fake(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        return fake

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        members = {
            'forward': staticmethod(self._function),
            'setup_context': staticmethod(setup_context),
            'backward': staticmethod(backward),
        }
        self._call = type('_OperatorFunction', (torch.autograd.Function,), members).apply  # type: ignore[attr-defined]


is_compiling = torch.compiler.is_compiling if _HAS_2_3 else torch._utils.is_compiling


def _is_exporting() -> bool:
    return torch.compiler._is_exporting_flag  # in a compilation, is_exporting() is true before 2.12


if _HAS_2_12:
    is_exporting = torch.compiler.is_exporting
elif _HAS_2_8:
    is_exporting = _is_exporting
else:  # torch cannot distinguish an export from a compilation
    is_exporting = is_compiling


def _is_autocast_enabled(device_type: str) -> bool:
    return torch.is_autocast_cpu_enabled() if device_type == 'cpu' else torch.is_autocast_enabled()


def _get_autocast_dtype(device_type: str) -> torch.dtype:
    return torch.get_autocast_cpu_dtype() if device_type == 'cpu' else torch.get_autocast_gpu_dtype()


is_autocast_enabled = torch.is_autocast_enabled if _HAS_2_4 else _is_autocast_enabled
get_autocast_dtype = torch.get_autocast_dtype if _HAS_2_4 else _get_autocast_dtype


def register_load_state_dict_pre_hook(module: nn.Module, hook: Callable[..., None]) -> None:
    """See ``torch.nn.Module.register_load_state_dict_pre_hook``."""
    if _HAS_2_5:
        module.register_load_state_dict_pre_hook(hook)
    else:
        module._register_load_state_dict_pre_hook(hook, with_module=True)


_SAFE_GLOBALS = threading.RLock()


@contextlib.contextmanager
def safe_globals(found: Mapping[str, Any]) -> Iterator[None]:
    """Within this context, ``torch.load(weights_only=True)`` finds some objects, by the names that files have for them.

    ``torch.serialization.safe_globals`` chooses at random between two objects of one name, and afterwards forgets those
    that were registered before. Before torch 2.6, whose ``torch.load`` trusts all files, nothing changes.
    """
    if not _HAS_2_6:
        yield
        return
    with _SAFE_GLOBALS:
        before = torch.serialization.get_safe_globals()
        named = [
            safe if isinstance(safe, tuple) else (safe, f'{safe.__module__}.{safe.__qualname__}') for safe in before
        ]
        kept = [(value, name) for value, name in named if name not in found]
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([*kept, *((value, name) for name, value in found.items())])
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)
