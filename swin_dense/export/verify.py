"""Write a file under a temporary name, and compare it with its model before it gets its final name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from swin_dense.export.formats import ExportError, outputs_of
from swin_dense.utils.atomic import atomic_path

_logger = logging.getLogger(__package__)
# Maps the inputs of a file by name to its outputs in their order.
Run = Callable[[dict[str, np.ndarray]], list[np.ndarray]]


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    path: Path
    nodes: int  # in the graph of the file
    # By image shape (B, C, H, W): of a backbone the largest relative error of any output, of a whole model the share of
    # predictions that differ. Empty with ``check=False``.
    errors: dict[tuple[int, ...], float]


@dataclass(frozen=True)
class Comparison:
    """How a file is compared with its model."""

    shapes: Sequence[tuple[int, ...]]  # (B, C, H, W) of the images
    # Returns the error of a file for an image of a shape, and the number of outputs or predictions compared.
    error: Callable[[Run, tuple[int, ...]], tuple[float, int]]
    limit: float  # largest error allowed
    message: str  # describes a larger ``error``, with ``limit``, as a format string
    if_nothing: str = 'the model has no outputs'  # message if nothing was compared for any shape
    device: torch.device | str = 'cpu'  # of the model, for files of torch


def write_verified(path: Path, write: Callable[[Path], int], comparison: Comparison | None, hint: str = '') -> Exported:
    """Write a file, and compare it with its model if ``comparison`` is given.

    ``write`` traces the model, writes the file to a path and returns the number of nodes; ``hint`` is advice if
    that fails.

    Raises:
        ExportError: the model cannot be traced or converted, or the file does not run or differs from the model. The
            new file is removed; an existing file stays.
    """
    # Exporters and torch's functions that load files create tensors on the default device, which may be another.
    with atomic_path(path) as unfinished, torch.no_grad(), torch.device('cpu'):
        _logger.info('tracing the model for %s ...', path.name)
        try:
            nodes = write(unfinished)
        except ExportError:
            raise
        except RuntimeError as error:  # the base class of all errors of torch.export and torch.jit
            raise ExportError(f'the model could not be exported{hint}: {error}') from error
        return Exported(path, nodes, _errors(unfinished, comparison) if comparison else {})


def _errors(path: Path, comparison: Comparison) -> dict[tuple[int, ...], float]:
    errors: dict[tuple[int, ...], float] = {}
    run: Run | None = None
    compared = 0
    for shape in comparison.shapes:
        _logger.info('comparing the file with the model on an image of %s ...', 'x'.join(map(str, shape)))
        try:
            run = run or load(path, comparison.device)
            errors[shape], count = comparison.error(run, shape)
        except Exception as error:  # each runtime has its own exception types
            raise ExportError(
                f'the file does not run on an image {shape}, so it was removed: {type(error).__name__}: {error}'
            ) from error
        if not errors[shape] <= comparison.limit:
            message = comparison.message.format(error=errors[shape], limit=comparison.limit)
            raise ExportError(f'the file is wrong on an image {shape}, so it was removed: {message}')
        compared += count
    if not compared:
        raise ExportError(f'the file could not be compared, so it was removed: {comparison.if_nothing}')
    return errors


def load(path: Path, device: torch.device | str = 'cpu') -> Run:
    """Return a function that runs a file: ``.onnx`` in ONNX Runtime on the CPU, others in torch on a device."""
    if path.suffix == '.onnx':
        import onnxruntime  # an optional package

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # hides warnings about optional inputs
        session = onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
        return partial(session.run, None)
    module: Any = torch.jit.load(path) if path.suffix == '.ts' else torch.export.load(path).module()

    def run(feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        with torch.no_grad():
            outputs = module(*(torch.from_numpy(value).to(device) for value in feed.values()))
        return [out.cpu().numpy() for out in outputs_of(outputs)]

    return run
