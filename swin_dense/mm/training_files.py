"""Let mmengine read the checkpoints of its own trainings, which ``torch.load`` refuses since torch 2.6.

Besides the weights, these files contain the log history. mmengine 0.10.7 does not register its classes in torch, so
that ``resume`` and ``load_from`` fail. The registration here holds while mmengine reads such a file, and no longer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pickle import UnpicklingError
from typing import Any

from mmengine.logging import HistoryBuffer
from mmengine.runner import CheckpointLoader

from swin_dense.utils import compat, private_mm


def let_mmengine_read_training_files() -> None:
    """Replace mmengine's loader of local files by a loader that tries the files that torch refuses once more."""
    loader = private_mm.local_loader()

    @functools.wraps(loader)
    def load(filename: str, map_location: Any = None) -> Any:
        with suppress(UnpicklingError):
            return loader(filename, map_location)
        with training_classes():
            return loader(filename, map_location)

    CheckpointLoader.register_scheme('', load, force=True)


def training_classes() -> AbstractContextManager[None]:
    """Within this context, ``torch.load(weights_only=True)`` accepts mmengine's training checkpoints.

    What is added holds only numbers, and trusts no size or flag of a file, unlike NumPy's own functions.
    """
    from swin_dense.checkpoint.unpickler import NUMPY_GLOBALS

    history = {f'{HistoryBuffer.__module__}.{HistoryBuffer.__qualname__}': HistoryBuffer}
    return compat.safe_globals({**NUMPY_GLOBALS, **history, 'builtins.getattr': _statistic})


def _statistic(owner: Any, name: str) -> Callable[..., Any]:
    """Replace getattr, by which a pickled history refers to its statistics and which could access any attribute."""
    statistics = private_mm.history_statistics(HistoryBuffer)
    if owner is not HistoryBuffer or name not in statistics:
        raise UnpicklingError(f'the attribute {name!r} of {owner!r} is not allowed')
    return statistics[name]
