"""Read mutated checkpoints, in a process of their own that a crash would end.

    python -m tests.checkpoint.hostile FIRST COUNT

reads the mutants of these numbers with the reader of this package and, where torch does not crash by itself, with
``torch.load(weights_only=True)``, as mmengine reads a training after the import of ``swin_dense.mm``. A mutant has
other sizes, flags, lengths, names and steps in its pickle, or damaged bytes. The last line of the output counts the
files that were read and refused; without it, the number before is the culprit.
"""

from __future__ import annotations

import functools
import io
import os
import pickle
import pickletools
import random
import struct
import sys
import warnings
import zipfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swin_dense.checkpoint.convert import flatten
from swin_dense.checkpoint.read import read_file
from swin_dense.utils.errors import CheckpointError
from tests.checkpoint.programs import names_of, pushed, saved, words_of, zipped_records
from tests.images.mutations import mutate

SECONDS = 60  # for one file
GIGABYTES = 6
# Earlier versions do not compare a record with the size that the pickle claims: by themselves they read beyond its end.
TORCH_COMPARES_SIZES = torch.__version__ >= '2.10'
_NUMBERS = [0, 1, 2, 3, 7, 8, 63, 255, 4096, 10**30]
_NUMBERS += [2**20, 2**30, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**64]
_TEXTS = ['x' * 5000]
_TEXTS += words_of("""
    O O8 V8 S0 S1 U0 U3 S99999 f4 f8 >f8 ? i1 m8[s] M8 c16 f16 T < > | = storage module cpu 0 1 latin1 zlib C F A
    _metadata
""")
_NAMES = names_of("""
    numpy:dtype numpy:ndarray numpy._core.multiarray:_reconstruct torch:Size numpy._core.multiarray:scalar
    numpy._core.numeric:_frombuffer torch:float32 torch._utils:_rebuild_tensor_v2 torch._utils:_rebuild_tensor_v3
    torch:FloatStorage torch._utils:_rebuild_device_tensor_from_numpy torch.storage:_load_from_bytes numpy:matrix
    torch._tensor:_rebuild_from_type_v2 torch.storage:UntypedStorage torch:BoolStorage collections:OrderedDict
    collections:Counter _codecs:encode builtins:bytes builtins:getattr builtins:bytearray
    mmengine.logging.history_buffer:HistoryBuffer
    os:system posix:system builtins:eval __builtin__:eval builtins:__import__ io:open importlib:import_module
    pickle:loads copyreg:_reconstructor copyreg:__newobj__ functools:partial operator:attrgetter types:CodeType
    ctypes:CDLL torch:load torch:jit.load torch.nn:Linear torch.storage:UntypedStorage.from_file numpy:memmap
    numpy:ndarray.tofile numpy.core.multiarray:fromfile numpy.f2py.crackfortran:getlincoef
    collections:OrderedDict.update swin_dense.checkpoint.unpickler:read_pickle
    collections:OrderedDict.__init__.__globals__
""")
_ODD = (
    *(bytes([code]) for code in b'bRN}]Qsa02\x81\x85\x88\x89'),
    *(b'C\x08AAAAAAAA', b'\x96' + struct.pack('<Q', 2**40), b'r\xff\xff\xff\x7f'),
)


@functools.cache
def originals() -> list[tuple[str, bytes]]:
    """Return the container and the pickles of several kinds of values."""
    tensors = {
        'a': torch.arange(6.0).view(2, 3),
        'b': torch.ones(4).bfloat16(),
        'c': torch.zeros(2, dtype=torch.bool),
    }
    simple = {
        'a': np.arange(6.0).reshape(2, 3),
        'b': np.asfortranarray(np.eye(3, dtype='>f4')),
        'c': np.array(['x', 'yz']),
        'g': np.zeros(0),
    }
    arrays = {
        **simple,
        'd': np.float32(3),
        'e': np.array([1, 'x', None], object),
        'f': np.zeros(2, [('a', 'f4')]),
    }
    found = [('plain', pickle.dumps({**tensors, **arrays}, protocol)) for protocol in (2, 4, 5)]
    found.append(('legacy', saved(tensors, _use_new_zipfile_serialization=False)))
    for value in (tensors, {**tensors, **simple}, {**tensors, **arrays}):
        with zipfile.ZipFile(io.BytesIO(saved(value))) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith('/data.pkl'))
            found.append(('zip', archive.read(name)))
    return found


