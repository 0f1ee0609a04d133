"""The backbone inside other libraries: one module per library, each imported by users alone."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from torch import Tensor, nn

from swin_dense.models.swin import SwinBackbone


def require(package: str, tested: str, install: str) -> ModuleType:
    """Import the package that an integration is made for.

    Args:
        package: its import name.
        tested: the version that the integration was tested with. Another minor version gets a warning.
        install: the argument of ``pip install`` that brings the package.

    Raises:
        ImportError: the package is missing or cannot be imported; the message says what to install.
    """
    integration = 'smp' if package == 'segmentation_models_pytorch' else package
    try:
        module = import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition('.')[0] != package:
            raise
        raise ImportError(f'swin_dense.integrations.{integration} needs {package}: pip install {install}') from error
    try:
        installed = version(package)
    except PackageNotFoundError:  # imported from a source folder
        installed = getattr(module, '__version__', 'unknown')
    if installed.split('.')[:2] != tested.split('.')[:2]:
        warnings.warn(
            f'swin_dense.integrations.{integration} was tested with {package} {tested}, here is {installed}; '
            f'if it fails, install {package} {tested}',
            stacklevel=3,
        )
    return module


def run_stages(
    backbone: SwinBackbone, img: Tensor, stages: Collection[int]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run a backbone, and also return what comes out of some of its stages, before any output norm.

    Args:
        backbone: any of ours.
        img: (B, in_channels, H, W).
        stages: numbers of the stages that are wanted.

    Returns:
        The outputs of the backbone, and one map (B, C_i, ceil(H / stride_i), ceil(W / stride_i)) per stage wanted.
    """
    found: list[Tensor] = []
    hooks = [
        stage.register_forward_hook(lambda module, args, out: found.append(out.permute(0, 3, 1, 2).contiguous()))
        for index, stage in enumerate(backbone.stages)
        if index in stages
    ]
    try:
        return backbone(img), tuple(found)
    finally:
        for hook in hooks:
            hook.remove()


def set_checkpointing(model: nn.Module, enable: bool) -> None:
    """Recompute the blocks of a model in the backward pass, or not."""
    for module in model.modules():
        if hasattr(module, 'with_cp'):
            module.with_cp = enable
