"""Export a model to a file that is right at every size, or not at all."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from swin_dense.export import formats, running
from swin_dense.export.pooling import replace_adaptive_pools
from swin_dense.models.swin import SwinBackbone
from swin_dense.utils import checks
from swin_dense.utils.atomic import written_whole

# How far an output may be from the model's in float32, as a fraction of the output's largest value.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2}


class ExportError(RuntimeError):
    """The model cannot be recorded, or the file that came of it is not the model."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: the file.
        nodes: of its graph.
        errors: the largest relative error of any output, by the shape (B, C, H, W) of the image; empty where nothing
            was checked.
    """

    path: Path
    nodes: int
    errors: dict[tuple[int, ...], float]


def export_model(
    model: nn.Module,
    path: str | PathLike[str],
    *,
    dynamic: bool = True,
    size: int | tuple[int, int] = (224, 224),
    batch: int | None = 1,
    opset: int | None = None,
    half: bool = False,
    check: bool = True,
) -> Exported:
    """Write a model to a file for other runtimes: ``.onnx``, ``.pt2`` (torch.export) or ``.ts`` (TorchScript).

    The model is exported as it is in evaluation mode, from the device that it is on, and stays as it is.

    Args:
        model: a backbone, or a module around one that takes an image (B, C, H, W) and returns tensors.
        path: the file, whose suffix decides what is written. A file of that name is replaced.
        dynamic: whether the file takes any batch, height and width. Otherwise it takes images of ``size`` alone, and
            all tables and masks are constants in it.
        size: (height, width) of the image in pixels, or the side of a square. With ``dynamic`` only an example.
        batch: images at once; None leaves it free. With ``dynamic`` it is always free.
        opset: of ONNX, from 18 on; None is 20.
        half: write the file in float16.
        check: compare the file with the model, where it is free at three sizes or batches that it was not recorded at.

    Returns:
        What was written, and how far it is from the model.

    Raises:
        ValueError: an argument has a value that is not allowed, or there is no backbone in the model.
        TypeError: an argument or the model's output has the wrong type.
        ImportError: a package is missing; the message names it.
        ExportError: the model branches on the size, or the file's numbers are not the model's. Nothing is left behind.

    Examples:
        >>> from swin_dense import SwinBackbone
        >>> exported = export_model(SwinBackbone('t'), 'swin_t.ts', size=64)
        >>> exported.path.name
        'swin_t.ts'
    """
    path = checked_path(path, formats.FORMATS)
    height, width = checks.pair('size', size)
    if batch is not None:
        checks.integer('batch', batch)
    check_opset(opset, path.suffix)
    backbone = _backbone_in(model, checks.boolean('dynamic', dynamic))
    if checks.boolean('check', check) and path.suffix == '.onnx':
        formats.require('onnxruntime')

    model = copy.deepcopy(model).eval().requires_grad_(False)
    recorded = copy.deepcopy(model)
    replace_adaptive_pools(recorded)
    if checks.boolean('half', half):
        recorded.half()
    free = {0: 'batch', 2: 'height', 3: 'width'} if dynamic else {0: 'batch'} if batch is None else {}
    weight = next(backbone.parameters())
    # A batch of 1 would be taken for a constant.
    shape = (2 if free else batch or 1, backbone.in_channels, height, width)
    img = torch.zeros(shape, device=weight.device, dtype=torch.float16 if half else torch.float32)
    with written_whole(path) as unfinished, torch.no_grad():
        try:
            nodes = formats.FORMATS[path.suffix](recorded, img, free, opset, unfinished.path)
        except RuntimeError as error:  # all that recorders raise
            hint = '; if it branches on sizes, dynamic=False may serve' if dynamic else ''
            raise ExportError(f'{type(model).__name__} could not be exported{hint}: {error}') from error
        errors = _compare(model, unfinished.path, _shapes_to_check(img.shape, free), img.dtype) if check else {}
    return Exported(path, nodes, errors)


def checked_path(path: str | PathLike[str], suffixes: Iterable[str]) -> Path:
    """Return the path of a file that is to be written, or raise ValueError for another suffix or a missing folder."""
    path = Path(path)
    checks.one_of('the suffix of path', path.suffix, suffixes)
    if not path.parent.is_dir():
        raise ValueError(f'there is no folder {path.parent} to write {path.name} to; make it first')
    return path


def check_opset(opset: int | None, suffix: str) -> None:
    """Refuse a version of ONNX that graphs cannot be written in, or one for a file of another kind."""
    if opset is None:
        return
    if suffix != '.onnx':
        raise ValueError(f'opset={opset} belongs to .onnx files; leave it out for {suffix}')
    checks.integer('opset', opset, minimum=formats.OLDEST_OPSET)


def _backbone_in(model: nn.Module, dynamic: bool) -> SwinBackbone:
    if not isinstance(model, nn.Module):
        raise TypeError(f'model must be a torch.nn.Module, got {type(model).__name__}')
    backbone = next((module for module in model.modules() if isinstance(module, SwinBackbone)), None)
    if backbone is None:
        raise ValueError(f'there is no SwinBackbone in the model, a {type(model).__name__}')
    if dynamic and backbone.clamp_window:
        raise ValueError(
            'with clamp_window=True a map chooses its windows, which a graph for all sizes cannot do; '
            'export with dynamic=False, or build the backbone with clamp_window=False'
        )
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f'the model must be in float32, {name} is in {parameter.dtype}; call .float() before, '
                'and give half=True for a file in float16'
            )
    return backbone


def _shapes_to_check(shape: torch.Size, free: dict[int, str]) -> list[tuple[int, ...]]:
    batch, channels, height, width = shape
    if len(free) == 3:
        return [
            (1, channels, height + 5, width // 2 + 3),
            (3, channels, height // 3 + 1, width + 1),
            (2, channels, width + 2, height),
        ]
    return [(images, channels, height, width) for images in ((1, 2, 3) if free else (batch,))]


def _compare(
    model: nn.Module, path: Path, shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> dict[tuple[int, ...], float]:
    run = running.load(path)
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    errors = {}
    for shape in shapes:
        img = torch.randn(shape, generator=generator).to(device, dtype)
        expected = formats.outputs_of(model(img.float()))
        try:
            outs = run(img)
        except Exception as error:  # runtimes have errors of their own
            raise ExportError(f'the file does not run on an image {shape}, so it was removed: {error}') from error
        errors[shape] = _relative_error(outs, expected, dtype)
        if not errors[shape] <= TOLERANCES[dtype]:
            raise ExportError(
                f'the file is wrong on an image {shape}, so it was removed: its outputs are off by '
                f"{errors[shape]:.1e} of the model's largest value, {TOLERANCES[dtype]:.0e} is allowed"
            )
    return errors


def _relative_error(outs: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> float:
    if [(out.shape, out.dtype) for out in outs] != [(out.shape, dtype) for out in expected]:
        return float('inf')
    pairs = zip(outs, expected, strict=True)
    errors = [(out.cpu() - right.cpu()).abs().max().item() / (right.abs().max().item() or 1.0) for out, right in pairs]
    return max(errors, key=lambda error: float('inf') if error != error else error)  # max alone may lose a NaN
