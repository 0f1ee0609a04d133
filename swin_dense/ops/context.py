"""Detect the context of an operation: tracing, compilation, torch.func transforms, torch modes and hooks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

from swin_dense.utils import compat


def is_exporting() -> bool:
    """Return whether torch.jit.trace or an exporter is recording a graph, to be run outside of this process."""
    return torch.jit.is_tracing() or compat.is_exporting()


def is_tracing() -> bool:
    """Return whether an exporter or torch.compile is recording a graph, which must be valid for other sizes."""
    return compat.is_compiling() or is_exporting()


def is_transformed() -> bool:
    """Return whether a torch.func transform, such as grad or vmap, is active."""
    return torch._C._are_functorch_transforms_active()


def is_rewritten() -> bool:
    """Return whether a compiler, an exporter or a torch.func transform is active."""
    return is_tracing() or is_transformed()


def has_values(x: Tensor) -> bool:
    """Return whether a tensor has data, unlike meta and fake tensors."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def plain_reason(x: Tensor) -> str | None:
    """Return why only plain, composable ATen operations may be used for `x`, or None."""
    if is_tracing():
        return 'a graph for other sizes is being recorded'
    if is_transformed():
        return 'a torch.func transform is active'
    if forward_ad._current_level >= 0:
        return 'forward-mode autograd is active'
    if not has_values(x):
        return 'the map is a meta or fake tensor without data'
    # FlopCounterMode does not count torch's fused attention on a CPU.
    return 'a torch mode intercepts every operation' if x.device.type == 'cpu' and _has_torch_mode() else None


def _has_torch_mode() -> bool:
    """Return whether a torch mode other than a default device is active, such as a FLOP counter."""
    modes = _get_current_function_mode_stack()
    return _get_current_dispatch_mode() is not None or any(not isinstance(mode, DeviceContext) for mode in modes)


def manages_saved_tensors() -> bool:
    """Return whether a compiler, torch.func or saved-tensor hooks control which tensors autograd saves."""
    return is_rewritten() or compat.has_saved_tensors_hooks()


def type_of(module: nn.Module) -> type[nn.Module]:
    """Return the type of a module, of which torch.export makes a subclass while it records a graph."""
    kind = type(module)
    return kind.__bases__[1] if kind.__bases__[0].__name__ == 'AttrProxy' else kind


def has_hooks(*modules: nn.Module) -> bool:
    """Return whether forward or backward hooks are registered on any of the modules, or globally."""
    own = any(getattr(module, f'_{kind}_hooks') for module in modules for kind in _HOOKS)
    return own or any(getattr(torch_module, f'_global_{kind}_hooks') for kind in _HOOKS)


_HOOKS = ('forward', 'forward_pre', 'backward', 'backward_pre')
