"""Let torch read the checkpoints that mmengine's Runner writes, without trusting what else a pickle may ask for.

Beside the weights such a checkpoint holds the history of the log, which ``torch.load`` refuses since 2.6, so that
resume and load_from fail. The classes named here only hold numbers; every other class stays refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from mmengine.logging import HistoryBuffer

from swin_dense import compat


def allow_training_checkpoints() -> None:
    """Add what mmengine's checkpoints hold to the classes that ``torch.load(weights_only=True)`` accepts."""
    make_scalar: Any = np.float64(0).__reduce__()[0]
    dtypes = [type(np.dtype(name)) for name in ('float64', 'float32', 'int64', 'int32', 'bool')]
    compat.add_safe_globals([HistoryBuffer, np.dtype, *dtypes])
    # An array is made empty and then filled, which torch allows for types on its list alone. No pickle can spell this
    # name for the type, since names end at line breaks, so none can call it.
    compat.add_safe_globals([(np.ndarray, 'filled by _array\n'), (_Array, 'numpy.ndarray')])
    for module in ('numpy.core.multiarray', 'numpy._core.multiarray'):  # before and since NumPy 2
        compat.add_safe_globals([(_array, f'{module}._reconstruct'), (make_scalar, f'{module}.scalar')])
    compat.add_safe_globals([(_statistic, 'builtins.getattr')])


class _Array:
    """Stands in for the name of the array type, which pickled arrays pass on and nobody needs to call."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Array:
        raise pickle.UnpicklingError('a checkpoint may not make arrays but by unpickling them')


def _array(kind: Any, *_: Any) -> np.ndarray:
    """Stand in for the function that makes an array for a pickle to fill."""
    if kind is not _Array:
        raise pickle.UnpicklingError(f'a checkpoint may not make an array of the type {kind!r}')
    return np.empty(0, np.int8)


def _statistic(owner: Any, name: str) -> Callable[..., Any]:
    """Stand in for getattr, by which a pickled history names its statistics, and which could reach anything."""
    statistics = HistoryBuffer()._statistics_methods  # of the class, but filled by its first instance
    if owner is not HistoryBuffer or name not in statistics:
        raise pickle.UnpicklingError(f'a checkpoint may not ask for the attribute {name!r} of {owner!r}')
    return statistics[name]
