"""Let torch load the training checkpoints of mmengine's Runner.

Besides the weights, these checkpoints contain the log history, which ``torch.load`` refuses since torch 2.6, so that
resume and load_from fail. What is allowed here for the whole process holds numbers only, and believes no size or flag
of a file, unlike NumPy's own functions; all other classes are still refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mmengine.logging import HistoryBuffer

from swin_dense.checkpoint.unpickler import NUMPY_GLOBALS, RefusedError
from swin_dense.utils import compat


def allow_training_checkpoints() -> None:
    """Add the classes in mmengine's checkpoints to those that ``torch.load(weights_only=True)`` accepts."""
    of_arrays = [(function, name) for name, function in NUMPY_GLOBALS.items()]
    compat.add_safe_globals([HistoryBuffer, *of_arrays, (_statistic, 'builtins.getattr')])


def _statistic(owner: Any, name: str) -> Callable[..., Any]:
    """Replace getattr, by which a pickled history refers to its statistics and which could access any attribute."""
    statistics = HistoryBuffer()._statistics_methods  # a class attribute, which the first instance fills
    if owner is not HistoryBuffer or name not in statistics:
        raise RefusedError(f'the attribute {name!r} of {owner!r}')
    return statistics[name]
