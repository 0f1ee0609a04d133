"""Read checkpoint files without running anything that they contain, and write them whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swin_dense.atomic import written_whole
from swin_dense.checkpoint.report import CheckpointError


class _Inert:
    """Stands in for a class that checkpoints hold beside the weights: takes anything, does nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> _Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# What training code is known to leave in checkpoints. Its real code never runs.
_INERT_NAMES = (
    'mmengine.logging.history_buffer.HistoryBuffer',
    *(f'numpy.{core}.multiarray.{name}' for core in ('core', '_core') for name in ('scalar', '_reconstruct')),
    *(f'numpy.dtypes.{name}DType' for name in ('Float16', 'Float32', 'Float64', 'Int32', 'Int64', 'Bool', 'UInt8')),
    'numpy.ndarray',
    'numpy.dtype',
    'argparse.Namespace',
    'pathlib.PosixPath',
    'pathlib.WindowsPath',
    'datetime.datetime',
    'builtins.getattr',  # by which a HistoryBuffer names its methods; the stand-in gets nothing
)
_DICT_NAMES = (
    'yacs.config.CfgNode',
    'addict.addict.Dict',
    'mmengine.config.config.ConfigDict',
    'mmcv.utils.config.ConfigDict',
)
_HASH_SUFFIX = re.compile(r'-([0-9a-f]{8,64})$')
_DATE = re.compile(r'(19|20)\d\d(0[1-9]|1[0-2])(0[1-9]|[12]\d|3[01])')


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    """Make torch's unpickler take stand-ins for the names above, and what the user allows for others."""
    before = torch.serialization.get_safe_globals()
    names = {*_INERT_NAMES, *_DICT_NAMES}
    others = [entry for entry in before if _name_of(entry) not in names]
    inert = [(type(name, (_Inert,), {}), name) for name in _INERT_NAMES]  # torch looks names up by class
    torch.serialization.clear_safe_globals()
    try:
        torch.serialization.add_safe_globals([*others, *inert, *((OrderedDict, name) for name in _DICT_NAMES)])
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _name_of(entry: Any) -> str:
    return entry[1] if isinstance(entry, tuple) else f'{entry.__module__}.{entry.__qualname__}'


def read_file(path: Path, trust: bool = False) -> Mapping[Any, Any]:
    """Read a checkpoint from a file of safetensors, if it is called so, or of ``torch.save``.

    Args:
        path: the file. If its name ends in ``-`` and 8 or more hexadecimal digits, as in ``swin-1cdeb081.pth``, these
            must be the first of its SHA-256.
        trust: unpickle classes that are not known to be harmless, which can run any code.

    Raises:
        CheckpointError: the file is not a checkpoint, is damaged, or holds classes that are not trusted.
        FileNotFoundError: there is no such file.
    """
    path = path.expanduser()
    if path.is_dir():
        raise CheckpointError(f'{path} is a folder; give the checkpoint file in it')
    if not path.is_file():
        raise FileNotFoundError(f'no checkpoint file at {str(path)!r}')
    _check_hash(path)
    checkpoint = _read_safetensors(path) if path.suffix == '.safetensors' else _read_pickle(path, trust)
    if isinstance(checkpoint, torch.nn.Module):
        checkpoint = checkpoint.state_dict()
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f'{path} holds a {type(checkpoint).__name__}; a checkpoint is a dict of tensors')
    return checkpoint


def check_destination(path: Path, force: bool) -> None:
    """Refuse to write where :func:`write_file` would."""
    if path.exists() and not force:
        raise FileExistsError(f'{path} exists already; pass force=True (--force) to replace it')
    if not path.parent.is_dir():
        raise FileNotFoundError(f'there is no folder {path.parent}; make it first')


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
            torch.save(checkpoint, unfinished.path)
        if add_hash:
            unfinished.destination = path.with_name(f'{path.stem}-{_sha256(unfinished.path)[:8]}{path.suffix}')
            check_destination(unfinished.destination, force)
    return unfinished.destination


def _read_pickle(path: Path, trust: bool) -> Any:
    try:
        if trust:
            return torch.load(path, map_location='cpu', weights_only=False)
        with _stand_ins():
            return torch.load(path, map_location='cpu', weights_only=True)
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
    refused = re.search(r'GLOBAL ([\w.]+)|call reduce for unrecognized function (\S+)', str(error))
    if refused and isinstance(error, pickle.UnpicklingError):
        return (
            f'{path} asks for {refused[1] or refused[2]}, which weights do not need and which could run any code; '
            'nothing was run. Only if you know who made the file, load it with load_checkpoint(..., trust=True), or '
            'convert it with tools/convert_checkpoint.py --trust and load the result'
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
    # Of pickles PyTorch says at this point that it might well load without its safety check, which helps nobody.
    if isinstance(error, pickle.UnpicklingError):
        return damage
    first_line = str(error).strip().partition('\n')[0]
    return f'{damage}: {first_line or type(error).__name__}'


def _check_hash(path: Path) -> None:
    suffix = _HASH_SUFFIX.search(path.stem)
    if suffix is None or _DATE.fullmatch(suffix[1]):
        return
    actual = _sha256(path)
    if not actual.startswith(suffix[1]):
        raise CheckpointError(
            f'the name of {path} says that its SHA-256 begins with {suffix[1]}, but it begins with {actual[:8]}: '
            'the file is damaged, or another one. Fetch it again, or rename it if you trust it'
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open('rb') as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
