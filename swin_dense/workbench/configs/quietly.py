"""Ask frameworks without what they print, and without a trace in the random numbers that a training draws."""

from __future__ import annotations

import contextlib
import gc
import io
import random
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from mmengine.logging import MMLogger


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what frameworks print and warn about."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Hide what frameworks print, warn about and log."""
    logger = MMLogger.get_current_instance()
    before, logger.disabled = logger.disabled, True
    try:
        with quiet():
            yield
    finally:
        logger.disabled = before


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the state of the random generators of Python, NumPy and torch (on the CPU)."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Keep Python from searching for reference cycles while millions of objects are read, of which none is in one."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()
