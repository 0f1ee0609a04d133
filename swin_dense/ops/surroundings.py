"""In what surroundings an operation runs: what records it, transforms it or listens to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode

from swin_dense import compat


def is_recorded() -> bool:
    """Tell whether a graph is being recorded that shall hold for other sizes: a trace, an export, a compilation."""
    return compat.is_compiling() or is_exported()


def is_exported() -> bool:
    """Tell whether a graph is being recorded that is to leave this process: a trace, an export."""
    return torch.jit.is_tracing() or compat.is_exporting()


def is_transformed() -> bool:
    """Tell whether torch.func transforms what runs: grad, vmap and the like."""
    return torch._C._are_functorch_transforms_active()


def is_rewritten() -> bool:
    """Tell whether what runs is recorded or transformed, by somebody who knows torch's operations best."""
    return is_recorded() or is_transformed()


def has_values(x: Tensor) -> bool:
    """Tell whether there are numbers behind the tensor, or its shape alone."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def is_watched() -> bool:
    """Tell whether a mode of torch sees every operation: a counter of FLOPs, say. A default device does not count."""
    modes = _get_current_function_mode_stack()
    return _get_current_dispatch_mode() is not None or any(not isinstance(mode, DeviceContext) for mode in modes)


def reason_for_plain_operations(x: Tensor) -> str | None:
    """Say what in the surroundings of x asks for operations that everybody knows and that hold anywhere, or nothing."""
    if is_recorded():
        return 'a graph is recorded, to hold for other sizes'
    if is_transformed():
        return 'torch.func transforms what runs'
    if not has_values(x):
        return 'the map has no values'
    # FlopCounterMode does not know torch's fused attention of a CPU.
    return 'a torch mode watches every operation' if x.device.type == 'cpu' and is_watched() else None


def looks_after_saved_tensors() -> bool:
    """Tell whether what autograd keeps is somebody else's business already."""
    return is_rewritten() or compat.has_saved_tensors_hooks()


def has_hooks(module: nn.Module) -> bool:
    """Tell whether somebody listens to this module, or to every module."""
    own = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(own) or has_global_hooks()


def has_global_hooks() -> bool:
    """Tell whether somebody listens to every module."""
    return any(getattr(torch_module, name) for name in _GLOBAL_HOOKS)


_GLOBAL_HOOKS = [f'_global_{name}_hooks' for name in ('forward', 'forward_pre', 'backward', 'backward_pre')]
