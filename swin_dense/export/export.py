"""Export a backbone, or a module around a backbone, to a file."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swin_dense.export import formats
from swin_dense.export.pooling import replace_adaptive_pools
from swin_dense.export.verify import Comparison, Exported, Run, write_verified
from swin_dense.images.normalization import Normalization, resolve_normalization
from swin_dense.images.reading import per_channel
from swin_dense.models.swin import SwinBackbone
from swin_dense.utils import checks, packages, private

# Maximum difference from the model's float32 output, relative to the largest value of that output.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2}


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
    normalization: Normalization | str | None = None,
) -> Exported:
    """Export a model to ``.onnx``, ``.pt2`` (torch.export) or ``.ts`` (TorchScript).

    A copy of the model is exported in evaluation mode, on its current device. The model itself does not change.

    Args:
        model: a backbone, or a module around it, that takes an image (B, C, H, W) and returns tensors. Of a model
            that ``torch.compile`` returned, the model before the compilation is exported.
        path: the destination. The suffix selects the format; an existing file is overwritten.
        dynamic: whether the file accepts any batch size, height and width. If False, it accepts only images of
            ``size``, and all index tables and masks are constants.
        size: (height, width) of the image in pixels, or the side of a square. With ``dynamic``, only the example
            input for tracing.
        batch: the batch size; None accepts any. Ignored with ``dynamic``, which always accepts any.
        opset: version of ONNX, at least 18; None is 20.
        half: write the file in float16.
        check: compare the file with the model. Dynamic dimensions are checked at three sizes or batch sizes other than
            those of the trace.
        normalization: a :class:`swin_dense.features.Normalization`, or a name for :func:`swin_dense.features.preset`,
            with which the file takes float images of stored values, and normalises them itself. ``scale=None`` is 255
            then, the largest value of 8 bits, as a file does not see the type of stored values; with ``bands``, images
            have the bands 0 to the largest of these. None is a file that takes normalised images.

    Returns:
        The file and its relative errors.

    Raises:
        ValueError: an argument has an invalid value, or the model contains no backbone.
        TypeError: an argument or the model's output has the wrong type.
        ImportError: a package is missing; the message names it.
        ExportError: the model branches on the size, or the file's outputs differ from the model's. The new file is
            removed; an existing file stays.

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
    model = private.compiled_module(model, model)
    backbone = _backbone_in(model, checks.boolean('dynamic', dynamic))
    if checks.boolean('check', check) and path.suffix == '.onnx':
        packages.require('the check of an .onnx file', 'onnxruntime')

    channels = backbone.in_channels
    model = copy.deepcopy(model).eval().requires_grad_(False)
    if normalization is not None:
        how = resolve_normalization(normalization)
        if half and how.scale is not None:
            raise ValueError('scale divides counts, which float16 cannot represent; write float32')
        model = Normalized(model, how, backbone)
        channels = channels if how.bands is None else max(how.bands) + 1
    recorded = copy.deepcopy(model)
    replace_adaptive_pools(recorded)
    if checks.boolean('half', half):
        recorded.half()
    free: dict[int, str] = {}
    if dynamic or batch is None:
        free[0] = 'batch'
        batch = 2  # torch.export treats a size of 1 as a constant
    if dynamic:
        free.update({2: 'height', 3: 'width'})
    weight = next(backbone.parameters())
    dtype = torch.float16 if half else torch.float32
    img = torch.zeros((batch, channels, height, width), device=weight.device, dtype=dtype)
    interface = formats.Interface((img,), (free,))
    comparison = Comparison(
        _shapes_to_check(img.shape, free),
        partial(_error, model, img.dtype),
        TOLERANCES[img.dtype],
        "its outputs are off by {error:.1e} of the model's largest value, at most {limit:.0e} is allowed",
        device=weight.device,
    )
    write = partial(formats.FORMATS[path.suffix], recorded, interface, opset)
    hint = '; if it branches on sizes, dynamic=False may work' if dynamic else ''
    return write_verified(path, write, comparison if check else None, hint)


class Normalized(nn.Module):
    """A model that normalises its images (B, bands, H, W) of stored values itself."""

    scale: Tensor
    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, normalization: Normalization, backbone: SwinBackbone) -> None:
        super().__init__()
        normalization.check_for(backbone.in_channels, backbone.input_preset)
        self.model = model
        weight = next(model.parameters())
        for name, default in (('scale', 255.0), ('mean', 0.0), ('std', 1.0)):
            given = getattr(normalization, name)
            numbers = per_channel(name, default if given is None else given, backbone.in_channels)
            self.register_buffer(name, weight.new_tensor(numbers)[:, None, None])
        self._bands = None if normalization.bands is None else list(normalization.bands)
        self._clamp = normalization.clamp

    def forward(self, img: Tensor) -> Any:
        img = img if self._bands is None else img[:, self._bands]
        img = (img / self.scale - self.mean) / self.std
        if self._clamp:
            img = img.clamp(0, 1)
        return self.model(img)


def checked_path(path: str | PathLike[str], suffixes: Iterable[str]) -> Path:
    """Return ``path`` as a Path; raise ValueError if its suffix is not one of these, or its folder does not exist."""
    path = Path(path)
    checks.one_of('the suffix of path', path.suffix, suffixes)
    if not path.parent.is_dir():
        raise ValueError(f'there is no folder {path.parent} to write {path.name} to; create it first')
    return path


def check_opset(opset: int | None, suffix: str) -> None:
    """Raise a ValueError if the ONNX version is too old, or is given for a file of another format."""
    if opset is None:
        return
    if suffix != '.onnx':
        raise ValueError(f'opset={opset} is only for .onnx files; omit it for {suffix}')
    checks.integer('opset', opset, minimum=formats.OLDEST_OPSET)


def _backbone_in(model: nn.Module, dynamic: bool) -> SwinBackbone:
    if not isinstance(model, nn.Module):
        raise TypeError(f'model must be a torch.nn.Module, got {type(model).__name__}')
    backbone = next((module for module in model.modules() if isinstance(module, SwinBackbone)), None)
    if backbone is None:
        raise ValueError(f'the model must contain a SwinBackbone, got a {type(model).__name__} without one')
    if dynamic and backbone.clamp_window:
        raise ValueError(
            'clamp_window=True makes windows depend on the image size, which a graph for all sizes cannot express; '
            'export with dynamic=False, or build the backbone with clamp_window=False'
        )
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f'the model must be in float32, but {name} is {parameter.dtype}; call .float() first, '
                'and pass half=True for a file in float16'
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


def _error(model: nn.Module, dtype: torch.dtype, run: Run, shape: tuple[int, ...]) -> tuple[float, int]:
    """Return the largest relative error of any output of a file on noise, and the number of outputs."""
    img = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    device = next(model.parameters()).device
    expected = [out.cpu() for out in formats.outputs_of(model(img.float().to(device)))]
    outs = [torch.from_numpy(out) for out in run({'img': img.numpy()})]
    if [(out.shape, out.dtype) for out in outs] != [(out.shape, dtype) for out in expected]:
        return float('inf'), len(outs)
    pairs = zip(outs, expected, strict=True)
    errors = [(out - right).abs().max().item() / (right.abs().max().item() or 1.0) for out, right in pairs]
    # max() may ignore NaN.
    return max(errors, key=lambda error: float('inf') if error != error else error), len(outs)
