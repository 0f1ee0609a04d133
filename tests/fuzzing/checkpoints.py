"""Checkpoint files, pickles and state dicts."""

from __future__ import annotations

import functools
import math
import pickle
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from swin_dense import SwinBackbone, SwinV2Backbone, export_state_dict
from swin_dense.checkpoint import CheckpointError, load_checkpoint
from swin_dense.utils.choices import FAMILIES
from tests.checkpoint.helpers import prefixed
from tests.conftest import TINY
from tests.fuzzing.common import ODD, SEEDS, SMALLEST, TAKEN, Kind, playground, refused, some_of, toy
from tests.fuzzing.programs import names_of, saved, words_of, zipped_records
from tests.images.mutations import mutate


@functools.cache
def checkpoints() -> dict[str, bytes]:
    """Return the contents of small checkpoint files by file name: containers, families and both versions."""
    import safetensors.torch

    state = toy().state_dict()
    torch.manual_seed(0)
    detector = {
        'meta': {'epoch': 1},
        'state_dict': prefixed('backbone.', state),
        'optimizer': {'param_groups': [{'lr': 0.1}]},
    }
    contents: dict[str, Any] = {family: export_state_dict(toy(), family=family) for family in FAMILIES}
    contents |= {'bare': state, 'detector': detector, 'v2': SwinV2Backbone(**SMALLEST).state_dict()}
    files = {f'{name}.pth': saved(content) for name, content in contents.items()}
    files['legacy.pth'] = saved(state, _use_new_zipfile_serialization=False)
    files['bare.safetensors'] = safetensors.torch.save(state)
    return files


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
    collections:OrderedDict.update collections:OrderedDict.__init__.__globals__ swin_dense.checkpoint.unpickler:load
    swin_dense.checkpoint.unpickler:sys.modules collections:OrderedDict torch:Size torch:float32
    torch._utils:_rebuild_tensor_v2 torch._utils:_rebuild_tensor_v3 torch._utils:_rebuild_parameter numpy:dtype
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


@functools.cache
def _pickled_weights() -> bytes:
    return pickle.dumps({name: tensor.numpy() for name, tensor in toy().state_dict().items()}, 2)[2:-1]


def _pushed(text: str) -> bytes:
    return b'\x8c' + bytes([len(text)]) + text.encode()


def try_pickle(example: Any) -> str:
    seed, is_zipped, receiver = example
    path = playground() / 'program.pth'
    program = pickle_program(random.Random(seed))
    # The program makes the value of one more key of a dict of weights: {'model': {...}, 'x': value}.
    program = b'\x80\x02}' + _pushed('model') + _pickled_weights() + b's' + _pushed('x') + program[2:-1] + b's.'
    if is_zipped:
        program = zipped_records({'data.pkl': program, 'data/0': bytes(16), 'byteorder': b'little'})
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
    return {
        'v1': SwinBackbone(**SMALLEST),
        'v2': SwinV2Backbone(**SMALLEST),
        'other': SwinBackbone(**TINY),
    }


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
        value = state.pop(name)
        kind = chance.choice(['drop', 'rename', 'copy', 'prefix', 'other', 'tensor', 'tensor', 'tensor'])
        if kind == 'rename':
            part, other = chance.choice(
                [
                    ('0', '7'),
                    ('weight', 'bias'),
                    ('.', ''),
                    ('norm', 'x'),
                ]
            )
            state[name.replace(part, other)] = value
        elif kind == 'copy':
            state[name] = state[f'ema.{name}'] = value
        elif kind == 'prefix':
            state = prefixed('module.', {**state, name: value})
        elif kind == 'other':
            state[name] = chance.choice(
                [
                    None,
                    1,
                    'x',
                    [1],
                    {'a': 1},
                    {'a': value},
                    np.zeros(3),
                ]
            )
        elif kind == 'tensor' and isinstance(value, torch.Tensor):
            state[name] = _spoiled(value, chance)
    return {chance.choice(['model', 'state_dict', 'x', 1]): state} if chance.random() < 0.2 else state


def _spoiled(tensor: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """Return a tensor of another shape, type or value."""
    filled = chance.choice([0, 1, 1e4, math.nan]) if tensor.is_floating_point() else 10**6
    changed = [
        tensor.to(chance.choice([torch.int64, torch.bool, torch.complex64, torch.float16])),
        torch.full_like(tensor, filled),
    ]
    if tensor.ndim:
        shapes = [
            tensor[:1],
            tensor[None],
            tensor[..., None],
            tensor[:0],
            tensor.flatten(),
        ]
        changed.append(chance.choice(shapes))
    return chance.choice(changed)


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
            st.sampled_from(['ours', *FAMILIES]),
            SEEDS,
            st.sampled_from(['v1', 'other']),
            some_of(LOADING_OPTIONS, ODD),
        ),
        try_state_dict,
        14,
    ),
}
