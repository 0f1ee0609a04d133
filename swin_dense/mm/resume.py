"""Let torch read the checkpoints that mmengine's Runner writes, without trusting what else a pickle may ask for.

Beside the weights such a checkpoint holds the history of the log, which ``torch.load`` refuses since 2.6, so that
resume and load_from fail. The classes named here only hold numbers; every other class stays refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mmengine.logging import HistoryBuffer

from swin_dense.checkpoint.unpickler import NUMPY_GLOBALS, RefusedError
from swin_dense.utils import compat


def allow_training_checkpoints() -> None:
    """Add what mmengine's checkpoints hold to the classes that ``torch.load(weights_only=True)`` accepts."""
    dtypes = [type(np.dtype(name)) for name in ('float64', 'float32', 'int64', 'int32', 'bool')]
    stand_ins = [(stand_in, name) for name, stand_in in NUMPY_GLOBALS.items()]
    # torch fills arrays of types on its list alone. No pickle can spell this name for the type, since names end at
    # line breaks, so none can call it.
    array = (np.ndarray, 'filled once reconstructed\n')
    compat.add_safe_globals([HistoryBuffer, array, *dtypes, *stand_ins, (_statistic, 'builtins.getattr')])


def _statistic(owner: Any, name: str) -> Callable[..., Any]:
    """Stand in for getattr, by which a pickled history names its statistics, and which could reach anything."""
    statistics = HistoryBuffer()._statistics_methods  # of the class, but filled by its first instance
    if owner is not HistoryBuffer or name not in statistics:
        raise RefusedError(f'the attribute {name!r} of {owner!r}')
    return statistics[name]
