"""Read checkpoint files without executing code from them, and write them atomically."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swin_dense.checkpoint.report import CheckpointError, listed
from swin_dense.checkpoint.unpickler import RefusedError, read_pickle
from swin_dense.utils.atomic import check_destination, written_whole

_INDEX = '.index.json'  # appended to the usual file name if the weights are in several shards
# Names of weight files in folders and repositories of transformers and timm, in order of preference.
USUAL_NAMES = ('model.safetensors', f'model.safetensors{_INDEX}', 'pytorch_model.bin', f'pytorch_model.bin{_INDEX}')

# The beginning of a SHA-256, as in names of torch.hub. A suffix of decimal digits is more often a date or a step;
# 32 and 40 hexadecimal digits are an MD5 and a SHA-1.
_HASH_SUFFIX = re.compile(r'-(?=\d*[a-f])([0-9a-f]{8,16}|[0-9a-f]{64})$')


def read_file(path: Path, trust: bool = False) -> Mapping[Any, Any]:
    """Read a checkpoint written by safetensors (suffix ``.safetensors``), ``torch.save`` or plain ``pickle``.

    Args:
        path: the file; an index of shards from ``save_pretrained``, such as ``model.safetensors.index.json``; or a
            folder that contains one of these under its usual name. If the name ends in ``-`` and 8 to 16 or 64
            hexadecimal digits, not all of them decimal, as in ``swin-1cdeb081.pth``, the file's SHA-256 must begin
            with these digits.
        trust: unpickle classes that are not known to be safe, which can execute arbitrary code.

    Raises:
        CheckpointError: the file is not a checkpoint, is damaged, or contains classes that are not trusted.
        FileNotFoundError: there is no such file.
    """
    path = path.expanduser()
    if path.is_dir():
        inside = [path / name for name in USUAL_NAMES if (path / name).is_file()]
        if not inside:
            raise CheckpointError(
                f'{path} is a folder without a {" or ".join(USUAL_NAMES)}; give the checkpoint file in it'
            )
        path = inside[0]
    if not path.is_file():
        raise FileNotFoundError(f'no checkpoint file at {str(path)!r}')
    if path.name.endswith(_INDEX):
        return _read_shards(path, trust)
    check_hash(path, path.name)
    checkpoint = _read_safetensors(path) if path.suffix == '.safetensors' else _read_pickle(path, trust)
    if isinstance(checkpoint, torch.nn.Module):
        checkpoint = checkpoint.state_dict()
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f'{path} holds a {type(checkpoint).__name__}; a checkpoint is a dict of tensors')
    return checkpoint


def read_index(path: Path) -> dict[str, list[str]]:
    """Return the shards listed in an index of ``save_pretrained``, mapped to their tensor names.

    A file whose name is not that of an index gives an empty dict.

    Raises:
        CheckpointError: the index is damaged, or lists a file that is not in its own folder.
    """
    if not path.name.endswith(_INDEX):
        return {}
    try:
        places = json.loads(path.read_text(encoding='utf-8'))['weight_map']
        shards = {
            name: [key for key, place in places.items() if place == name] for name in sorted(set(places.values()))
        }
    except Exception as error:  # the file may have any content
        raise CheckpointError(f'{path} is not an index of save_pretrained, or is damaged: {error!r}') from error
    for name in shards:
        if not isinstance(name, str) or name != Path(name).name or name.endswith(_INDEX):
            raise CheckpointError(f'{path} lists {name!r}, which is not a shard in the same folder')
    return shards


def _read_shards(index: Path, trust: bool) -> dict[str, Any]:
    """Read from each shard the tensors that the index lists for it."""
    tensors: dict[str, Any] = {}
    shards = read_index(index)
    for name, keys in shards.items():
        if not (index.parent / name).is_file():
            raise CheckpointError(
                f'{index.parent} lacks {name}, one of the {len(shards)} files of this checkpoint; fetch them all'
            )
        held = read_file(index.parent / name, trust)
        absent = [key for key in keys if key not in held]
        if absent:
            raise CheckpointError(
                f'{name} lacks {listed(absent)}, which {index} lists for it; download the folder again'
            )
        tensors.update((key, held[key]) for key in keys)
    return tensors


def write_file(path: Path, checkpoint: Mapping[str, Any], force: bool = False, add_hash: bool = False) -> Path:
    """Write a checkpoint atomically.

    Args:
        path: the destination. With the suffix .safetensors, ``checkpoint`` must be a flat dict of tensors.
        checkpoint: the data to write.
        force: overwrite an existing file.
        add_hash: insert the first 8 digits of the file's SHA-256 into its name, which loading then verifies.

    Returns:
        The path of the file.

    Raises:
        FileExistsError: the file exists and ``force`` is not set.
        FileNotFoundError: the folder of ``path`` does not exist.
    """
    check_destination(path, force)
    with written_whole(path) as unfinished:
        if path.suffix == '.safetensors':
            _safetensors().save_file(checkpoint, unfinished.path)
        else:
            with unfinished.path.open('wb') as file:  # given a path, torch stores that temporary name in the file
                torch.save(checkpoint, file)
        if add_hash:
            unfinished.destination = path.with_name(f'{path.stem}-{digest_of(unfinished.path)[:8]}{path.suffix}')
            check_destination(unfinished.destination, force)
    return unfinished.destination


def _read_pickle(path: Path, trust: bool) -> Any:
    try:
        return read_pickle(path, trust)
    except RefusedError as error:
        raise CheckpointError(
            f'{path} asks for {error.wanted}, which weights do not need and which could run any code; nothing was run. '
            'Only if you trust the author of the file, convert it with swin-dense convert --trust and load the result',
            ', or load it with load_checkpoint(..., trust=True); in a config, set trust=True in init_cfg',
        ) from error
    except Exception as error:  # damaged files raise nearly anything
        raise CheckpointError(_why_unreadable(path, error)) from error


def _read_safetensors(path: Path) -> Mapping[str, Tensor]:
    safetensors = _safetensors()
    try:
        return safetensors.load_file(path)
    except Exception as error:
        raise CheckpointError(_why_unreadable(path, error)) from error


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError('.safetensors files need the safetensors package: pip install safetensors') from error
    return safetensors.torch


def _why_unreadable(path: Path, error: Exception) -> str:
    if os.getenv('TORCH_FORCE_WEIGHTS_ONLY_LOAD', '0') != '0' and 'pickle_module' in str(error):
        return (
            f'{path} cannot be read while TORCH_FORCE_WEIGHTS_ONLY_LOAD is set; unset it: swin_dense reads files '
            'without executing code from them'
        )
    with path.open('rb') as file:
        start = file.read(64)
    if not start:
        return f'{path} is empty'
    if start.startswith(b'version https://git-lfs'):
        return f'{path} is only a pointer of Git LFS; run "git lfs pull" to get the file itself'
    if start.lstrip()[:1] == b'<':
        return f'{path} is a web page, not a checkpoint; download it again'
    damage = f'{path} ({path.stat().st_size} bytes) is not a checkpoint, or is damaged or cut short'
    first_line = str(error).strip().partition('\n')[0]
    return f'{damage}: {first_line or type(error).__name__}'


def check_hash(path: Path, name: str) -> None:
    """Raise a CheckpointError if a file's SHA-256 does not begin with the digits in its name.

    Args:
        path: the file.
        name: its current or future name.
    """
    suffix = _HASH_SUFFIX.search(Path(name).stem)
    if suffix is None:
        return
    actual = digest_of(path)
    if not actual.startswith(suffix[1]):
        raise CheckpointError(
            f'by the name {name} its SHA-256 begins with {suffix[1]}, but it begins with {actual[:8]}: '
            'the file is damaged or is another file. Download it again, or rename it if you trust it'
        )


def digest_of(path: Path, algorithm: str = 'sha256') -> str:
    """Return the hexadecimal digest of a file."""
    digest = hashlib.new(algorithm)
    with path.open('rb') as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
