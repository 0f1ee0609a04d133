"""A restricted unpickler that reads weights and executes no code from the file, for all supported versions of torch.

A pickle is a program: it names functions and says with which arguments to call them. This unpickler resolves a short
list of names, by which torch and NumPy store tensors and arrays, to functions of its own. Every other name becomes a
:class:`StandIn`, which is never called and does nothing. The module can be passed to ``torch.load`` as
``pickle_module``.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import re
import sys
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.storage import TypedStorage

# The first pickle in a legacy file of ``torch.save`` contains this magic number.
_MAGIC = torch.serialization.MAGIC_NUMBER.to_bytes(10, 'little')
_MOST_UNPACKED = 20  # times the size of the file; torch.save does not compress


class RefusedError(UnpicklingError):
    """A pickle contains an object or operation that no training code writes."""

    def __init__(self, wanted: str, why: str = 'is not allowed') -> None:
        super().__init__(f'{wanted} {why}')
        self.wanted = wanted


class StandIn(dict):
    """An inert object in place of a name, or of an object made by calling it, that weights do not need.

    It keeps items, so that the weights in a dict of another class are found, and ignores everything else.
    """

    __slots__ = ('is_module', 'kind')
    # A dict key may be an object of any class.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind  # the name in the pickle, such as 'argparse.Namespace'
        self.is_module = False  # whether it stands for a pickled torch.nn.Module

    def ignore(self, values: Any) -> None:
        """Ignore the values of a list or a set."""

    append = extend = add = ignore


def _tensor(storage: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], *rest: Any) -> Tensor | StandIn:
    """Replace torch's functions that make a tensor; of its further arguments, only a type that is given is used."""
    if not isinstance(storage, TypedStorage):
        raise RefusedError('a tensor without a storage')
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), storage.dtype)
    # torch would enlarge a storage that is too small, and fill the tensor with whatever the memory held before.
    last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    held = storage._untyped_storage.nbytes() // dtype.itemsize
    if min(offset, *size, *stride, 0) < 0 or (0 not in size and last >= held):
        raise RefusedError('a tensor that exceeds its data')
    if math.prod(size) > held:  # a repeated value, of which a small file can claim any number
        return StandIn('a tensor larger than its data')
    return torch.empty(0, dtype=dtype).set_(storage._untyped_storage, offset, size, stride)


def _first(value: Any, *_: Any) -> Any:
    """Return a parameter's tensor; its hooks, its attributes and whether it needs a gradient are not weights."""
    return value


