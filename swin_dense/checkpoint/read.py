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

_CHUNK = 1 << 20
INDEX = '.index.json'  # appended to the usual file name if the weights are in several shards
# Names of weight files in folders and repositories of transformers and timm, in order of preference.
USUAL_NAMES = ('model.safetensors', f'model.safetensors{INDEX}', 'pytorch_model.bin', f'pytorch_model.bin{INDEX}')
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
        trust: unpickle everything, which can execute arbitrary code.

    Raises:
        CheckpointError: the file is damaged or is no checkpoint.
        FileNotFoundError: there is no such file.
    """
    path = path.expanduser()
    if path.is_dir():
        path = _usual_file(path)
    if not path.is_file():
        raise FileNotFoundError(f'no checkpoint file at {str(path)!r}')
    if path.name.endswith(INDEX):
        return _read_shards(path, trust)
    check_suffix(path, path.name)
    try:
        checkpoint = _safetensors().load_file(path) if path.suffix == '.safetensors' else read_pickle(path, trust)
    except ImportError:
        raise
    except Exception as error:  # damaged files raise nearly anything
        raise _explained(path, error) from error
    if isinstance(checkpoint, torch.nn.Module):
        checkpoint = checkpoint.state_dict()
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f'{path} holds a {type(checkpoint).__name__}; a checkpoint is a dict of tensors')
    return checkpoint


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
            digest = file_digest(unfinished.path, 'sha256')
            unfinished.destination = path.with_name(f'{path.stem}-{digest[:8]}{path.suffix}')
            check_destination(unfinished.destination, force)
    return unfinished.destination


def file_digest(path: Path, algorithm: str) -> str:
    """Return the hexadecimal digest of a file."""
    digest = hashlib.new(algorithm)
    with path.open('rb') as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def check_suffix(path: Path, name: str) -> None:
    """Raise a CheckpointError if a file's SHA-256 does not begin with the digits in its name, current or future."""
    suffix = _HASH_SUFFIX.search(Path(name).stem)
    if suffix is not None and not (actual := file_digest(path, 'sha256')).startswith(suffix[1]):
        raise CheckpointError(
            f'by the name {name} its SHA-256 begins with {suffix[1]}, but it begins with {actual[:8]}: '
            'the file is damaged or is another file. Download it again, or rename it if you trust it'
        )


def _usual_file(folder: Path) -> Path:
    for name in USUAL_NAMES:
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(f'{folder} is a folder without a {" or ".join(USUAL_NAMES)}; give the checkpoint file in it')


def read_index(path: Path) -> dict[str, list[str]]:
    """Return the shards listed in an index of ``save_pretrained``, mapped to their tensor names.

    Raises:
        CheckpointError: the index is damaged, or lists a file that is not in its own folder.
    """
    try:
        places = json.loads(path.read_text(encoding='utf-8'))['weight_map']
        shards = {
            name: [key for key, place in places.items() if place == name] for name in sorted(set(places.values()))
        }
    except Exception as error:  # the file may have any content
        raise CheckpointError(f'{path} is not an index of save_pretrained, or is damaged: {error!r}') from error
    for name in shards:
        if not isinstance(name, str) or name != Path(name).name or name.endswith(INDEX):
            raise CheckpointError(f'{path} lists {name!r}, which is not a shard in the same folder')
    return shards


def _read_shards(index: Path, trust: bool) -> dict[str, Tensor]:
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


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError('.safetensors files need the safetensors package: pip install safetensors') from error
    return safetensors.torch


def _explained(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file that cannot be read."""
    if isinstance(error, RefusedError):
        return CheckpointError(
            f'{path} asks for {error.wanted}, which no checkpoint needs; nothing was run. '
            'Only if you trust the author of the file, convert it with swin-dense convert --trust and load the result',
            ', or load it with load_checkpoint(..., trust=True); in a config, set trust=True in init_cfg',
        )
    if os.getenv('TORCH_FORCE_WEIGHTS_ONLY_LOAD', '0') != '0' and 'pickle_module' in str(error):
        return CheckpointError(
            f'{path} cannot be read while TORCH_FORCE_WEIGHTS_ONLY_LOAD is set; unset it: swin_dense reads files '
            'without executing code from them'
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
    return CheckpointError(f'{damage}: {first_line or type(error).__name__}')
