"""Get and set the state of the random generators, in a form that torch.load(weights_only=True) accepts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch

Batch = TypeVar('Batch')


def get_state() -> dict[str, Any]:
    """Return the random state of Python, NumPy, torch and the current GPU as numbers and tensors."""
    legacy: Any = np.random.get_state(legacy=True)
    name, key, *rest = legacy
    return {
        'python': random.getstate(),
        'numpy': (name, key.tolist(), *rest),
        'torch': torch.get_rng_state(),
        'cuda': torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_state(state: dict[str, Any]) -> None:
    """Restore a state from :func:`get_state`; its tensors may be on any device."""
    random.setstate(state['python'])
    np.random.set_state(state['numpy'])
    torch.set_rng_state(state['torch'].cpu())
    if state['cuda'] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state['cuda'].cpu())


def set_state_after(batches: Iterator[Batch], count: int, state: dict[str, Any]) -> Iterator[Batch]:
    """Yield the items of ``batches``, and set the state after the first ``count`` of them."""
    yield from islice(batches, count)
    set_state(state)
    yield from batches
