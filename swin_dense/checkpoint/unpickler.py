"""Read files of ``torch.save`` and plain pickles of arrays, and run nothing that they name.

Follows https://docs.python.org/3/library/pickle.html#restricting-globals, for every version of torch. The
``weights_only`` of torch refuses files with more than tensors, such as those of most training programs; here, names
that are not on a short list become a :class:`StandIn`.

Nothing in the file is trusted: it can name any size, offset, stride or flag. Nothing is allocated for data that the
file does not contain, no memory is read beyond it, and only objects of this module take a state, because that of a
tensor, of an array's type or of a function could change their memory or their code.
"""

from __future__ import annotations

import io
import math
import mmap
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from swin_dense.utils.private import PythonUnpickler

_ZIP = b'PK\x03\x04'
# The first pickle in a legacy file of ``torch.save`` contains this magic number.
_MAGIC = torch.serialization.MAGIC_NUMBER.to_bytes(10, 'little')
# Types of numbers and of text; an array of objects or records consists of pointers or of parts.
_DTYPE = re.compile(r'[<>=|]?(\?|[biufc]\d{1,2}|[SU][1-9]\d{0,4})')
_LARGEST_EXPANDED = 1 << 16  # elements of a tensor with more elements than its storage
_MOST_ARGUMENTS = 256
_MOST_AXES = 64
_CLAIMS = 4  # how often a file may use each of its bytes: an array of a protocol 2 pickle is text, then bytes, then it


class RefusedError(UnpicklingError):
    """A file contains something that no training code writes."""

    def __init__(self, wanted: str) -> None:
        super().__init__(f'{wanted} is not allowed')
        self.wanted = wanted


class StandIn(dict):
    """An inert object in place of a class, a function, or an object of another class.

    It keeps items, so that the weights in a dict of another class are found, and ignores everything else.
    """

    __slots__ = ('is_module', 'kind')
    # A dict key may be an object of any class.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__

    def __init__(self, kind: str = '') -> None:
        super().__init__()
        self.kind = kind  # the name in the pickle, such as 'argparse.Namespace'
        self.is_module = False  # whether it stands for a pickled torch.nn.Module

    def __call__(self, *arguments: Any) -> StandIn:
        made = StandIn(self.kind)
        for value in arguments:
            made.__setstate__(value)
        return made

    def __setstate__(self, state: Any) -> None:
        self.is_module |= isinstance(state, dict) and '_modules' in state


class StateDict(dict):
    """An OrderedDict, with the ``_metadata`` of a state dict."""

    _metadata: Any = None

    def __setstate__(self, state: Any) -> None:
        self._metadata = state.get('_metadata') if isinstance(state, dict) else None


def _are_sizes(numbers: Sequence[Any]) -> bool:
    """Return whether numbers of a file can be a shape, strides or an offset."""
    return len(numbers) <= _MOST_AXES and all(isinstance(number, int) and 0 <= number < 1 << 63 for number in numbers)


class DType:
    """Takes the place of ``numpy.dtype``. ``value`` is None for types of anything but numbers and text."""

    value: np.dtype[Any] | None = None

    def __init__(self, name: Any = None, *_: Any) -> None:
        if isinstance(name, str) and _DTYPE.fullmatch(name):
            self.value = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        """Read the byte order. NumPy would believe all other parts of the state, such as flags and sizes."""
        order = state[1]
        if self.value is not None and order in ('<', '>', '=', '|'):
            self.value = self.value.newbyteorder(order)


def _bytes_of(dtype: np.dtype[Any], shape: Sequence[int], data: Any) -> bytes:
    """Return the bytes of an array of a type; raise an UnpicklingError if they have another length."""
    if isinstance(data, str):  # as Python 2 wrote it
        data = data.encode('latin1')
    are_bytes = isinstance(data, (bytes, bytearray))
    if not are_bytes or not _are_sizes(shape) or math.prod(shape) * dtype.itemsize != len(data):
        raise UnpicklingError(f'the data of an array of type {dtype} do not have the length of its shape')
    if dtype.kind == 'U':  # Python fails on other characters
        bytes(data).decode('utf-32-be' if dtype.str[0] == '>' else 'utf-32-le', 'surrogatepass')
    return bytes(data)


class Array(np.ndarray):
    """An array that takes its values once, from bytes. Of a type that is not read, it stays empty."""

    def __new__(cls, *_: Any) -> Array:
        return super().__new__(cls, 0, np.int8)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        if not isinstance(dtype, DType) or self.size:
            raise UnpicklingError('the state of an array is not that of one')
        if dtype.value is not None:
            content = _bytes_of(dtype.value, shape, data)
            super().__setstate__((1, shape, dtype.value, bool(is_fortran), content))  # type: ignore[arg-type]

    def __reduce__(self) -> Any:
        return np.asarray(self).__reduce__()


