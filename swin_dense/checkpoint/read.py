"""Read a checkpoint at a path or an address, without executing code from it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swin_dense.archs.published import place_of, suggestion
from swin_dense.checkpoint.unpickler import RefusedError, read_pickle
from swin_dense.utils import packages
from swin_dense.utils.addresses import is_address, without_secrets
from swin_dense.utils.checks import first_few, shortened
from swin_dense.utils.errors import CheckpointError
from swin_dense.utils.fetch import INDEX, USUAL_NAMES, check_suffix, local_file, shards_of

Checkpoint = str | os.PathLike[str] | Mapping[str, Any]

# A file of several, as save_pretrained names them.
_SHARD = re.compile(r'(.+)-\d{5,6}-of-(\d{5,6})\.(safetensors|bin)')


def read_checkpoint(source: Checkpoint, trust: bool = False) -> tuple[Mapping[Any, Any], str]:
    """Read a checkpoint from any source of :func:`swin_dense.load_checkpoint`; return it and its name in messages."""
    if isinstance(source, Mapping):
        return source, 'the given dict'
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f'a checkpoint must be a path, a name, an address or a dict, got {type(source).__name__}')
    place = place_of(source) if isinstance(source, str) else source
    if is_address(place):
        with local_file(str(place)) as path:
            return read_file(path, trust), without_secrets(place)
    return read_file(Path(source), trust), os.fspath(source)


def read_file(path: Path, trust: bool = False) -> Mapping[Any, Any]:
    """Read a file of safetensors (suffix ``.safetensors``), ``torch.save`` or plain ``pickle``.

    It may also be an index of shards from ``save_pretrained``, such as ``model.safetensors.index.json``, or a folder
    with one of these under its usual name. With ``trust``, unpickle everything, which can execute arbitrary code.

    Raises:
        CheckpointError: the file is damaged, is no checkpoint or only a part of one, or has another hash than its
            name states.
        FileNotFoundError: there is no such file.
    """
    path = path.expanduser()
    if path.is_dir():
        usual = [path / name for name in USUAL_NAMES if (path / name).is_file()]
        if not usual:
            names = ' or '.join(USUAL_NAMES)
            raise CheckpointError(f'{path} is a folder without a {names}; give the checkpoint file in it')
        path = usual[0]
    if not path.is_file():
        raise FileNotFoundError(f'no checkpoint file at {str(path)!r}{suggestion(str(path))}')
    if path.name.endswith(INDEX):
        return _read_shards(path, trust)
    shard = _SHARD.fullmatch(path.name)
    if shard and int(shard[2]) > 1:
        raise CheckpointError(
            f'{path} has a part of a checkpoint, which is in {int(shard[2])} files. Give their folder, or '
            f'{shard[1]}.{shard[3]}{INDEX} in it'
        )
    return _read_whole(path, trust)


def _read_whole(path: Path, trust: bool) -> Mapping[Any, Any]:
    """Read one file, also a shard, and check the hash in its name."""
    check_suffix(path, path.name)
    try:
        if path.suffix == '.safetensors':
            checkpoint = packages.optional('a .safetensors file', 'safetensors.torch').load_file(path)
        else:
            checkpoint = read_pickle(path, trust)
    except ImportError:
        raise
    except Exception as error:  # damaged files raise nearly anything
        raise _explained(path, error) from error
    if isinstance(checkpoint, torch.nn.Module):
        checkpoint = checkpoint.state_dict()
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f'{path} holds a {type(checkpoint).__name__}; a checkpoint is a dict of tensors')
    return checkpoint


def _read_shards(index: Path, trust: bool) -> dict[str, Tensor]:
    """Read from each shard the tensors that the index lists for it."""
    tensors: dict[str, Any] = {}
    shards = shards_of(index)
    for name, keys in shards.items():
        if not (index.parent / name).is_file():
            raise CheckpointError(
                f'{index.parent} lacks {shortened(name)}, one of the {len(shards)} files of this checkpoint; '
                'fetch them all'
            )
        held = _read_whole(index.parent / name, trust)
        absent = [key for key in keys if key not in held]
        if absent:
            raise CheckpointError(
                f'{name} lacks {first_few(absent)}, which {index} lists for it; download the folder again'
            )
        tensors.update((key, held[key]) for key in keys)
    return tensors


def _explained(path: Path, error: Exception) -> CheckpointError:
    if isinstance(error, RefusedError):
        return CheckpointError(
            f'{path} asks for {shortened(error.wanted)}, which no checkpoint needs; nothing was run. '
            'Only if you trust the author of the file, load it with load_checkpoint(..., trust=True); in a config, set '
            'trust=True in init_cfg'
        )
    with path.open('rb') as file:
        start = file.read(64)
    if not start:
        return CheckpointError(f'{path} is empty')
    if start.startswith(b'version https://git-lfs'):
        return CheckpointError(f'{path} is only a pointer of Git LFS; run "git lfs pull" to get the file itself')
    if start.lstrip()[:1] == b'<':
        return CheckpointError(f'{path} is a web page, not a checkpoint; download it again')
    damage = f'{path} ({path.stat().st_size} bytes) is not a checkpoint, or is damaged or cut short'
    first_line = str(error).strip().partition('\n')[0]
    return CheckpointError(f'{damage}: {shortened(first_line) or type(error).__name__}')
