"""Models inside the wrappers of PyTorch, and the names of their parameters."""

import re

from torch import nn

from swin_dense.utils.private import compiled_module

_WRAPPERS = re.compile(r'\b(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.')


def unwrapped(name: str) -> str:
    """Return a parameter name without the components that wrappers insert, such as those of ``torch.compile``."""
    return _WRAPPERS.sub('', name)


def unwrapped_module(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers of data parallelism (``.module``) and compilation (``._orig_mod``)."""
    while isinstance(inner := getattr(module, 'module', compiled_module(module, None)), nn.Module):
        module = inner
    return module
