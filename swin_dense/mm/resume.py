"""Let torch read the checkpoints that mmengine's Runner writes, without trusting what else a pickle may ask for.

Beside the weights such a checkpoint holds the history of the log, which ``torch.load`` refuses since 2.6, so that
resume and load_from fail. The classes named here only hold numbers; every other class stays refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer


def allow_training_checkpoints() -> None:
    """Add what mmengine's checkpoints hold to the classes that ``torch.load(weights_only=True)`` accepts."""
    reconstruct: Any = np.zeros(0).__reduce__()[0]
    make_scalar: Any = np.float64(0).__reduce__()[0]
    dtypes = [type(np.dtype(name)) for name in ('float64', 'float32', 'int64', 'int32', 'bool')]
    torch.serialization.add_safe_globals([HistoryBuffer, np.ndarray, np.dtype, *dtypes])
    for module in ('numpy.core.multiarray', 'numpy._core.multiarray'):  # before and since NumPy 2
        torch.serialization.add_safe_globals(
            [(reconstruct, f'{module}._reconstruct'), (make_scalar, f'{module}.scalar')]
        )
    torch.serialization.add_safe_globals([(_statistic, 'builtins.getattr')])


def _statistic(owner: Any, name: str) -> Callable[..., Any]:
    """Stand in for getattr, by which a pickled history names its statistics, and which could reach anything."""
    statistics = HistoryBuffer()._statistics_methods  # of the class, but filled by its first instance
    if owner is not HistoryBuffer or name not in statistics:
        raise pickle.UnpicklingError(f'a checkpoint may not ask for the attribute {name!r} of {owner!r}')
    return statistics[name]
