"""Read files of ``torch.save`` and plain pickles of arrays, and call nothing that they name but a short list.

This is the way of https://docs.python.org/3/library/pickle.html#restricting-globals, for every version of torch.
torch's own ``weights_only`` refuses files with more than tensors, such as those of most training programs; here, names
that are not on the list become a :class:`StandIn`. The module can be passed to ``torch.load`` as ``pickle_module``.
"""

from __future__ import annotations

import codecs
import io
import pickle
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

# The first pickle in a legacy file of ``torch.save`` contains this magic number.
_MAGIC = torch.serialization.MAGIC_NUMBER.to_bytes(10, 'little')


class RefusedError(UnpicklingError):
    """A file contains something that no training code writes."""

    def __init__(self, wanted: str) -> None:
        super().__init__(f'{wanted} is not allowed')
        self.wanted = wanted


class StandIn(dict):
    """An inert object in place of one of another class.

    It keeps items, so that the weights in a dict of another class are found, and ignores everything else.
    """

    kind = ''  # the name in the pickle, such as 'argparse.Namespace'
    is_module = False  # whether it stands for a pickled torch.nn.Module
    dump_patches = False  # read by torch of the modules in legacy files
    # A dict key may be an object of any class.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__()
        for value in arguments:
            self.__setstate__(value)

    def __setstate__(self, state: Any) -> None:
        self.is_module |= isinstance(state, dict) and '_modules' in state

    def ignore(self, *values: Any) -> None:
        """Ignore the values of a list or a set."""

    append = extend = add = ignore


def _array(kind: Any, *_: Any) -> Any:
    """Replace NumPy's ``_reconstruct``, which returns an empty array for the pickle to fill."""
    return np.empty(0, np.int8) if kind is np.ndarray else StandIn()


def _of_type(rebuild: Any, kind: Any, arguments: Any, *_: Any) -> Any:
    """Make a tensor of a subclass, or with attributes, as a plain tensor."""
    return rebuild(*arguments)


def _storage_from_bytes(content: bytes) -> Any:
    """Read the storage of a tensor in a plain pickle, which is a nested file of ``torch.save``."""
    reader: Any = sys.modules[__name__]
    return torch.load(io.BytesIO(content), map_location='cpu', weights_only=False, pickle_module=reader)


# Globals in pickles of NumPy arrays and scalars, for NumPy 1 and 2.
NUMPY_GLOBALS: dict[str, Any] = {
    'numpy.ndarray': np.ndarray,
    'numpy.dtype': np.dtype,
    **{f'numpy.{core}.multiarray._reconstruct': _array for core in ('core', '_core')},
    **{f'numpy.{core}.multiarray.scalar': np.float64(1).__reduce__()[0] for core in ('core', '_core')},
    **{f'numpy.{core}.numeric._frombuffer': np.zeros(1).__reduce_ex__(5)[0] for core in ('core', '_core')},
}
# Functions of torch that make dense tensors; others, of sparse or quantised ones, become stand-ins.
_DENSE = (
    'tensor',
    'tensor_v2',
    'tensor_v3',
    'parameter',
    'parameter_with_state',
    'device_tensor_from_cpu_tensor',
    'device_tensor_from_numpy',
)
ALLOWED: dict[str, Any] = {
    **NUMPY_GLOBALS,
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    **{
        f'torch._utils._rebuild_{name}': value
        for name in _DENSE
        if (value := getattr(torch._utils, f'_rebuild_{name}', 0))
    },
    '_codecs.encode': codecs.encode,
    'builtins.bytes': bytes,
    'collections.OrderedDict': OrderedDict,
    'torch.Size': torch.Size,
    'torch._tensor._rebuild_from_type_v2': _of_type,
    'torch.storage.UntypedStorage': torch.UntypedStorage,
    'torch.storage._load_from_bytes': _storage_from_bytes,
}


class Unpickler(pickle.Unpickler):
    """The unpickler of Python, which resolves the names of ``ALLOWED`` only."""

    def find_class(self, module: str, name: str) -> Any:
        full_name = f'{module}.{name}'.replace('__builtin__.', 'builtins.')  # as Python 2 wrote it
        if full_name in ALLOWED:
            return ALLOWED[full_name]
        return type('StandIn', (StandIn,), {'kind': full_name if full_name.isprintable() else ascii(full_name)})


def load(file: Any, **options: Any) -> Any:
    """See ``pickle.load``."""
    return Unpickler(file, **options).load()


def read_pickle(path: Path, trust: bool = False, mmap: bool = False) -> Any:
    """Read a file of ``torch.save``, or a plain pickle of arrays or tensors, as in projects based on detectron2.

    With ``trust``, unpickle everything, which can execute arbitrary code. With ``mmap``, the tensors of a zip file are
    read on use. A damaged file can raise almost any error.
    """
    reader: Any = pickle if trust else sys.modules[__name__]
    with path.open('rb') as file:
        start = file.read(64)
        if start[:1] == pickle.PROTO and _MAGIC not in start:
            file.seek(0)
            return reader.load(file, encoding='latin1')
    is_zip = start.startswith(b'PK\x03\x04')
    if not is_zip and _MAGIC not in start:
        raise UnpicklingError('it is not a file of torch.save')
    if is_zip and not trust and any(name.endswith('/constants.pkl') for name in zipfile.ZipFile(path).namelist()):
        raise RefusedError('code in TorchScript')  # torch.load would execute parts of it
    return torch.load(str(path), map_location='cpu', weights_only=False, pickle_module=reader, mmap=mmap and is_zip)