def _tensor_of_type(rebuild: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    """Make a tensor of a subclass, or with attributes, as a plain tensor."""
    if isinstance(rebuild, StandIn) or rebuild not in (_tensor, _first):
        what = kind.kind if isinstance(kind, StandIn) else 'a tensor of another class'
        return StandIn(what)
    return rebuild(*arguments)


def _storage_from_bytes(content: bytes) -> Any:
    """Read the storage of a tensor in a plain pickle, which is a nested file of ``torch.save``."""
    if content[:2] == b'PK':
        raise RefusedError('a zipped file of torch.save in a pickle', 'is not how torch pickles a storage')
    reader: Any = sys.modules[__name__]
    return torch.load(io.BytesIO(content), map_location='cpu', weights_only=False, pickle_module=reader)


class _Array:
    """Stand-in for ``numpy.ndarray``, which pickled arrays pass as an argument but never call."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Array:
        raise RefusedError('numpy.ndarray', 'may not be called')


def _array(kind: Any, *_: Any) -> Any:
    """Replace NumPy's ``_reconstruct``, which returns an empty array for the pickle to fill."""
    return np.empty(0, np.int8) if kind is _Array else StandIn('an array of another class')


def _dtype(code: Any, *_: Any) -> Any:
    """Make a copy of the type of numbers, text, dates or objects, which the pickle may change."""
    if isinstance(code, str) and re.fullmatch(r'[<>=|]?[?biufcmMSUO]\d{0,9}', code):
        return np.dtype(code, False, True)
    return StandIn('a NumPy type')


def _scalar(dtype: Any, content: Any = b'') -> Any:
    content = content.encode('latin1') if isinstance(content, str) else content  # as Python 2 wrote it
    return np.frombuffer(content, dtype, 1)[0] if isinstance(dtype, np.dtype) else StandIn('a NumPy value')


def _from_buffer(buffer: Any, dtype: Any, shape: tuple[int, ...], order: Any) -> Any:
    if not isinstance(dtype, np.dtype):
        return StandIn('an array of another type')
    return np.frombuffer(buffer, dtype).reshape(shape, order=order)


def _bytes(text: str = '', *_: Any) -> bytes:
    """Replace ``bytes`` and ``codecs.encode``, by which old protocols store bytes as text in Latin-1."""
    return text.encode('latin1')


# Globals in pickles of NumPy arrays and scalars, for NumPy 1 and 2.
NUMPY_GLOBALS: dict[str, Any] = {
    'numpy.ndarray': _Array,
    'numpy.dtype': _dtype,
    **{
        f'numpy.{core}.{name}': function
        for core in ('core', '_core')
        for name, function in {
            'multiarray._reconstruct': _array,
            'multiarray.scalar': _scalar,
            'numeric._frombuffer': _from_buffer,
        }.items()
    },
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **NUMPY_GLOBALS,
    '_codecs.encode': _bytes,
    'builtins.bytes': _bytes,
    'collections.OrderedDict': OrderedDict,
    'torch.Size': torch.Size,
    'torch._utils._rebuild_tensor': _tensor,
    'torch._utils._rebuild_tensor_v2': _tensor,
    'torch._utils._rebuild_tensor_v3': _tensor,
    'torch._utils._rebuild_parameter': _first,
    'torch._utils._rebuild_parameter_with_state': _first,
    'torch._utils._rebuild_device_tensor_from_cpu_tensor': _first,
    'torch._utils._rebuild_device_tensor_from_numpy': _first,
    'torch._tensor._rebuild_from_type_v2': _tensor_of_type,
    'torch.storage._load_from_bytes': _storage_from_bytes,
}
# All names that a pickle can resolve. Types are only arguments; torch itself reads the names of typed storages.
ALLOWED: dict[str, Any] = {
    **_FUNCTIONS,
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    'torch.storage.UntypedStorage': torch.UntypedStorage,
}

_PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


class Unpickler(_PythonUnpickler):
    """The pure Python unpickler, which resolves the names of ``ALLOWED``, and calls and changes nothing else."""

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        position = file.tell()
        self._unread = file.seek(0, io.SEEK_END) - position
        file.seek(position)
        self._cleared: set[Any] = set()

    def find_class(self, module: str, name: str) -> Any:
        full_name = f'{module}.{name}'.replace('__builtin__.', 'builtins.')
        if full_name in ALLOWED:
            return ALLOWED[full_name]
        if not full_name.isprintable():  # messages contain it
            full_name = ascii(full_name)
        return StandIn(full_name)

    def _instantiate(self, function: Any, arguments: Any) -> None:
        """Push the result of a call; the opcodes INST and OBJ end here too."""
        if isinstance(function, StandIn):
            self.append(StandIn(function.kind))
            for value in arguments if isinstance(arguments, tuple) else ():
                self.stack[-1].is_module |= _is_state_of_module(value)
        elif any(function is allowed for allowed in _FUNCTIONS.values()):
            self.append(function(*arguments))
        else:
            raise RefusedError(f'an object of {type(function)}', 'may not be called')

    def load_reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        self._instantiate(function, arguments)

    def load_newobj_ex(self) -> None:
        self.stack.pop()  # keyword arguments, which no function of the list has
        self.load_reduce()

    def load_build(self) -> None:
        state, owner = self.stack.pop(), self.stack[-1]
        if isinstance(owner, StandIn):
            owner.is_module |= _is_state_of_module(state)
        elif isinstance(owner, np.ndarray):
            *_, shape, dtype, _, content = state
            if isinstance(content, list) and len(content) != math.prod(shape):  # NumPy would read beyond the list
                raise RefusedError('an array that exceeds its data')
            if isinstance(dtype, np.dtype):
                owner.__setstate__(state)
        elif isinstance(owner, np.dtype) and isinstance(state, tuple) and state[2:5] == (None, None, None):
            owner.__setstate__(state)  # type: ignore[attr-defined]
        elif not isinstance(owner, (OrderedDict, Tensor)):  # their attributes, such as _metadata, are not weights
            raise RefusedError(f'an object of {type(owner)}', 'may not be changed')

    def load_binpersid(self) -> None:
        wanted = self.stack[-1]
        kind = wanted[0] if isinstance(wanted, tuple) and len(wanted) > 1 else None
        if kind in ('module', b'module'):  # a class, with its source code, which torch would compare with the installed
            self.stack[-1] = wanted[1]
        elif kind in ('storage', b'storage') and wanted[5:] in ((), (None,)):
            super().load_binpersid()
            if len(wanted) == 6 and wanted[2] not in self._cleared:
                # Of a legacy file: torch allocated the storage, and fills it later if the file lists it.
                storage = self.stack[-1]._untyped_storage
                self._unread -= storage.nbytes()
                if self._unread < 0:
                    raise RefusedError('more data than the file contains')
                self._cleared.add(wanted[2])
                storage.fill_(0)
        else:
            raise RefusedError('an object outside of the pickle')  # or a view of a storage, of torch before 0.4

    def refuse(self) -> NoReturn:
        """Refuse the registry of extensions, whose objects are used without a name."""
        raise RefusedError('an extension code')

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **_PythonUnpickler.dispatch,
        **dict.fromkeys((code[0] for code in (pickle.EXT1, pickle.EXT2, pickle.EXT4)), refuse),
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_reduce,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
        pickle.BUILD[0]: load_build,
        pickle.BINPERSID[0]: load_binpersid,
    }


