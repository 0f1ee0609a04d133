"""Adapters of the backbone for other libraries, one module per library. Only users import these modules."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from torch import nn

from swin_dense.utils import checks, packages

STRIDES = {32: (4, 2, 2, 2), 16: (4, 2, 2, 1), 8: (4, 2, 1, 1)}


def require(package: str, tested: str) -> ModuleType:
    """Import the package of an integration, and warn if its minor version is not the ``tested`` one."""
    integration = 'smp' if package == 'segmentation_models_pytorch' else package
    module = packages.optional(f'swin_dense.integrations.{integration}', package)
    try:
        installed = version(package)
    except PackageNotFoundError:  # imported from a source folder
        installed = getattr(module, '__version__', 'unknown')
    if installed.split('.')[:2] != tested.split('.')[:2]:
        warnings.warn(
            f'swin_dense.integrations.{integration} was tested with {package} {tested}, but {installed} is installed; '
            f'if it fails, install {package} {tested}',
            stacklevel=3,
        )
    return module


def strides_of(output_stride: int) -> tuple[int, ...]:
    """Return the strides of the stages for a last map of this stride in pixels."""
    checks.one_of('output_stride', output_stride, STRIDES)
    return STRIDES[output_stride]


def set_checkpointing(model: nn.Module, enable: bool) -> None:
    """Enable or disable gradient checkpointing in all blocks of a model."""
    for module in model.modules():
        if hasattr(module, 'with_cp'):
            module.with_cp = enable
