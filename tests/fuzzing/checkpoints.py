"""Checkpoint files, pickles and state dicts."""

from __future__ import annotations

import functools
import io
import math
import pickle
import random
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from swin_dense import SwinBackbone, SwinV2Backbone, export_state_dict
from swin_dense.checkpoint import CheckpointError, load_checkpoint
from swin_dense.utils.choices import FAMILIES
from tests.conftest import TINY
from tests.fuzzing.common import ODD, SEEDS, SMALLEST, TAKEN, Kind, playground, refused, some_of, toy
from tests.images.mutations import mutate


@functools.cache
def checkpoints() -> dict[str, bytes]:
    """Return the contents of small checkpoint files by file name: containers, families and both versions."""
    import safetensors.torch

    state = toy().state_dict()
    torch.manual_seed(0)
    v2 = SwinV2Backbone(**SMALLEST).state_dict()
    contents: dict[str, Any] = {
        'bare': state,
        'detector': {
            'meta': {'epoch': 1},
            'state_dict': {f'backbone.{key}': value for key, value in state.items()},
            'optimizer': {'param_groups': [{'lr': 0.1}]},
        },
        'v2': v2,
        **{family: export_state_dict(toy(), family=family) for family in FAMILIES},
    }
    files = {}
    for name, content in contents.items():
        stream = io.BytesIO()
        torch.save(content, stream)
        files[f'{name}.pth'] = stream.getvalue()
    stream = io.BytesIO()
    torch.save(state, stream, _use_new_zipfile_serialization=False)
    files['legacy.pth'] = stream.getvalue()
    files['bare.safetensors'] = safetensors.torch.save(state)
    return files


# Names that a pickle may ask for: dangerous ones, dotted ones, and those that weights need.
NAMES = (
    ('os', 'system'), ('posix', 'system'), ('nt', 'system'), ('subprocess', 'Popen'), ('builtins', 'eval'),
    ('__builtin__', 'eval'), ('builtins', 'exec'), ('builtins', '__import__'), ('builtins', 'getattr'),
    ('builtins', 'open'), ('builtins', 'object'), ('builtins', 'type'), ('builtins', 'bytearray'), ('io', 'open'),
    ('importlib', 'import_module'), ('pickle', 'loads'), ('_pickle', 'loads'), ('copyreg', '_reconstructor'),
    ('copyreg', '__newobj__'), ('functools', 'partial'), ('operator', 'attrgetter'), ('operator', 'methodcaller'),
    ('types', 'CodeType'), ('types', 'FunctionType'), ('ctypes', 'CDLL'), ('this', 's'), ('antigravity', 'webbrowser'),
    ('', ''), ('', 'eval'), ('torch', 'load'), ('torch', 'jit.load'), ('torch.jit', 'load'), ('torch', 'hub.load'),
    ('torch._utils', '_rebuild_wrapper_subclass'), ('torch._utils', '_rebuild_nested_tensor'),
    ('torch._utils', '_import_dotted_name'), ('torch.serialization', 'load'), ('torch.nn', 'Linear'),
    ('torch.storage', 'UntypedStorage.from_file'), ('torch', 'FloatStorage'), ('torch.storage', 'TypedStorage'),
    ('numpy', 'load'), ('numpy', 'fromfile'), ('numpy', 'memmap'), ('numpy', 'matrix'), ('numpy', 'ndarray.tofile'),
    ('numpy.core.multiarray', 'fromfile'), ('numpy.core', 'multiarray.scalar'),
    ('numpy.f2py.crackfortran', 'getlincoef'),
    ('collections', 'OrderedDict.update'), ('collections', 'OrderedDict.__init__.__globals__'),
    ('swin_dense.checkpoint.unpickler', 'load'), ('swin_dense.checkpoint.unpickler', 'sys.modules'),
    ('collections', 'OrderedDict'), ('torch', 'Size'), ('torch', 'float32'), ('torch._utils', '_rebuild_tensor_v2'),
    ('torch._utils', '_rebuild_tensor_v3'), ('torch._utils', '_rebuild_parameter'), ('numpy', 'dtype'),
    ('torch._tensor', '_rebuild_from_type_v2'), ('torch.storage', '_load_from_bytes'), ('numpy', 'ndarray'),
    ('torch.storage', 'UntypedStorage'), ('numpy.core.multiarray', '_reconstruct'), ('builtins', 'bytes'),
    ('numpy.core.multiarray', 'scalar'), ('numpy._core.numeric', '_frombuffer'), ('_codecs', 'encode'),
)  # fmt: skip
_TEXTS = ('f4', 'O', 'V8', '__class__', '_modules', 'storage', 'module', 'cpu', '0', 'C', '<', 'weight')


