"""Build a backbone of either family from its name or from a checkpoint."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from swin_dense.archs.arch import Arch, network_of
from swin_dense.checkpoint.find import Found
from swin_dense.checkpoint.fit import Target
from swin_dense.checkpoint.infer import infer_options
from swin_dense.checkpoint.load import Checkpoint, find_backbone, load_found
from swin_dense.models.options import Options
from swin_dense.models.swin import SwinBackbone
from swin_dense.models.swin_v2 import BACKBONES

if TYPE_CHECKING:
    from typing_extensions import Unpack

_logger = logging.getLogger(__package__)
Name = str | Mapping[str, Any] | Arch


def create_backbone(
    name: Name | None = None,
    checkpoint: Checkpoint | None = None,
    *,
    prefix: str | None = None,
    **backbone_options: Unpack[Options],
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
    found = find_backbone(checkpoint, prefix)
    network, options = options_for(found, name, backbone_options)
    backbone = BACKBONES[network](**options)
    load_found(Target.of(backbone), found)
    return backbone.eval()


def has_random_weights(backbone: SwinBackbone) -> bool:
    """Return whether the last MLP of a backbone is that of a new one: its biases are 0, which no training leaves."""
    stages: Any = backbone.stages
    biases = [parameter for parameter in stages[-1].blocks[-1].ffn.parameters() if parameter.ndim == 1]
    return bool(biases) and not any(bias.any() for bias in biases)


@functools.cache
def warn_of_random_weights() -> None:
    """Warn, once per process and only in the first of several, that features are those of random weights."""
    if os.environ.get('RANK', '0') == '0':
        _logger.warning('WARNING: the weights are untrained, and all results RANDOM; give checkpoint= trained ones')


def options_for(found: Found, name: Name | None, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the family, 'swin' or 'swinv2', and the backbone options for a checkpoint.

    Args:
        found: the backbone of the checkpoint.
        name: name or architecture from the user, or None.
        given: options from the user, which override inferred ones.
    """
    network = network_of(name) or found.network
    options = dict(given)
    if name is not None:
        options['arch'] = name
    if network == found.network:
        options = infer_options(found, options)
    return network, options
