"""What surrounds an operation: what records it, transforms it or watches it."""

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
    """Return whether a graph is being recorded that leaves this process: by torch.jit.trace or an export."""
    return torch.jit.is_tracing() or compat.is_exporting()


def is_tracing() -> bool:
    """Return whether a graph is being recorded that must hold for other sizes: an export, or by torch.compile."""
    return compat.is_compiling() or is_exporting()


def is_transformed() -> bool:
    """Return whether torch.func transforms what runs: grad, vmap and the like."""
    return torch._C._are_functorch_transforms_active()


def is_rewritten() -> bool:
    """Return whether a compiler, an exporter or torch.func rewrites what runs."""
    return is_tracing() or is_transformed()


def has_values(x: Tensor) -> bool:
    """Return whether a tensor has values, not its shape alone."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def plain_reason(x: Tensor) -> str | None:
    """Return why only plain, composable ATen operations may be used for `x`, or None."""
    if is_tracing():
        return 'a graph is recorded that must hold for other sizes'
    if is_transformed():
        return 'torch.func transforms what runs'
    if forward_ad._current_level >= 0:
        return 'forward-mode autograd is active'
    if not has_values(x):
        return 'the map has no values'
    # FlopCounterMode does not know torch's fused attention on a CPU.
    return 'a torch mode watches every operation' if x.device.type == 'cpu' and _is_watched() else None


def _is_watched() -> bool:
    """Return whether a torch mode sees every operation, such as a FLOP counter. A default device does not count."""
    modes = _get_current_function_mode_stack()
    return _get_current_dispatch_mode() is not None or any(not isinstance(mode, DeviceContext) for mode in modes)


def manages_saved_tensors() -> bool:
    """Return whether a compiler, torch.func or hooks on saved tensors decide what autograd saves."""
    return is_rewritten() or compat.has_saved_tensors_hooks()


def has_hooks(*modules: nn.Module) -> bool:
    """Return whether forward or backward hooks are registered on any of the modules, or on all modules there are."""
    own = any(getattr(module, f'_{kind}_hooks') for module in modules for kind in _HOOKS)
    return own or any(getattr(torch_module, f'_global_{kind}_hooks') for kind in _HOOKS)


_HOOKS = ('forward', 'forward_pre', 'backward', 'backward_pre')