def pickle_program(chance: random.Random) -> bytes:
    """Return a pickle of random operations, which usually find enough arguments on the stack."""
    parts = [bytes([0x80, chance.choice([2, 4, 5])])]
    for _ in range(chance.choice([1, 2, 3, 5, 10, 40])):
        kind = chance.randrange(12)
        if kind < 3:
            module, name = chance.choice(NAMES)
            if chance.random() < 0.5 or not module or not name:
                parts.append(_pushed(module) + _pushed(name) + b'\x93')
            else:
                parts.append(f'{chance.choice("cci")}{module}\n{name}\n'.encode())
        elif kind < 6:
            numbers = [bytes([0x4B, chance.randrange(256)]), b'J\xff\xff\xff\x7f', b'J\xff\xff\xff\xff', b'N', b'\x88']
            containers = [b'}', b']', b')', b'\x8f', b'C\x04abcd', b'G?\xf0\x00\x00\x00\x00\x00\x00']
            parts.append(chance.choice([*numbers, *containers, _pushed(chance.choice(_TEXTS))]))
        elif kind < 9:  # build a tuple and call, make or change something with it
            parts.append(
                chance.choice([b'\x85', b'\x86', b'\x87', b')']) + chance.choice([b'R', b'\x81', b'}\x92', b'b'])
            )
        else:
            operations = (
                b'(', b't', b'l', b'd', b'e', b'u', b's', b'a', b'\x90', b'\x91', b'0', b'1', b'2', b'\x94', b'q\x00',
                b'h\x00', b'b', b'R', b'o', b'Q', b'P0\n', b'\x82\x01', b'\x97', b'\x98', b'\x93',
                b'\x95\xff\xff\xff\xff\0\0\0\0',
                b'B\xff\xff\xff\x7f', b'\x96\xff\xff\xff\xff\xff\xff\xff\x7f', b'r\xff\xff\xff\x7f',
            )  # fmt: skip
            parts.append(chance.choice(operations))
    return b''.join([*parts, b'.'])


@functools.cache
def _pickled_weights() -> bytes:
    return pickle.dumps({name: tensor.numpy() for name, tensor in toy().state_dict().items()}, 2)[2:-1]


def _pushed(text: str) -> bytes:
    return b'\x8c' + bytes([len(text)]) + text.encode()


def try_pickle(example: Any) -> str:
    seed, zipped, receiver = example
    path = playground() / 'program.pth'
    program = pickle_program(random.Random(seed))
    # The program makes the value of one more key of a dict of weights: {'model': {...}, 'x': value}.
    program = b'\x80\x02}' + _pushed('model') + _pickled_weights() + b's' + _pushed('x') + program[2:-1] + b's.'
    if zipped:
        with zipfile.ZipFile(path, 'w') as archive:
            archive.writestr('a/data.pkl', program)
            archive.writestr('a/data/0', bytes(16))
            archive.writestr('a/version', '3\n')
            archive.writestr('a/byteorder', 'little')
    else:
        path.write_bytes(program)
    return _try_to_load(receiver, path, {})


LOADING_OPTIONS = {
    'prefix': st.sampled_from(['', 'backbone', 'x']),
    'ema': st.booleans(),
    'allow_partial': st.booleans(),
    'final_norm': st.booleans(),
    'window_size': st.integers(-1, 9),
    'trust': st.just(False),
}