def _is_state_of_module(value: Any) -> bool:
    return isinstance(value, dict) and '_modules' in value


def load(file: Any, **options: Any) -> Any:
    """See ``pickle.load``."""
    return Unpickler(file, **options).load()


def read_pickle(path: Path, trust: bool = False, mmap: bool = False) -> Any:
    """Read a file of ``torch.save``, or a plain pickle of arrays or tensors, as in projects based on detectron2.

    With ``trust``, unpickle everything, which can execute arbitrary code. With ``mmap``, the tensors of a zip file are
    read on use. Objects or operations that no training code writes raise RefusedError, a damaged file almost any error.
    """
    reader: Any = pickle if trust else sys.modules[__name__]
    with path.open('rb') as file:
        start = file.read(64)
        if start[:1] == pickle.PROTO and _MAGIC not in start:
            file.seek(0)
            return reader.load(file, encoding='latin1')
    is_zip = start.startswith(b'PK\x03\x04')
    # Of other containers, torch.load would do more than unpickle and read tensors.
    if is_zip and not trust:
        if 'constants.pkl' in torch._C.PyTorchFileReader(str(path)).get_all_records():
            raise RefusedError('code in TorchScript')  # torch.load would execute parts of it
        with zipfile.ZipFile(path) as entries:
            if sum(entry.file_size for entry in entries.infolist()) > _MOST_UNPACKED * path.stat().st_size:
                raise RefusedError(f'an archive of more than {_MOST_UNPACKED} times its size')
    elif not trust:
        with contextlib.suppress(tarfile.TarError), tarfile.open(path, 'r:') as archive:
            if archive.next() is not None:
                raise RefusedError('a tar archive of torch before 0.2', 'would be extracted')
    return torch.load(str(path), map_location='cpu', weights_only=False, pickle_module=reader, mmap=mmap and is_zip)