def _scalar(dtype: DType, data: Any = b'') -> Any:
    if dtype.value is None:
        return StandIn('numpy.generic')
    return np.frombuffer(_bytes_of(dtype.value, (1,), data), dtype.value)[0]


def _frombuffer(data: Any, dtype: DType, shape: Sequence[int], order: str, axes: Any = None) -> Any:
    """Return the array of a protocol 5 pickle."""
    if dtype.value is None:
        return Array()
    flat = np.frombuffer(_bytes_of(dtype.value, shape, data), dtype.value)
    array = flat.reshape(shape, order='F' if order == 'F' else 'C')
    return array if axes is None else array.transpose(axes)


@dataclass(frozen=True)
class _Storage:
    """Memory of tensors: its bytes, the type of its elements and their number."""

    data: torch.UntypedStorage
    dtype: torch.dtype
    length: int


def _tensor(storage: Any, offset: int, size: Any, stride: Any, *others: Any) -> Tensor | StandIn:
    """Make a tensor. Those of types without a class of storages, such as uint16, have bytes as storage and a dtype."""
    if not isinstance(storage, _Storage):
        return StandIn('torch.Tensor')  # of a type of storage that this version of torch does not have
    dtype = others[2] if len(others) > 2 else None  # in the third version of this function in torch
    if isinstance(dtype, torch.dtype):
        storage = _Storage(storage.data, dtype, storage.data.nbytes() // dtype.itemsize)
    if len(size) != len(stride) or not all(map(_are_sizes, ([offset], size, stride))):
        raise UnpicklingError('the size of a tensor and its strides do not fit')
    count = math.prod(size)
    last = offset + sum((side - 1) * step for side, step in zip(size, stride, strict=True))
    if count > max(storage.length, _LARGEST_EXPANDED) or (count and last >= storage.length):
        raise UnpicklingError(f'a tensor of size {tuple(size)} is larger than its storage of {storage.length}')
    return torch.empty(0, dtype=storage.dtype).set_(storage.data, offset, size, stride)


def _first(value: Any, *_: Any) -> Any:
    """Make a parameter, or a tensor on another device, as a plain tensor."""
    return value


def _encode(text: str, encoding: str = 'latin1') -> bytes:
    """Replace ``codecs.encode``, which pickles of Python 3 use to write bytes for Python 2."""
    if encoding != 'latin1':
        raise RefusedError(f'the codec {encoding!r}')
    return text.encode('latin1')


# By the name of a class of storages, the type of its elements; that of the stored integers if they are quantised.
_STORAGES = {
    'BFloat16Storage': torch.bfloat16,
    'BoolStorage': torch.bool,
    'ByteStorage': torch.uint8,
    'CharStorage': torch.int8,
    'ComplexDoubleStorage': torch.complex128,
    'ComplexFloatStorage': torch.complex64,
    'DoubleStorage': torch.float64,
    'FloatStorage': torch.float32,
    'HalfStorage': torch.float16,
    'IntStorage': torch.int32,
    'LongStorage': torch.int64,
    'QInt32Storage': torch.int32,
    'QInt8Storage': torch.int8,
    'QUInt8Storage': torch.uint8,
    'ShortStorage': torch.int16,
    'UntypedStorage': torch.uint8,
}
# Globals in pickles of NumPy arrays and scalars, for NumPy 1 and 2. They are safe in torch's unpickler, too.
NUMPY_GLOBALS: dict[str, Any] = {
    'numpy.ndarray': Array,
    'numpy.dtype': DType,
    **{f'numpy.{core}.multiarray._reconstruct': Array for core in ('core', '_core')},
    **{f'numpy.{core}.multiarray.scalar': _scalar for core in ('core', '_core')},
    **{f'numpy.{core}.numeric._frombuffer': _frombuffer for core in ('core', '_core')},
}
ALLOWED: dict[str, Any] = {
    **NUMPY_GLOBALS,
    '_codecs.encode': _encode,
    'builtins.bytes': lambda: b'',
    'collections.OrderedDict': StateDict,
    'torch.Size': lambda numbers=(): torch.Size(numbers),
    # Of a subclass, or with attributes: a plain tensor.
    'torch._tensor._rebuild_from_type_v2': lambda rebuild, _, arguments, *__: rebuild(*arguments),
    'torch._utils._rebuild_device_tensor_from_cpu_tensor': _first,
    'torch._utils._rebuild_device_tensor_from_numpy': lambda array, *_: torch.from_numpy(array),
    'torch._utils._rebuild_parameter': _first,
    'torch._utils._rebuild_parameter_with_state': _first,
    'torch._utils._rebuild_tensor': _tensor,
    'torch._utils._rebuild_tensor_v2': _tensor,
    'torch._utils._rebuild_tensor_v3': _tensor,
    'torch.storage.UntypedStorage': torch.uint8,
    **{f'torch.{name}': dtype for name, dtype in _STORAGES.items()},
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
}


# Without Python's unpickler, `read_pickle` does not use the class.
_Base: Any = PythonUnpickler or object


class Unpickler(_Base):
    """The unpickler that is written in Python, whose steps can be replaced.

    It resolves the names of ``ALLOWED`` only, and changes objects of known types only. The ``read`` of a file never
    returns more than it contains, and its ``length`` in bytes limits what it can claim. In a file of ``torch.save``,
    ``buffer_of`` returns the memory of a storage, given its key and number of bytes; a plain pickle has such files in
    itself.
    """

    def __init__(self, file: Any, length: int, buffer_of: Callable[[str, int], bytearray] | None = None) -> None:
        super().__init__(file, encoding='latin1')
        self._unclaimed = _CLAIMS * length
        self._buffer_of = buffer_of
        self._storages: dict[str, torch.UntypedStorage] = {}

    def claim(self, amount: int) -> None:
        """Count the parts that the file uses, so that it cannot use the same part again and again."""
        self._unclaimed -= amount
        if amount < 0 or self._unclaimed < 0:
            raise UnpicklingError('it claims more data than it has')

    def find_class(self, module: str, name: str) -> Any:
        full_name = f'{module}.{name}'.replace('__builtin__.', 'builtins.')  # as Python 2 wrote it
        if full_name == 'torch.storage._load_from_bytes' and self._buffer_of is None:
            return _storage_from_bytes
        if full_name in ALLOWED:
            return ALLOWED[full_name]
        return StandIn(full_name if full_name.isprintable() else ascii(full_name))

    def persistent_load(self, pid: Any) -> Any:
        """Return a storage, or the class of a pickled module."""
        tag, kind, *rest = pid
        if tag == 'module' or not isinstance(kind, torch.dtype):
            return kind
        key, _, length, *view = rest
        is_known = tag == 'storage' and isinstance(key, str) and _are_sizes([length])
        if not is_known or self._buffer_of is None or any(part is not None for part in view):
            raise UnpicklingError('it refers to data that it does not contain')
        size = length * kind.itemsize
        if key not in self._storages:
            self.claim(size)
            buffer = self._buffer_of(key, size)
            typed = torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8)
            self._storages[key] = typed.untyped_storage()
        data = self._storages[key]
        if size > data.nbytes():
            raise UnpicklingError(f'{data.nbytes()} bytes for {length} numbers of {kind}')
        return _Storage(data, kind, length)

    def _load_reduce(self) -> None:
        arguments = self.stack.pop()
        function = self.stack.pop()
        if not isinstance(arguments, tuple) or len(arguments) > _MOST_ARGUMENTS:
            raise UnpicklingError('it calls something with too many arguments')
        self.claim(len(arguments))
        if not isinstance(function, StandIn):
            self.claim(sum(len(value) for value in arguments if isinstance(value, (str, bytes, list, tuple))))
        self.append(function(*arguments))

    def _load_newobj_ex(self) -> None:
        self.stack.pop()  # keywords
        self._load_reduce()

    def _load_build(self) -> None:
        state = self.stack.pop()
        changed = self.stack[-1]
        if isinstance(changed, Array):
            self.claim(len(state[-1]))
        if isinstance(changed, (Array, DType, StandIn, StateDict)):
            changed.__setstate__(state)

    def _extend(self, items: list[Any]) -> None:
        """Add items to a list or a set. The class of a stand-in may be a list or a set, of which nothing is kept."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, set):
            target.update(map(_key, items))
        elif not isinstance(target, StandIn):
            raise UnpicklingError(f'it appends to a {type(target).__name__}')

    def _load_dict(self) -> None:
        items = self.pop_mark()
        self.append({})
        self._set_items(items)

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise UnpicklingError(f'it sets items of a {type(target).__name__}')
        for name, value in zip(items[::2], items[1::2], strict=True):
            target[_key(name)] = value

    def _load_frozenset(self) -> None:
        items = self.pop_mark()
        self.append(frozenset(map(_key, items)))

    def _load_bytearray8(self) -> None:
        (length,) = struct.unpack('<Q', self.read(8))
        self.append(bytearray(self.read(length)))

    if PythonUnpickler is not None:
        dispatch = {
            **PythonUnpickler.dispatch,
            pickle.REDUCE[0]: _load_reduce,
            pickle.NEWOBJ[0]: _load_reduce,
            pickle.NEWOBJ_EX[0]: _load_newobj_ex,
            pickle.BUILD[0]: _load_build,
            pickle.APPEND[0]: lambda self: self._extend([self.stack.pop()]),
            pickle.APPENDS[0]: lambda self: self._extend(self.pop_mark()),
            pickle.ADDITEMS[0]: lambda self: self._extend(self.pop_mark()),
            pickle.SETITEM[0]: lambda self: self._set_items([self.stack.pop(-2), self.stack.pop()]),
            pickle.SETITEMS[0]: lambda self: self._set_items(self.pop_mark()),
            pickle.DICT[0]: _load_dict,
            pickle.FROZENSET[0]: _load_frozenset,
            pickle.BYTEARRAY8[0]: _load_bytearray8,
        }
        # Objects of other programs in this process, and memory beside the file.
        for _code in (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER):
            del dispatch[_code[0]]


def _key(value: Any) -> Any:
    """Return a key of a dict. Python overflows the stack for the hash of deeply nested tuples, or never finds it."""
    if isinstance(value, tuple) and (len(value) > _MOST_ARGUMENTS or any(isinstance(part, tuple) for part in value)):
        raise RefusedError('a dict key of nested tuples')
    return value


def read_pickle(path: Path, trust: bool = False) -> Any:
    """Read a file of ``torch.save``, or a plain pickle of arrays or tensors, as in projects based on detectron2.

    With ``trust``, unpickle everything, which can execute arbitrary code. A damaged file can raise almost any error.
    """
    with path.open('rb') as file:
        start = file.read(64)
        file.seek(0)
        is_plain = start[:1] == pickle.PROTO and _MAGIC not in start
        if trust and is_plain:
            return pickle.load(file, encoding='latin1')
        if trust:
            return torch.load(file, map_location='cpu', weights_only=False)
        if PythonUnpickler is None:
            return torch.load(file, map_location='cpu', weights_only=True)
        if start.startswith(_ZIP):
            return _read_zip(file, path.stat().st_size)
        # Unlike that of a file, the ``read`` of a map allocates no more than there is.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if _MAGIC in start:
                return _read_legacy(content, len(content))
            if is_plain:
                return Unpickler(content, len(content)).load()
    raise UnpicklingError('it is not a file of torch.save')


def _storage_from_bytes(content: bytes) -> Any:
    """Read the storage of a tensor in a plain pickle, which is a nested file of ``torch.save``."""
    read = _read_zip if content.startswith(_ZIP) else _read_legacy
    return read(io.BytesIO(content), len(content))


def _read_zip(content: Any, length: int) -> Any:
    with zipfile.ZipFile(content) as archive:
        names = archive.namelist()
        if any(name.endswith('/constants.pkl') for name in names):
            raise RefusedError('code in TorchScript')  # torch.load would execute parts of it
        folder = next((name.removesuffix('data.pkl') for name in names if name.endswith('/data.pkl')), None)
        if folder is None:
            raise UnpicklingError('it is not a file of torch.save')

        def read(name: str) -> bytearray:
            entry = archive.getinfo(folder + name)
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > length:
                raise UnpicklingError(f'{entry.filename} is compressed, or longer than the file')
            buffer = bytearray(entry.file_size)
            with archive.open(entry) as record:
                cast('io.BufferedIOBase', record).readinto(buffer)
            return buffer

        if f'{folder}byteorder' in names and read('byteorder') != b'little':
            raise UnpicklingError('it was written on a big-endian machine')
        program = io.BytesIO(read('data.pkl'))
        return Unpickler(program, length, lambda key, _: read(f'data/{key}')).load()


def _read_legacy(content: Any, length: int) -> Any:
    """Read a file of torch before 1.6: three short pickles, the objects, the keys of their storages, and their data."""
    buffers: dict[str, bytearray] = {}

    def allocate(key: str, size: int) -> bytearray:
        buffers[key] = bytearray(size)
        return buffers[key]

    *_, result, keys = [Unpickler(content, length, allocate).load() for _ in range(5)]
    for key in keys:
        buffer = buffers.pop(key)
        content.seek(8, io.SEEK_CUR)  # the number of elements
        data = content.read(len(buffer))
        if len(data) < len(buffer):
            raise UnpicklingError('it ends before its last storage')
        buffer[:] = data
    if buffers:
        raise UnpicklingError(f'it lacks the storages {sorted(buffers)[:3]}')
    return result
