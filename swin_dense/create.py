"""Build a backbone of either family from its name or from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from swin_dense.archs.arch import Arch, network_of
from swin_dense.checkpoint.compare import Target
from swin_dense.checkpoint.convert import convert
from swin_dense.checkpoint.infer import infer_options
from swin_dense.checkpoint.load import load_weights
from swin_dense.checkpoint.read import Checkpoint, read_checkpoint
from swin_dense.models.options import BackboneOptions
from swin_dense.models.swin import SwinBackbone
from swin_dense.models.swin_v2 import BACKBONES

if TYPE_CHECKING:
    from typing_extensions import Unpack

Name = str | Mapping[str, Any] | Arch


def create_backbone(
    name: Name | None = None,
    checkpoint: Checkpoint | None = None,
    *,
    prefix: str | None = None,
    **backbone_options: Unpack[BackboneOptions],
) -> SwinBackbone:
    """Build a backbone, and load a checkpoint if one is given, ready for inference.

    Args:
        name: 'swin_t', 'swin_s', 'swin_b' or 'swin_l', the same with 'swinv2' instead of 'swin', or ``arch`` of
            :class:`SwinBackbone`. None infers the architecture from the checkpoint.
        checkpoint: anything that :func:`swin_dense.load_checkpoint` accepts.
        prefix: which backbone of the checkpoint, if it contains several; see :func:`swin_dense.load_checkpoint`.
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
        if prefix is not None:
            raise TypeError(f'prefix={prefix!r} chooses a backbone in a checkpoint; give the checkpoint too')
        network = network_of(name) or 'swin'
        return BACKBONES[network](name, **cast('dict[str, Any]', backbone_options)).eval()
    content, described = read_checkpoint(checkpoint)
    weights = convert(content, described, prefix)
    network, options = weights.family.network, dict(backbone_options)
    if name is not None:
        network = network_of(name) or network
        options['arch'] = name
    if network == weights.family.network:
        options = infer_options(weights, options)
    backbone = BACKBONES[network](**cast('dict[str, Any]', options))
    load_weights(weights, Target.of(backbone))
    return backbone.eval()
