"""Build a backbone of either family from its name or from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swin_dense.checkpoint.infer import infer_options
from swin_dense.checkpoint.load import Checkpoint, find_backbone, load_found
from swin_dense.checkpoint.source import Source
from swin_dense.models.archs import Arch, split_name
from swin_dense.models.swin import SwinBackbone
from swin_dense.models.swin_v2 import SwinV2Backbone

BACKBONES: dict[str, type[SwinBackbone]] = {'swin': SwinBackbone, 'swinv2': SwinV2Backbone}
Name = str | Mapping[str, Any] | Arch


def create_backbone(
    name: Name | None = None, checkpoint: Checkpoint | None = None, **backbone_options: Any
) -> SwinBackbone:
    """Build a backbone, and load a checkpoint if one is given, ready for inference.

    Args:
        name: 'swin_t', 'swin_s', 'swin_b' or 'swin_l', the same with 'swinv2' instead of 'swin', or ``arch`` of
            :class:`SwinBackbone`. None infers the architecture from the checkpoint.
        checkpoint: anything that :func:`swin_dense.load_checkpoint` accepts.
        **backbone_options: options of :class:`SwinBackbone` or :class:`SwinV2Backbone`. Missing ones, such as the
            window size and the output stages, are inferred from the checkpoint.

    Returns:
        The backbone in evaluation mode.

    Raises:
        CheckpointError: the checkpoint cannot be read, does not determine the architecture, or does not fit.

    Examples:
        >>> backbone = create_backbone('swin_s', in_channels=4)
        >>> backbone.training, backbone.in_channels
        (False, 4)
    """
    if checkpoint is None:
        if name is None:
            raise TypeError("create_backbone needs a name, as in create_backbone('swin_t'), or a checkpoint")
        return BACKBONES[network_of(name) or 'swin'](name, **backbone_options).eval()
    found = find_backbone(checkpoint)
    network, options = options_for(found, name, backbone_options)
    backbone = BACKBONES[network](**options)
    load_found(backbone, found)
    return backbone.eval()


def network_of(name: Name | None) -> str | None:
    """Return 'swin' or 'swinv2' if the name begins with it, otherwise None."""
    return split_name(name)[0] if isinstance(name, str) else None


def options_for(found: Source, name: Name | None, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the family, 'swin' or 'swinv2', and the backbone options for a checkpoint.

    Args:
        found: the backbone of the checkpoint.
        name: name or architecture from the user, or None.
        given: options from the user, which override inferred ones.
    """
    network = network_of(name) or found.network
    options = {**given, **({} if name is None else {'arch': name})}
    return network, infer_options(found, options) if network == found.network else options
