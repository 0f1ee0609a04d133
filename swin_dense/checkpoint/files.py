"""Read checkpoint files without running anything that they contain, and write them whole or not at all."""

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

_INDEX = '.index.json'  # after the usual name, where the weights are in several files
# What a folder or repository of transformers and timm calls its weights, the first first.
USUAL_NAMES = ('model.safetensors', f'model.safetensors{_INDEX}', 'pytorch_model.bin', f'pytorch_model.bin{_INDEX}')

# The beginning of a SHA-256, as torch.hub has it. Digits alone are a date or a step far more often; 32 and 40
# hexadecimal digits are an MD5 and a SHA-1.
_HASH_SUFFIX = re.compile(r'-(?=\d*[a-f])([0-9a-f]{8,16}|[0-9a-f]{64})$')


def read_file(path: Path, trust: bool = False) -> Mapping[Any, Any]:
    """Read a checkpoint from a file of safetensors, if it is called so, of ``torch.save`` or of plain ``pickle``.

    Args:
        path: the file; the index of several that ``save_pretrained`` of others wrote together, as in
            ``model.safetensors.index.json``; or a folder with one of these by their usual names. If
            a name ends in ``-`` and 8 to 16 or 64 hexadecimal digits, not all of them decimal, as in
            ``swin-1cdeb081.pth``, these must be the first of the file's SHA-256.
        trust: unpickle classes that are not known to be harmless, which can run any code.

    Raises:
        CheckpointError: the file is not a checkpoint, is damaged, or holds classes that are not trusted.
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
    """Return the files that an index of ``save_pretrained`` names, each with the keys that it says are in it.

    A file that is no such index, by its name, names none.

    Raises:
        CheckpointError: it is damaged, or names files that are not beside it.
    """
    if not path.name.endswith(_INDEX):
        return {}
    try:
        places = json.loads(path.read_text(encoding='utf-8'))['weight_map']
        shards = {
            name: [key for key, place in places.items() if place == name] for name in sorted(set(places.values()))
        }
    except Exception as error:  # any content may be under the name
        raise CheckpointError(f'{path} is not an index of save_pretrained, or is damaged: {error!r}') from error
    for name in shards:
        if not isinstance(name, str) or name != Path(name).name or name.endswith(_INDEX):
            raise CheckpointError(f'{path} names {name!r}, which is no file beside it')
    return shards


def _read_shards(index: Path, trust: bool) -> dict[str, Any]:
    """Read the files that an index names, each for the tensors that it says are in it."""
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
                f'{index} says that {name} holds {listed(absent)}, which it does not; fetch the folder anew'
            )
        tensors.update((key, held[key]) for key in keys)
    return tensors


def write_file(path: Path, checkpoint: Mapping[str, Any], force: bool = False, add_hash: bool = False) -> Path:
    """Write a checkpoint; the file appears complete or not at all.

    Args:
        path: where to; with the ending .safetensors, ``checkpoint`` must be a flat dict of tensors.
        checkpoint: what to write.
        force: replace a file that is there.
        add_hash: insert the first 8 digits of the file's SHA-256 into its name, which loading then verifies.

    Returns:
        The path of the file.

    Raises:
        FileExistsError: there is a file already, and ``force`` is not set.
        FileNotFoundError: there is no such folder.
    """
    check_destination(path, force)
    with written_whole(path) as unfinished:
        if path.suffix == '.safetensors':
            _safetensors().save_file(checkpoint, unfinished.path)
        else:
            with unfinished.path.open('wb') as file:  # by its path, torch would write the temporary name into it
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
            'Only if you know who made the file, convert it with swin-dense convert --trust and load the result',
            ', or load it with load_checkpoint(..., trust=True), in a config with trust=True in init_cfg',
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
        raise ImportError('files that end in .safetensors need the package: pip install safetensors') from error
    return safetensors.torch


def _why_unreadable(path: Path, error: Exception) -> str:
    if os.getenv('TORCH_FORCE_WEIGHTS_ONLY_LOAD', '0') != '0' and 'pickle_module' in str(error):
        return (
            f'{path} cannot be read while TORCH_FORCE_WEIGHTS_ONLY_LOAD is set; unset it: what reads files here runs '
            'nothing that they contain either'
        )
    with path.open('rb') as file:
        start = file.read(64)
    if not start:
        return f'{path} is empty'
    if start.startswith(b'version https://git-lfs'):
        return f'{path} is only a pointer of Git LFS; run "git lfs pull" to get the file itself'
    if start.lstrip()[:1] == b'<':
        return f'{path} is a web page, not a checkpoint; the download went wrong'
    damage = f'{path} ({path.stat().st_size} bytes) is not a checkpoint, or is damaged or cut short'
    first_line = str(error).strip().partition('\n')[0]
    return f'{damage}: {first_line or type(error).__name__}'


def check_hash(path: Path, name: str) -> None:
    """Refuse a file if the hash in its name is not its own.

    Args:
        path: the file.
        name: what it is, or will be, called.
    """
    suffix = _HASH_SUFFIX.search(Path(name).stem)
    if suffix is None:
        return
    actual = digest_of(path)
    if not actual.startswith(suffix[1]):
        raise CheckpointError(
            f'the name of {name} says that its SHA-256 begins with {suffix[1]}, but it begins with {actual[:8]}: '
            'the file is damaged, or another one. Fetch it again, or rename it if you trust it'
        )


def digest_of(path: Path, algorithm: str = 'sha256') -> str:
    """Return the hexadecimal digest of a file."""
    digest = hashlib.new(algorithm)
    with path.open('rb') as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
