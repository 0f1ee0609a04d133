"""Parts of checkpoints: files of torch, archives, and operations of pickles."""

from __future__ import annotations

import io
import pickle
import random
import struct
import zipfile
from typing import Any

import torch


def words_of(text: str) -> list[str]:
    """Return the words of a text; a list of them would take a line for each."""
    return text.split()


def names_of(text: str) -> list[tuple[str, str]]:
    """Return the names in a text of MODULE:NAME, which are separated by spaces, as pairs."""
    entries = [entry.partition(':') for entry in text.split()]
    return [(module, name) for module, _, name in entries]


def saved(content: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream, **options)
    return stream.getvalue()


def zipped_records(records: dict[str, bytes], **options: Any) -> bytes:
    """Return a zip archive of records, with the version as torch writes it."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, 'w', **options) as archive:
        for name, content in {**records, 'version': b'3\n'}.items():
            archive.writestr(f'a/{name}', content)
    return stream.getvalue()


def pushed(value: Any) -> bytes:
    """Return the operations that push an integer or a text of any length."""
    if isinstance(value, str):
        content = value.encode()
        return b'X' + struct.pack('<I', len(content)) + content
    if -(2**31) <= value < 2**31:
        return b'J' + struct.pack('<i', value)
    content = pickle.encode_long(value)
    return b'\x8a' + bytes([len(content)]) + content


# Names that a pickle may ask for: dangerous ones, dotted ones, and those that weights need.
NAMES = names_of("""
    os:system posix:system nt:system subprocess:Popen builtins:eval __builtin__:eval builtins:exec
    builtins:__import__ builtins:getattr builtins:open builtins:object builtins:type builtins:bytearray io:open
    importlib:import_module pickle:loads _pickle:loads copyreg:_reconstructor copyreg:__newobj__ functools:partial
    operator:attrgetter operator:methodcaller types:CodeType types:FunctionType ctypes:CDLL this:s
    antigravity:webbrowser : :eval torch:load torch:jit.load torch.jit:load torch:hub.load
    torch._utils:_rebuild_wrapper_subclass torch._utils:_rebuild_nested_tensor torch._utils:_import_dotted_name
    torch.serialization:load torch.nn:Linear torch.storage:UntypedStorage.from_file torch:FloatStorage
    torch.storage:TypedStorage numpy:load numpy:fromfile numpy:memmap numpy:matrix numpy:ndarray.tofile
    numpy.core.multiarray:fromfile numpy.core:multiarray.scalar numpy.f2py.crackfortran:getlincoef
    collections:OrderedDict.update collections:OrderedDict.__init__.__globals__
    swin_dense.checkpoint.unpickler:read_pickle swin_dense.checkpoint.unpickler:sys.modules
    collections:OrderedDict torch:Size torch:float32 torch._utils:_rebuild_tensor_v2
    torch._utils:_rebuild_tensor_v3 torch._utils:_rebuild_parameter numpy:dtype
    torch._tensor:_rebuild_from_type_v2 torch.storage:_load_from_bytes numpy:ndarray torch.storage:UntypedStorage
    numpy.core.multiarray:_reconstruct builtins:bytes numpy.core.multiarray:scalar numpy._core.numeric:_frombuffer
    _codecs:encode
""")
_TEXTS = words_of("""
    f4 O V8 __class__ _modules storage module cpu 0 C < weight
""")
_NUMBERS = (b'J\xff\xff\xff\x7f', b'J\xff\xff\xff\xff', b'N', b'\x88')
_CONTAINERS = (b'}', b']', b')', b'\x8f', b'C\x04abcd', b'G?\xf0\x00\x00\x00\x00\x00\x00')
_TUPLES, _CALLS = (b'\x85', b'\x86', b'\x87', b')'), (b'R', b'\x81', b'}\x92', b'b')
# Operations of one byte, and those with an argument.
_OPERATIONS = (
    *(bytes([code]) for code in b'(tldeusab012ROQ\x90\x91\x94\x97\x98\x93'),
    *(b'q\x00', b'h\x00', b'P0\n', b'\x82\x01', b'\x95\xff\xff\xff\xff\0\0\0\0'),
    *(b'B\xff\xff\xff\x7f', b'\x96\xff\xff\xff\xff\xff\xff\xff\x7f', b'r\xff\xff\xff\x7f'),
)


def pickle_program(chance: random.Random) -> bytes:
    """Return a pickle of random operations, which usually find enough arguments on the stack."""
    parts = [bytes([0x80, chance.choice([2, 4, 5])])]
    for _ in range(chance.choice([1, 2, 3, 5, 10, 40])):
        kind = chance.randrange(12)
        if kind < 3:
            parts.append(_named(chance))
        elif kind < 6:
            number, text = bytes([0x4B, chance.randrange(256)]), _pushed(chance.choice(_TEXTS))
            parts.append(chance.choice([number, text, *_NUMBERS, *_CONTAINERS]))
        elif kind < 9:  # build a tuple and call, make or change something with it
            parts.append(chance.choice(_TUPLES) + chance.choice(_CALLS))
        else:
            parts.append(chance.choice(_OPERATIONS))
    return b''.join([*parts, b'.'])


def _named(chance: random.Random) -> bytes:
    """Return an operation that asks for a name, from the stack or in its own text."""
    module, name = chance.choice(NAMES)
    if chance.random() < 0.5 or not module or not name:
        return _pushed(module) + _pushed(name) + b'\x93'
    return f'{chance.choice("cci")}{module}\n{name}\n'.encode()


def _pushed(text: str) -> bytes:
    return b'\x8c' + bytes([len(text)]) + text.encode()
