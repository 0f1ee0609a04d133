"""Checkpoint files and state dicts."""

from __future__ import annotations

import functools
import math
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
from tests.fuzzing.programs import saved
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
