"""Read checkpoint files without running anything that they contain."""

from __future__ import annotations

import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from swin_dense.checkpoint.report import CheckpointError


class _Inert:
    """Stands in for a class that checkpoints hold beside the weights: takes anything, does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# Classes that training code is known to leave in checkpoints. Their real code never runs.
_INERT_CLASSES = (
    'mmengine.logging.history_buffer.HistoryBuffer',
    'numpy.core.multiarray.scalar',
    'numpy.core.multiarray._reconstruct',
    'numpy._core.multiarray.scalar',
    'numpy._core.multiarray._reconstruct',
    'numpy.ndarray',
    'numpy.dtype',
    'argparse.Namespace',
    'pathlib.PosixPath',
)
_DICT_CLASSES = ('yacs.config.CfgNode', 'mmengine.config.config.ConfigDict', 'mmcv.utils.config.ConfigDict')


def _safe_globals() -> list[Any]:
    stand_ins = []
    for path in _INERT_CLASSES:
        module, _, name = path.rpartition('.')
        stand_ins.append((type(name, (_Inert,), {'__module__': module}), path))
    return stand_ins + [(OrderedDict, path) for path in _DICT_CLASSES]


def read_file(source: str | os.PathLike[str], trust: bool = False) -> Mapping[Any, Any]:
    """Read a checkpoint from a file.

    Args:
        source: path of a .safetensors file or of a file of ``torch.save``.
        trust: unpickle classes that are not known to be harmless, which can run any code.

    Raises:
        CheckpointError: the file is not a checkpoint, is damaged, or holds classes that are not trusted.
        FileNotFoundError: there is no such file.
    """
    path = Path(source).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f'no checkpoint file at {str(path)!r}')
    if path.suffix == '.safetensors':
        return _read_safetensors(path)
    try:
        if trust:
            checkpoint = torch.load(path, map_location='cpu', weights_only=False)
        else:
            with torch.serialization.safe_globals(_safe_globals()):
                checkpoint = torch.load(path, map_location='cpu', weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(_why_unreadable(path, error)) from error
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(
            f'{path} holds a {type(checkpoint).__name__}, not a checkpoint: expected a dict of tensors'
        )
    return checkpoint


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    try:
        import safetensors
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError(f'reading {path} needs safetensors: pip install safetensors') from error
    try:
        return load_file(path)
    except safetensors.SafetensorError as error:
        raise CheckpointError(f'{path} is not a safetensors file, or is damaged ({error})') from error


def _why_unreadable(path: Path, error: Exception) -> str:
    refused = re.search(r'GLOBAL ([\w.]+) was not an allowed global', str(error))
    if refused:
        return (
            f'{path} wants to build {refused[1]}, which weights do not need and which could run any code; '
            'pass trust=True only if you know where the file comes from'
        )
    size = path.stat().st_size
    if size == 0:
        return f'{path} is empty'
    return f'{path} ({size} bytes) is not a checkpoint of PyTorch, or is damaged or cut short: {_first_line(error)}'


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
