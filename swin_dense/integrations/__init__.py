"""Adapters of the backbone for other libraries, one module per library. Only users import these modules."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from torch import Tensor, nn

from swin_dense.models.swin import SwinBackbone
from swin_dense.utils import packages


def require(package: str, tested: str) -> ModuleType:
    """Import the package of an integration, and warn if its version was not tested.

    Args:
        package: its import name.
        tested: the version with which the integration was tested. Another minor version gives a warning.

    Raises:
        ImportError: the package is missing (the message contains the install command) or cannot be imported.
    """
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


def run_stages(
    backbone: SwinBackbone, img: Tensor, stages: Collection[int]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run a backbone and also return the outputs of some stages before the output norms.

    Args:
        backbone: the backbone.
        img: (B, in_channels, H, W).
        stages: indices of the stages to return.

    Returns:
        The outputs of the backbone, and one map (B, C_i, ceil(H / stride_i), ceil(W / stride_i)) per entry of
        ``stages``.
    """
    found: list[Tensor] = []
    hooks = [
        stage.register_forward_hook(lambda module, args, out: found.append(out[0].permute(0, 3, 1, 2).contiguous()))
        for index, stage in enumerate(backbone.stages)
        if index in stages
    ]
    try:
        return backbone(img), tuple(found)
    finally:
        for hook in hooks:
            hook.remove()


def set_checkpointing(model: nn.Module, enable: bool) -> None:
    """Enable or disable gradient checkpointing in all blocks of a model."""
    for module in model.modules():
        if hasattr(module, 'with_cp'):
            module.with_cp = enable
