"""What torch 2.1 to 2.5 lack, by the names that torch 2.6 has; with 2.6 and later all is torch's own.

When nobody uses older ones, what calls a function of this file calls torch's of the same name, and the file goes.
"""

from __future__ import annotations

import codecs
import contextlib
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.torch_version import TorchVersion

# Constants, which compilation can look through.
_HAS_2_3, _HAS_2_4, _HAS_2_5, _HAS_2_6, _HAS_2_7 = (
    TorchVersion(torch.__version__) >= f'2.{minor}' for minor in range(3, 8)
)

# What 16 bits per channel are held in; torch has their own type since 2.3.
UINT16 = torch.uint16 if _HAS_2_3 else torch.int32
OutOfMemoryError = torch.OutOfMemoryError if _HAS_2_5 else torch.cuda.OutOfMemoryError


def storable(dtype: np.dtype) -> np.dtype:
    """Return the type in which torch takes an array of this type."""
    return np.dtype(np.int32) if dtype == np.uint16 and not _HAS_2_3 else dtype


def custom_op(name: str, *, mutates_args: tuple[str, ...], schema: str) -> Callable[[Callable[..., Any]], Any]:
    """See ``torch.library.custom_op``. Before 2.4 an operator is a plain function, which compilation looks into."""
    if _HAS_2_4:
        return torch.library.custom_op(name, mutates_args=mutates_args, schema=schema)
    return _Operator


class _Operator:
    """A function with a backward pass of its own."""

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


def is_compiling() -> bool:
    """See ``torch.compiler.is_compiling``."""
    return torch.compiler.is_compiling() if _HAS_2_3 else torch._utils.is_compiling()


def is_exporting() -> bool:
    """See ``torch.compiler.is_exporting``, which there is since 2.7; before, an export is a compilation."""
    return torch.compiler.is_exporting() if _HAS_2_7 else is_compiling()


def is_autocast_enabled(device_type: str) -> bool:
    """See ``torch.is_autocast_enabled``."""
    if _HAS_2_4:
        return torch.is_autocast_enabled(device_type)
    return torch.is_autocast_cpu_enabled() if device_type == 'cpu' else torch.is_autocast_enabled()


def get_autocast_dtype(device_type: str) -> torch.dtype:
    """See ``torch.get_autocast_dtype``."""
    if _HAS_2_4:
        return torch.get_autocast_dtype(device_type)
    return torch.get_autocast_cpu_dtype() if device_type == 'cpu' else torch.get_autocast_gpu_dtype()


def register_load_state_dict_pre_hook(module: nn.Module, hook: Callable[..., None]) -> None:
    """See ``torch.nn.Module.register_load_state_dict_pre_hook``."""
    if _HAS_2_5:
        module.register_load_state_dict_pre_hook(hook)
    else:
        module._register_load_state_dict_pre_hook(hook, with_module=True)


def has_saved_tensors_hooks() -> bool:
    """Tell whether somebody decides what autograd keeps, also while something is recorded; before 2.5 say yes."""
    return not _HAS_2_5 or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


# --- reading pickles without trusting them ---------------------------------------------------------------------------

# Entries are classes and functions, or pairs of one and the name by which pickles ask for it.
_safe: dict[str, Any] = {}


def add_safe_globals(entries: list[Any]) -> None:
    """See ``torch.serialization.add_safe_globals``."""
    if _HAS_2_6:
        torch.serialization.add_safe_globals(entries)
    else:
        _safe.update(map(_named, entries))


def get_safe_globals() -> list[Any]:
    """See ``torch.serialization.get_safe_globals``."""
    if _HAS_2_6:
        return torch.serialization.get_safe_globals()
    return [(entry, name) for name, entry in _safe.items()]


@contextlib.contextmanager
def safe_globals(entries: list[Any]) -> Iterator[None]:
    """See ``torch.serialization.safe_globals``."""
    if _HAS_2_6:
        with torch.serialization.safe_globals(entries):
            yield
        return
    before = dict(_safe)
    add_safe_globals(entries)
    try:
        yield
    finally:
        _safe.clear()
        _safe.update(before)


def load_weights(path: Path, mmap: bool = False) -> Any:
    """See ``torch.load(path, map_location='cpu', weights_only=True)``, with the entries above allowed."""
    if _HAS_2_6:
        return torch.load(path, map_location='cpu', weights_only=True, mmap=mmap)
    return torch.load(str(path), map_location='cpu', pickle_module=_CarefulPickle, mmap=mmap)


# Of what later torches allow themselves, what checkpoints hold. Bytes, of NumPy's numbers say, are text to encode.
_ALLOWED_LATER = {
    '_codecs.encode': codecs.encode,
    'builtins.complex': complex,
    'collections.Counter': Counter,
    'torch.device': torch.device,
    **{str(dtype): dtype for dtype in (torch.bool, torch.uint8, torch.bfloat16)},
}


def _named(entry: Any) -> tuple[str, Any]:
    return (entry[1], entry[0]) if isinstance(entry, tuple) else (f'{entry.__module__}.{entry.__qualname__}', entry)


def _allowed() -> dict[str, Any]:
    from torch._weights_only_unpickler import _get_allowed_globals

    return {**_ALLOWED_LATER, **_get_allowed_globals(), **_safe}


_UNUSUAL = [code[0] for code in (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4)]
_PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _CarefulUnpickler(_PythonUnpickler):
    """The unpickler in Python, which makes and calls nothing but what is allowed.

    That of torch 2.1 knows no list to add to, and neither sets the state of objects nor makes any.
    """

    def find_class(self, module: str, name: str) -> Any:
        allowed, full_name = _allowed(), f'{module}.{name}'
        full_name = full_name.replace('__builtin__.', 'builtins.')
        if full_name in ('builtins.set', 'builtins.bytearray'):
            return {'set': set, 'bytearray': bytearray}[name]
        if full_name not in allowed:
            raise pickle.UnpicklingError(f'GLOBAL {full_name} is not allowed')
        return allowed[full_name]

    def load_reduce(self) -> None:
        self._check(self.stack[-2])
        super().load_reduce()

    def load_newobj(self) -> None:
        self._check(self.stack[-2])
        super().load_newobj()

    def load_build(self) -> None:
        if isinstance(self.stack[-2], (type, FunctionType)):
            raise pickle.UnpicklingError(f'GLOBAL {self.stack[-2]!r} may not be changed')
        super().load_build()

    def _check(self, function: Any) -> None:
        if not any(function is allowed for allowed in (*_allowed().values(), set, bytearray)):
            raise pickle.UnpicklingError(f'GLOBAL {function!r} may not be called')

    def refuse(self) -> None:
        raise pickle.UnpicklingError('the file makes objects in a way that no checkpoint needs')

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **_PythonUnpickler.dispatch,
        **dict.fromkeys(_UNUSUAL, refuse),
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
    }


class _CarefulPickle:
    """What ``torch.load`` asks of a pickle module."""

    Unpickler = _CarefulUnpickler
    UnpicklingError = pickle.UnpicklingError

    @staticmethod
    def load(file: Any, **options: Any) -> Any:
        return _CarefulUnpickler(file, **options).load()