def steps(program: bytes) -> list[bytes]:
    """Split pickles, which may follow each other, into their operations; the last part is what is no pickle."""
    parts, rest = [], program
    while rest[:1] == pickle.PROTO:
        stream = io.BytesIO(rest)
        positions = [position for _, _, position in pickletools.genops(stream)]
        positions.append(stream.tell())
        parts += [rest[start:end] for start, end in pairwise(positions)]
        rest = rest[positions[-1] :]
    return [*parts, rest]


def mutant(seed: int) -> bytes:
    chance = random.Random(seed)
    container, program = chance.choice(originals())
    parts = steps(program)
    for _ in range(chance.choice([1, 1, 2, 3, 6])):
        _change(parts, chance)
    program = b''.join(parts)
    if container == 'zip':
        storages = {f'data/{key}': bytes(chance.choice([0, 2, 8, 16, 24, 1000])) for key in range(4)}
        program = zipped_records({'data.pkl': program, 'byteorder': b'little', **storages})
    return mutate(program, chance) if chance.random() < 0.2 else program


def _change(parts: list[bytes], chance: random.Random) -> None:
    """Change one operation: another number, text, name or flag, or one that is left out, repeated, moved or odd."""

    def places(*operations: bytes) -> list[int]:
        return [index for index, part in enumerate(parts) if part[:1] in operations]

    place, other = (chance.randrange(len(parts) - 1) for _ in range(2))
    kind = chance.choice(['number'] * 4 + ['text', 'name', 'drop', 'repeat', 'swap', 'odd'])
    numbers, texts, names = places(b'K', b'M', b'J', b'\x8a'), places(b'X', b'\x8c'), places(b'c', b'\x93')
    if kind == 'number' and numbers:
        parts[chance.choice(numbers)] = pushed(chance.choice(_NUMBERS) * chance.choice([1, 1, 1, -1]))
    elif kind == 'text' and texts:
        parts[chance.choice(texts)] = pushed(chance.choice(_TEXTS))
    elif kind == 'name' and names:
        module, name = chance.choice(_NAMES)
        parts[chance.choice(names)] = f'c{module}\n{name}\n'.encode()
    elif kind == 'drop':
        del parts[place]
    elif kind == 'repeat':
        parts.insert(place, parts[other])
    elif kind == 'swap':
        parts[place], parts[other] = parts[other], parts[place]
    else:
        parts.insert(place, chance.choice(_ODD))


def touch(values: Any) -> None:
    for value in flatten({'all': values}).values():
        if isinstance(value, torch.Tensor):
            str(value.flatten()[:3].tolist())
            int((value != value).sum())
    for value in values.values() if isinstance(values, dict) else ():
        if isinstance(value, np.ndarray):
            value.copy().tolist()


def read_by_this_package(path: Path) -> str:
    """Return the outcome; only a documented error is one."""
    try:
        touch(read_file(path))
    except CheckpointError:
        return 'refused'
    return 'read'


def read_by_torch(path: Path) -> str:
    from swin_dense.mm.training_files import training_classes

    try:
        with training_classes():
            touch(torch.load(path, weights_only=True))
    except Exception:  # torch raises nearly any error
        return 'refused by torch'
    return 'read by torch'


def main(first: int, count: int) -> None:
    import resource
    import signal
    import tempfile

    readers = [read_by_this_package]
    if TORCH_COMPARES_SIZES:
        readers.append(read_by_torch)
    warnings.simplefilter('ignore')
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30,) * 2)
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'mutant.pth')
        for seed in range(first, first + count):
            os.write(1, f'{seed}\r'.encode())
            signal.alarm(SECONDS)
            path.write_bytes(mutant(seed))
            outcomes.update(reader(path) for reader in readers)
    signal.alarm(0)
    print(f'\ndone: {dict(outcomes)}')


if __name__ == '__main__':
    main(*map(int, sys.argv[1:]))