@functools.cache
def receivers() -> dict[str, SwinBackbone]:
    return {'v1': SwinBackbone(**SMALLEST), 'v2': SwinV2Backbone(**SMALLEST), 'other': SwinBackbone(**TINY)}


def try_checkpoint_file(example: Any) -> str:
    name, damaged, seed, receiver, options = example
    content = checkpoints()[name]
    path = playground() / f'checkpoint{Path(name).suffix}'
    path.write_bytes(mutate(content, random.Random(seed)) if damaged else content)
    return _try_to_load(receiver, path, options)


def _try_to_load(receiver: str, source: Any, options: dict[str, Any]) -> str:
    backbone = receivers()[receiver]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            load_checkpoint(backbone, source, log=None, **options)
    except (ValueError, TypeError) as error:
        if not options and not isinstance(error, CheckpointError):  # without options, only the file can be wrong
            raise
        return refused(error)
    assert all(parameter.isfinite().all() for parameter in backbone.parameters())
    return TAKEN


def spoil(state: dict[str, Any], chance: random.Random) -> dict[Any, Any]:
    """Drop, rename, reshape, retype and replace entries of a state dict, and wrap it."""
    state = dict(state)
    for _ in range(chance.choice([1, 1, 2, 5])):
        name = chance.choice(sorted(state))
        kind = chance.choice(['drop', 'rename', 'reshape', 'type', 'value', 'other', 'copy', 'prefix'])
        value = state.pop(name)
        if kind == 'rename':
            state[name.replace(*chance.choice([('0', '7'), ('weight', 'bias'), ('.', ''), ('norm', 'x')]))] = value
        elif kind == 'reshape' and isinstance(value, torch.Tensor) and value.ndim:
            state[name] = chance.choice([value[:1], value[None], value[..., None], value[:0], value.flatten()])
        elif kind == 'type' and isinstance(value, torch.Tensor):
            state[name] = value.to(chance.choice([torch.int64, torch.bool, torch.complex64, torch.float16]))
        elif kind == 'value' and isinstance(value, torch.Tensor):
            state[name] = torch.full_like(
                value, chance.choice([0, 1, 1e4, math.nan]) if value.is_floating_point() else 10**6
            )
        elif kind == 'other':
            state[name] = chance.choice([None, 1, 'x', [1], {'a': 1}, {'a': value}, np.zeros(3)])
        elif kind == 'copy':
            state[name] = state[f'ema.{name}'] = value
        elif kind == 'prefix':
            state = {f'module.{key}': item for key, item in {**state, name: value}.items()}
    return {chance.choice(['model', 'state_dict', 'x', 1]): state} if chance.random() < 0.2 else state


def try_state_dict(example: Any) -> str:
    family, seed, receiver, options = example
    state = toy().state_dict() if family == 'ours' else export_state_dict(toy(), family=family)
    return _try_to_load(receiver, spoil(state, random.Random(seed)), options)


KINDS = {
    'checkpoint files, whole and damaged': Kind(
        st.deferred(
            lambda: st.tuples(
                st.sampled_from(sorted(checkpoints())),
                st.sampled_from([True, True, True, False]),
                SEEDS,
                st.sampled_from(['v1', 'v1', 'v2', 'other']),
                some_of(LOADING_OPTIONS, ODD),
            )
        ),
        try_checkpoint_file,
        13,
        ('safetensors',),
    ),
    'pickles of random operations': Kind(
        st.tuples(SEEDS, st.booleans(), st.sampled_from(['v1', 'v2'])), try_pickle, 15
    ),
    'state dicts with wrong entries': Kind(
        st.tuples(
            st.sampled_from(['ours', *FAMILIES]), SEEDS, st.sampled_from(['v1', 'other']), some_of(LOADING_OPTIONS, ODD)
        ),
        try_state_dict,
        14,
    ),
}
