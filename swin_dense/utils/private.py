"""Private names of torch and Python, each with a fallback for versions that have dropped it.

With ``private_mm``, which has those of mmengine and mmdet and needs no torch, the rest of the package uses no private
name of another package. Old versions, which cannot change, are in ``compat``.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as module_of_torch


def _found(owner: Any, path: str, otherwise: Any) -> Any:
    """Return the object at a dotted path below a module, or a substitute if there is none."""
    for name in path.split('.'):
        owner = getattr(owner, name, None)
    return otherwise if owner is None else owner


# Without it, tensors of torch's FakeTensorMode get fused attention, which may raise an error outside of that mode.
FakeTensor: Any = _found(torch, '_subclasses.fake_tensor.FakeTensor', ())
# What every pass asks many times is asked in C, as torch's modules do.
# What torch.jit.trace records, or None. Without it, torch's own question is asked, which costs the host more.
get_tracing_state: Callable[[], Any] = _found(torch, '_C._get_tracing_state', lambda: torch.jit.is_tracing() or None)
# The number of torch's modes. Without it, they do not see into attention: FlopCounterMode counts too few operations.
count_modes: Callable[[], int] = _found(torch, '_C._len_torch_dispatch_stack', lambda: 0)
# For CUDA, as Triton and torch's compiler call them: the index of the current device, and the address of the current
# stream of a device by its index. Builds without CUDA lack them; without them, torch's functions cost the host more.
current_cuda_device: Callable[[], int] = _found(torch, '_C._cuda_getDevice', torch.cuda.current_device)
current_raw_stream: Callable[[int], int] = _found(
    torch, '_C._cuda_getCurrentRawStream', lambda device: torch.cuda.current_stream(device).cuda_stream
)
# Without it, torch.func gets fused attention, for which some transforms raise an error: use attn_backend='reference'.
is_transformed: Callable[[], bool] = _found(torch, '_C._are_functorch_transforms_active', lambda: False)
# Without it, linear layers on AMD's Zen 5 use oneDNN even within torch.backends.mkldnn.flags(enabled=False).
is_mkldnn_enabled: Callable[[], bool] = _found(torch, '_C._get_mkldnn_enabled', lambda: True)
# Without it, linear layers on AMD's Zen 5 are those of torch, which are slower there.
linear_pointwise: Any = _found(torch.ops.mkldnn, '_linear_pointwise', None)
# Without it, torch.load(weights_only=True) reads checkpoints, which refuses those with more than tensors.
PythonUnpickler: Any = _found(pickle, '_Unpickler', None)
if not hasattr(PythonUnpickler, 'dispatch'):  # the table of operations, of which the reader refuses some
    PythonUnpickler = None

# At least 0 in forward-mode differentiation. Without it, attention needs attn_backend='reference' there.
forward_level: Callable[[], int] = functools.partial(getattr, forward_ad, '_current_level', -1)

_HOOKS = ('_forward_hooks', '_forward_pre_hooks', '_backward_hooks', '_backward_pre_hooks')
# torch adds to the dicts of all modules, and never replaces them.
_GLOBAL_HOOKS = [getattr(module_of_torch, f'_global{name}', {}) for name in _HOOKS]


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the dicts of hooks of a module and of all modules. Without the names, those of dropout do not run."""
    return [*map(module.__dict__.get, _HOOKS), *_GLOBAL_HOOKS]  # every block asks, so in C


def tensors_of(module: nn.Module) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the parameters and buffers of a module without its children; without the names, this takes longer."""
    parameters = getattr(module, '_parameters', None)
    buffers = getattr(module, '_buffers', None)
    if parameters is None or buffers is None:
        return dict(module.named_parameters(recurse=False)), dict(module.named_buffers(recurse=False))
    return parameters, buffers


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Return whether files contain a buffer. Without the name, yes: a load reports that the others are missing."""
    return buffer not in getattr(module, '_non_persistent_buffers_set', ())


def copy_metadata(source: Any, target: Any) -> None:
    """Give a state dict the versions of modules in another. Without them, former names of parameters are not known."""
    target._metadata = getattr(source, '_metadata', None)


def compiled_module(model: Any, otherwise: Any) -> Any:
    """Return the module inside that of torch.compile. Without the name, give the functions the module itself."""
    return getattr(model, '_orig_mod', otherwise)


def assume_constant_result(function: Callable[..., Any]) -> Any:
    """See ``torch.compiler.assume_constant_result``, which would import the compiler.

    Without the name, torch.compile traces the trials of the Triton kernels, which it cannot.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def backed_size_oblivious() -> contextlib.AbstractContextManager[Any]:
    """Within this context, torch.export does not specialise a graph on whether a size is 1.

    Without the name it does, and the comparison of the file with the model notices that.
    """
    with contextlib.suppress(ImportError):
        from torch.fx.experimental import _config

        if hasattr(_config, 'backed_size_oblivious'):
            return _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    return contextlib.nullcontext()


@contextlib.contextmanager
def progress_bar(**options: Any) -> Iterator[Callable[[int], Any]]:
    """Yield a function that takes a number of bytes, and shows torch.hub's progress bar; without it, nothing is shown.

    Without the package tqdm, torch.hub has a stand-in for it.
    """
    bar = getattr(torch.hub, 'tqdm', None)
    if bar is None:
        yield lambda _: None
        return
    with bar(**options) as shown:
        yield shown.update
