"""Verdicts on the Triton kernels for this GPU: which kernels agree with torch, and which are faster.

A faulting kernel destroys the CUDA context, so kernels are never tried in the process of a model. ``swin-dense doctor``
checks and times them in separate processes (:mod:`swin_dense.doctor.kernels`) and writes a verdict to the user's cache.
This module reads it once per process. A verdict is valid for one GPU, driver, torch, triton and version of this
package.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from swin_dense.ops.triton import gpu
from swin_dense.ops.windows import Pair

INFERENCE, TRAINING = 'inference', 'training'
_logger = logging.getLogger('swin_dense.ops')
_HOW = 'Run `swin-dense doctor` once to check the kernels and enable those that are faster'
_DRIVER = Path('/proc/driver/nvidia/version')
_Function = TypeVar('_Function', bound=Callable[..., object])


@dataclass(frozen=True)
class Entry:
    """The result of the check of one kernel with one combination of dtypes.

    Attributes:
        error: how the kernel failed, or None if it agrees with torch.
        channels: for a norm, the numbers of channels that were checked.
        microseconds: times by mode, ``INFERENCE`` or ``TRAINING``, and then by implementation: 'triton', 'plain', and
            'sdpa' for attention; each is the sum over all timed shapes.
    """

    error: str | None
    channels: tuple[int, ...] = ()
    microseconds: dict[str, dict[str, float]] = field(default_factory=dict)

    def speed(self, mode: str) -> tuple[str, float]:
        """Return the implementation that torch would use instead, and the speedup of the kernel over it."""
        times = self.microseconds[mode]
        other = 'sdpa' if 'sdpa' in times else 'plain'
        return other, times[other] / times['triton']


@functools.cache
def attention_name(head_dim: int, window: Pair, dtype: torch.dtype, *parameter_dtypes: torch.dtype) -> str:
    """Return the name of the attention kernels in a verdict.

    Args:
        head_dim: D, channels per head.
        window: (height, width) in tokens.
        dtype: dtype of queries, keys and values.
        *parameter_dtypes: dtypes of the relative position bias and of ``pad_kv``.
    """
    return f'attention, window {window[0]}x{window[1]}, head dimension {head_dim}, {_dtypes(dtype, *parameter_dtypes)}'


@functools.cache
def norm_name(x_dtype: torch.dtype, dtype: torch.dtype, parameter_dtype: torch.dtype) -> str:
    """Return the name of the LayerNorm kernels from ``x_dtype`` to ``dtype`` in a verdict."""
    return f'LayerNorm, {_short(x_dtype)} to {_dtypes(dtype, parameter_dtype)}'


@functools.cache
def bias_name(window: Pair, dtype: torch.dtype) -> str:
    """Return the name of the kernels that expand a relative position bias in a verdict."""
    return f'relative position bias, window {window[0]}x{window[1]}, {_short(dtype)}'


def _dtypes(dtype: torch.dtype, *parameter_dtypes: torch.dtype) -> str:
    return f'{_short(dtype)} with {" and ".join(sorted(set(map(_short, parameter_dtypes))))} parameters'


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix('torch.')


def _constant(function: _Function) -> _Function:
    """Mark a function so that compiled graphs treat its result as a constant.

    Does the same as torch.compiler.assume_constant_result in torch 2.1 to 2.15, which would import the compiler; that
    takes longer than importing the rest of this package.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def reason_against_attention(
    head_dim: int,
    window: Pair,
    dtype: torch.dtype,
    bias_dtype: torch.dtype,
    pad_dtype: torch.dtype,
    device: torch.device,
    is_training: bool,
) -> str | None:
    """Return why 'auto' does not use the attention kernels, or None; see :func:`attention_name`."""
    return _reason_against(attention_name(head_dim, window, dtype, bias_dtype, pad_dtype), device, is_training)


@_constant
def reason_against_norm(
    channels: int,
    x_dtype: torch.dtype,
    dtype: torch.dtype,
    parameter_dtype: torch.dtype,
    device: torch.device,
    is_training: bool,
) -> str | None:
    """Return why 'auto' does not use the LayerNorm kernels for maps of ``channels`` channels, or None."""
    return _reason_against(norm_name(x_dtype, dtype, parameter_dtype), device, is_training, channels)


@_constant
def reason_against_bias(window: Pair, dtype: torch.dtype, device: torch.device, is_training: bool) -> str | None:
    """Return why 'auto' does not use the kernels that expand a relative position bias, or None."""
    return _reason_against(bias_name(window, dtype), device, is_training)


def _reason_against(name: str, device: torch.device, is_training: bool, channels: int | None = None) -> str | None:
    entries = of_device(device)
    if entries is None:
        return 'the kernels have not been checked on this GPU'
    if name not in entries or (channels is not None and channels not in entries[name].channels):
        return f'`swin-dense doctor` did not check {name}; attn_backend="triton" uses the kernels unchecked'
    entry = entries[name]
    if entry.error is not None:
        return f'`swin-dense doctor` found that {name} failed: {entry.error}'
    mode = TRAINING if is_training else INFERENCE
    other, times = entry.speed(mode)
    return None if times > 1 else f'`swin-dense doctor` measured that {name} is no faster than {other} in {mode}'


@functools.cache
def of_device(device: torch.device) -> dict[str, Entry] | None:
    """Return the entries of the verdict for a GPU by kernel name, or None if there is no verdict."""
    found = key(device)
    entries = read(found)
    if entries is None:
        _logger.warning(
            'no verdict on the Triton kernels for this GPU (%s): using torch instead. %s', found['gpu'], _HOW
        )
    return entries


def key(device: torch.device) -> dict[str, str]:
    """Return the key of a verdict: GPU, driver and versions for which it is valid."""
    found = torch.cuda.get_device_properties(device)
    return {
        'gpu': f'{found.name}, {found.multi_processor_count} multiprocessors, capability {found.major}.{found.minor}',
        'driver': _driver(),
        'torch': f'{torch.__version__}, CUDA {torch.version.cuda}',
        'triton': gpu.triton.__version__,
        'swin_dense': f'{sys.modules["swin_dense"].__version__}, {_digest_of_sources()}',
    }


def _driver() -> str:
    try:
        return re.findall(r'\d+\.\d+[.\d]*', _DRIVER.read_text(encoding='utf-8'))[0]
    except (OSError, IndexError):  # not Linux, or a container that hides the file
        return f'for CUDA {torch._C._cuda_getDriverVersion()}'  # type: ignore[attr-defined]


def _digest_of_sources() -> str:
    """Return a digest of the sources in ``swin_dense/ops``, which change more often than the version."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob('*.py')):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def path(key: dict[str, str]) -> Path:
    """Return the file of a verdict in the user's cache.

    Raises:
        RuntimeError: the home folder cannot be determined.
    """
    cache = os.environ.get('XDG_CACHE_HOME')
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    return (Path(cache) if cache else Path.home() / '.cache') / 'swin_dense' / 'kernels' / f'{digest}.json'


def read(key: dict[str, str]) -> dict[str, Entry] | None:
    """Return the entries of the verdict for ``key``, or None if there is no readable verdict."""
    try:
        content = json.loads(path(key).read_text(encoding='utf-8'))
        return _entries(content['kernels']) if content['key'] == key else None
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _entries(content: dict[str, Any]) -> dict[str, Entry]:
    entries = {name: Entry(**fields) for name, fields in content.items()}
    for entry in entries.values():
        if entry.error is None:
            for mode in (INFERENCE, TRAINING):
                entry.speed(mode)
    return entries
