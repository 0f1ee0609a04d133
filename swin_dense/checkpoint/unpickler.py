"""A restricted unpickler for weights that executes no code from the file, for all supported versions of torch.

A pickle contains names of functions to call. This unpickler allows functions that create tensors and NumPy arrays and
those that the user registered with ``torch.serialization.add_safe_globals``. Classes that training code commonly saves
with the weights are replaced by inert stand-ins. All other names raise an error. The module can be passed to
``torch.load`` as ``pickle_module``.
"""

from __future__ import annotations

import codecs
import functools
import io
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch

from swin_dense.utils import compat

__all__ = ['NUMPY_GLOBALS', 'RefusedError', 'Unpickler', 'UnpicklingError', 'load', 'read_pickle']

# The first pickle in a legacy file of ``torch.save`` contains this magic number.
_MAGIC = torch.serialization.MAGIC_NUMBER.to_bytes(10, 'little')


class RefusedError(UnpicklingError):
    """A pickle contains an object or operation that weights do not need."""

    def __init__(self, wanted: str, why: str = 'is not allowed') -> None:
        super().__init__(f'{wanted} {why}')
        self.wanted = wanted


class _Inert:
    """Stand-in for a class that checkpoints contain in addition to weights. Ignores all arguments and state."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


class _EmptyDict:
    """Stand-in for a dict class. The pickle inserts the items afterwards."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return OrderedDict()


class _Array:
    """Stand-in for ``numpy.ndarray``, which pickled arrays pass as an argument but never call."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Array:
        raise RefusedError('numpy.ndarray', 'may not be called')


def _reconstruct(kind: Any, *_: Any) -> np.ndarray:
    """Replace NumPy's ``_reconstruct``, which returns an empty array for the pickle to fill."""
    if kind is not _Array:
        raise RefusedError(f'an array of the type {kind!r}')
    return np.empty(0, np.int8)


def _from_buffer(buffer: Any, dtype: np.dtype, shape: tuple[int, ...], order: Any) -> np.ndarray:
    return np.frombuffer(buffer, dtype).reshape(shape, order=order)


def _storage_from_bytes(content: bytes) -> Any:
    """Replace torch's ``_load_from_bytes``, which reads a tensor storage in a plain pickle without restrictions.

    The storage is a nested file of ``torch.save``.
    """
    if content[:2] == b'PK':
        raise RefusedError('a zipped file of torch.save in a pickle', 'is not how torch pickles a storage')
    reader: Any = sys.modules[__name__]
    return torch.load(io.BytesIO(content), map_location='cpu', weights_only=False, pickle_module=reader)


# Globals in pickles of NumPy arrays and scalars, for NumPy 1 and 2.
NUMPY_GLOBALS: dict[str, Any] = {
    'numpy.ndarray': _Array,
    'numpy.dtype': np.dtype,
    **{
        f'numpy.{core}.{name}': stand_in
        for core in ('core', '_core')
        for name, stand_in in {
            'multiarray._reconstruct': _reconstruct,
            'multiarray.scalar': np.float64(0).__reduce__()[0],
            'numeric._frombuffer': _from_buffer,
        }.items()
    },
}
_INERT_NAMES = (
    'mmengine.logging.history_buffer.HistoryBuffer',
    'builtins.getattr',  # pickles of a HistoryBuffer use it to refer to methods
    'argparse.Namespace',
    'datetime.datetime',
    # Pickles of Python 3.13 refer to pathlib._local.
    *(f'{module}.{system}Path' for module in ('pathlib', 'pathlib._local') for system in ('Posix', 'Windows')),
)
_DICT_NAMES = (
    'yacs.config.CfgNode',
    'addict.addict.Dict',
    'mmengine.config.config.ConfigDict',
    'mmcv.utils.config.ConfigDict',
)
# Globals that later versions of torch allow. Old pickle protocols store bytes, as in NumPy scalars, as text to encode.
_ALLOWED_LATER = {
    '_codecs.encode': codecs.encode,
    'builtins.bytearray': bytearray,
    'builtins.bytes': bytes,
    'builtins.complex': complex,
    'builtins.set': set,
    'collections.Counter': Counter,
    'torch.device': torch.device,
    'torch.storage._load_from_bytes': _storage_from_bytes,
    **{str(dtype): dtype for dtype in (torch.bool, torch.uint8, torch.bfloat16)},
}


