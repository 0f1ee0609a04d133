"""Build a backbone of either family by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swin_dense.archs import Arch, split_name
from swin_dense.checkpoint import load_checkpoint
from swin_dense.model import SwinBackbone
from swin_dense.v2 import SwinV2Backbone

BACKBONES: dict[str, type[SwinBackbone]] = {'swin': SwinBackbone, 'swinv2': SwinV2Backbone}


def create_backbone(
    name: str | Mapping[str, Any] | Arch, checkpoint: Any = None, **backbone_options: Any
) -> SwinBackbone:
    """Build a backbone by name, with the weights of a checkpoint if one is given, ready for inference.

    Args:
        name: 'swin_t', 'swin_s', 'swin_b', 'swin_l', the same with 'swinv2' in place of 'swin', or an architecture as
            :class:`SwinBackbone` takes it.
        checkpoint: anything that :func:`swin_dense.load_checkpoint` takes.
        **backbone_options: options of :class:`SwinBackbone` or :class:`SwinV2Backbone`.

    Returns:
        The backbone in evaluation mode.
    """
    family = split_name(name)[0] if isinstance(name, str) else None
    backbone = BACKBONES[family or 'swin'](name, **backbone_options)
    if checkpoint is not None:
        load_checkpoint(backbone, checkpoint)
    return backbone.eval()
