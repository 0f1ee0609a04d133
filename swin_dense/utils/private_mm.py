"""Private names of mmengine and mmdet, each with a fallback for versions that have dropped it.

Commands read configs with them before they import torch, whose private names are in ``private``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def local_loader() -> Callable[..., Any]:
    """Return mmengine's loader of local files. Without the name, a loader that others registered is lost."""
    from mmengine.runner import CheckpointLoader
    from mmengine.runner.checkpoint import load_from_local

    return getattr(CheckpointLoader, '_schemes', {}).get('', load_from_local)


def history_statistics(history: type) -> dict[str, Callable[..., Any]]:
    """Return the methods that a ``HistoryBuffer`` is pickled with; without the name, not those that users add."""
    own = {name: getattr(history, name) for name in ('min', 'max', 'current', 'mean')}
    return {**own, **getattr(history, '_statistics_methods', {})}


def is_resuming(runner: Any) -> bool:
    """Return whether a runner of mmengine resumes a training. Without the name, as its config says."""
    return bool(getattr(runner, '_resume', runner.cfg.get('resume', False)))


def lazy_dict(config: Any) -> dict[str, Any]:
    """Return the content of a config with its imports unresolved. Without the name, lazy configs are not recognised."""
    return getattr(config, '_to_lazy_dict', config.to_dict)()


def fsdp_strategy() -> Any:
    """Return mmengine's FSDPStrategy. Without it, None: sharded trainings cannot be resumed."""
    try:
        from mmengine._strategy import FSDPStrategy
    except ImportError:  # also of a torch without what it needs
        return None
    return FSDPStrategy


def metainfo_of(kind: Any, metainfo: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``metainfo`` of a data set of a class; without the name, it may not name a file of class names."""
    return getattr(kind, '_load_metainfo', dict)(metainfo)


def swaps_channels(preprocessor: Any) -> bool:
    """Return whether a data preprocessor of mmdet reverses the channels; without the name, as it does to one pixel."""
    if hasattr(preprocessor, '_channel_conversion'):
        return bool(preprocessor._channel_conversion)
    import torch

    pixel = torch.tensor([0, 100, 200], dtype=torch.uint8, device=preprocessor.device).view(3, 1, 1)
    out = preprocessor({'inputs': [pixel], 'data_samples': None})['inputs'][:, :, :1, :1]
    first, _, last = (out * getattr(preprocessor, 'std', 1) + getattr(preprocessor, 'mean', 0)).flatten().tolist()
    return first > last