@functools.cache
def _known_globals() -> dict[str, Any]:
    from torch._weights_only_unpickler import _get_allowed_globals

    stand_ins = {**dict.fromkeys(_INERT_NAMES, _Inert), **dict.fromkeys(_DICT_NAMES, _EmptyDict)}
    return {**_ALLOWED_LATER, **_get_allowed_globals(), **NUMPY_GLOBALS, **stand_ins}


def _named(entry: Any) -> tuple[str, Any]:
    return (entry[1], entry[0]) if isinstance(entry, tuple) else (f'{entry.__module__}.{entry.__qualname__}', entry)


_PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]
_UNUSUAL = [code[0] for code in (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4)]


class Unpickler(_PythonUnpickler):
    """The pure Python unpickler, restricted to allowed classes, calls and changes of state."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        by_user = dict(map(_named, compat.get_safe_globals()))
        self._user_types = tuple(entry for entry in by_user.values() if isinstance(entry, type))
        self._allowed = {**by_user, **_known_globals()}
        self._callable = {id(entry) for entry in self._allowed.values()}

    def find_class(self, module: str, name: str) -> Any:
        full_name = f'{module}.{name}'.replace('__builtin__.', 'builtins.')
        if full_name not in self._allowed:
            raise RefusedError(full_name)
        return self._allowed[full_name]

    def load_reduce(self) -> None:
        self._check_callable()
        super().load_reduce()

    def load_newobj(self) -> None:
        self._check_callable()
        super().load_newobj()

    def load_build(self) -> None:
        owner = self.stack[-2]
        if isinstance(owner, OrderedDict):  # drop its attributes, such as _metadata: they are not weights
            self.stack.pop()
        elif isinstance(owner, (torch.Tensor, np.ndarray, np.dtype, _Inert, *self._user_types)):
            super().load_build()
        else:
            raise RefusedError(repr(owner), 'may not be changed')

    def load_binpersid(self) -> None:
        wanted = self.stack[-1]
        is_storage = isinstance(wanted, tuple) and wanted[:1] in (('storage',), (b'storage',))
        if not is_storage and not isinstance(wanted, int):  # an int is a storage in files from before torch 0.1.10
            raise RefusedError(repr(wanted))
        super().load_binpersid()

    def _check_callable(self) -> None:
        if id(self.stack[-2]) not in self._callable:
            raise RefusedError(repr(self.stack[-2]), 'may not be called')

    def refuse(self) -> NoReturn:
        raise RefusedError('an unusual opcode to create objects')

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        **_PythonUnpickler.dispatch,
        **dict.fromkeys(_UNUSUAL, refuse),
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.BUILD[0]: load_build,
        pickle.BINPERSID[0]: load_binpersid,
    }


def load(file: Any, **options: Any) -> Any:
    """See ``pickle.load``."""
    return Unpickler(file, **options).load()


def read_pickle(path: Path, trust: bool = False, mmap: bool = False) -> Any:
    """Read a file of ``torch.save``, or a plain pickle of arrays or tensors, as in projects based on detectron2.

    Args:
        path: the file.
        trust: unpickle everything, which can execute arbitrary code.
        mmap: memory-map the tensors of a zip file of ``torch.save``, so that they are read on use.

    Raises:
        RefusedError: the file contains an object or operation that weights do not need.
        Exception: almost any type, for a damaged file.
    """
    reader: Any = pickle if trust else sys.modules[__name__]
    with path.open('rb') as file:
        start = file.read(64)
        if start[:1] == pickle.PROTO and _MAGIC not in start:
            file.seek(0)
            return reader.load(file, encoding='latin1')
    is_zip = start.startswith(b'PK\x03\x04')
    if is_zip and not trust and 'constants.pkl' in torch._C.PyTorchFileReader(str(path)).get_all_records():
        raise RefusedError('code in TorchScript')  # torch.load would execute parts of it
    return torch.load(str(path), map_location='cpu', weights_only=False, pickle_module=reader, mmap=mmap and is_zip)
