"""The training checkpoints of mmengine's Runner: let torch load them, and check that they are complete.

Besides the weights, these checkpoints contain the log history, which ``torch.load`` refuses since torch 2.6, so that
resume and load_from fail. The classes allowed here hold numbers only; all other classes are still refused.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.logging import HistoryBuffer

from swin_dense.checkpoint import CheckpointError
from swin_dense.checkpoint.unpickler import NUMPY_GLOBALS, RefusedError, read_pickle
from swin_dense.utils import compat


def allow_training_checkpoints() -> None:
    """Add the classes in mmengine's checkpoints to those that ``torch.load(weights_only=True)`` accepts."""
    dtypes = [type(np.dtype(name)) for name in ('float64', 'float32', 'int64', 'int32', 'bool')]
    stand_ins = [(stand_in, name) for name, stand_in in NUMPY_GLOBALS.items()]
    # torch restores the state of arrays only if their type is on its list. No pickle can call the type by this name,
    # because names in pickles end at line breaks.
    array = (np.ndarray, 'filled once reconstructed\n')
    compat.add_safe_globals([HistoryBuffer, array, *dtypes, *stand_ins, (_statistic, 'builtins.getattr')])


def _statistic(owner: Any, name: str) -> Callable[..., Any]:
    """Replace getattr, by which a pickled history refers to its statistics and which could access any attribute."""
    statistics = HistoryBuffer()._statistics_methods  # a class attribute, which the first instance fills
    if owner is not HistoryBuffer or name not in statistics:
        raise RefusedError(f'the attribute {name!r} of {owner!r}')
    return statistics[name]


def training_meta(path: Path) -> dict[str, Any]:
    """Return the ``meta`` of a training checkpoint, with ``epoch``, ``iter`` and ``seed``.

    Its tensors are not read if the format of the file allows it. A folder, the checkpoint of a sharded model, gives {}.
    """
    if path.is_dir():
        return {}
    try:
        checkpoint = read_pickle(path, mmap=True)
    except Exception as error:  # damaged files raise nearly anything
        raise CheckpointError(f'{path} is damaged, truncated or no checkpoint') from error
    meta = checkpoint.get('meta') if isinstance(checkpoint, dict) else None
    if not isinstance(meta, dict) or 'iter' not in meta or 'message_hub' not in checkpoint:
        raise CheckpointError(f'{path} contains no training state to resume; to start from its weights, use load_from')
    return meta


def check_training_checkpoint(path: Path) -> None:
    """Raise a CheckpointError if training cannot be resumed from a file, whose content is read as a whole."""
    training_meta(path)
    if path.is_file() and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged:
            raise CheckpointError(f'{path} is damaged: the checksum of its entry {damaged} is wrong')
