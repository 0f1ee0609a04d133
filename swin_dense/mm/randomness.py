"""The state of the random generators, in a form that checkpoints hold and torch.load reads without trust."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

Batch = TypeVar('Batch')


def get_state() -> dict[str, Any]:
    """Return the state of the generators of Python, NumPy and torch, and of the current GPU, as numbers and tensors."""
    legacy: Any = np.random.get_state(legacy=True)
    name, key, *rest = legacy
    return {
        'python': random.getstate(),
        'numpy': (name, key.tolist(), *rest),
        'torch': torch.get_rng_state(),
        'cuda': torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_state(state: dict[str, Any]) -> None:
    """Let the generators go on from what ``get_state`` returned, on whatever device its tensors have come to lie."""
    random.setstate(state['python'])
    np.random.set_state(state['numpy'])
    torch.set_rng_state(state['torch'].cpu())
    if state['cuda'] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state['cuda'].cpu())


def set_state_after(batches: Iterator[Batch], count: int, state: dict[str, Any]) -> Iterator[Batch]:
    """Yield what ``batches`` does, and between its item ``count`` and the next one set the state."""
    yield from islice(batches, count)
    set_state(state)
    yield from batches
