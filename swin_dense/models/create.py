"""Build a backbone of either family from its name or from a checkpoint."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from swin_dense.archs import Arch, published_letter, split_name
from swin_dense.archs.shapes import options_of
from swin_dense.checkpoint import CheckpointError
from swin_dense.checkpoint.adapters import adapter_options
from swin_dense.checkpoint.find import Found
from swin_dense.checkpoint.fit import Target
from swin_dense.checkpoint.load import Checkpoint, find_backbone, load_found
from swin_dense.models.options import Options
from swin_dense.models.swin import SwinBackbone
from swin_dense.models.swin_v2 import SwinV2Backbone
from swin_dense.utils import checks

if TYPE_CHECKING:
    from typing_extensions import Unpack

_logger = logging.getLogger(__package__)
BACKBONES: dict[str, type[SwinBackbone]] = {'swin': SwinBackbone, 'swinv2': SwinV2Backbone}
Name = str | Mapping[str, Any] | Arch
_FIRST_TABLE = 'stages.0.blocks.0.attn.w_msa.relative_position_bias_table'
_FIRST_SCALE = 'stages.0.blocks.0.attn.w_msa.logit_scale'
_KEPT = ('in_channels', 'patch_size', 'mlp_ratio', 'qkv_bias', 'use_rel_pos_bias', 'patch_norm', 'use_abs_pos_embed')


def create_backbone(
    name: Name | None = None,
    checkpoint: Checkpoint | None = None,
    *,
    adapter_checkpoint: Checkpoint | None = None,
    prefix: str | None = None,
    **backbone_options: Unpack[Options],
) -> SwinBackbone:
    """Build a backbone, and load a checkpoint if one is given, ready for inference.

    Args:
        name: 'swin_t', 'swin_s', 'swin_b' or 'swin_l', the same with 'swinv2' instead of 'swin', or ``arch`` of
            :class:`SwinBackbone`. None infers the architecture from the checkpoint.
        checkpoint: anything that :func:`swin_dense.load_checkpoint` accepts.
        adapter_checkpoint: the file of an adapter that was trained from ``checkpoint``, see
            :func:`swin_dense.save_adapter`; its kind and size, and the output stages, are inferred from it.
        prefix: which backbone of the checkpoint, if it contains several; see :func:`swin_dense.load_checkpoint`.
        **backbone_options: options of :class:`SwinBackbone` or :class:`SwinV2Backbone`. Missing ones, such as the
            window size and the output stages, are inferred from the checkpoint.

    Returns:
        The backbone in evaluation mode.

    Raises:
        CheckpointError: a checkpoint cannot be read, does not determine the architecture, or does not fit, or the
            adapter was trained from another checkpoint.

    Examples:
        >>> backbone = create_backbone('swin_s', in_channels=4)
        >>> backbone.training, backbone.in_channels
        (False, 4)
    """
    if checkpoint is None:
        if name is None:
            raise TypeError("create_backbone needs a name, as in create_backbone('swin_t'), or a checkpoint")
        if adapter_checkpoint is not None:
            given = checks.argument('adapter_checkpoint', adapter_checkpoint)
            raise TypeError(f'{given} is an adapter alone; give the checkpoint that it was trained from too')
        if prefix is not None:
            given = checks.argument('prefix', prefix)
            raise TypeError(f'{given} chooses a backbone in a checkpoint; give the checkpoint too')
        network = network_of(name) or 'swin'
        random_backbone = BACKBONES[network](name, **cast('dict[str, Any]', backbone_options))
        random_backbone.eval()
        random_backbone.has_random_weights = True
        return random_backbone
    found = find_backbone(checkpoint, prefix)
    adapter, inferred = find_adapter(adapter_checkpoint)
    network, options = options_for(found, name, {**inferred, **backbone_options})
    backbone = BACKBONES[network](**options)
    load_found(Target.of(backbone), found)
    if adapter is not None:
        load_found(Target.of(backbone), adapter)
    return backbone.eval()


def find_adapter(checkpoint: Checkpoint | None) -> tuple[Found | None, dict[str, Any]]:
    """Return an adapter, and the options of a backbone that its file tells: the adapter, and the output stages.

    Without a checkpoint, there is no adapter and no option.

    Raises:
        CheckpointError: the checkpoint cannot be read, or is not an adapter alone.
    """
    if checkpoint is None:
        return None, {}
    found = find_backbone(checkpoint)
    if found.base is None:
        raise CheckpointError(
            f'{found.described} is not an adapter alone; give it as {checks.argument("checkpoint", ...)}, or write its '
            'adapter with swin-dense convert --to adapter'
        )
    options: dict[str, Any] = {'adapter': adapter_options(found.shapes)}
    if found.outputs:
        options['out_indices'] = found.outputs
    return found, options


@functools.cache
def warn_of_random_weights() -> None:
    """Warn, once per process and only in the first of several, that features are those of random weights."""
    if os.environ.get('RANK', '0') == '0':
        given = checks.argument('checkpoint')
        _logger.warning('WARNING: no %s was given, so the weights and all results are RANDOM', given)


def network_of(name: Name | None) -> str | None:
    """Return 'swin' or 'swinv2' if the name begins with it, otherwise None."""
    return split_name(name)[0] if isinstance(name, str) else None


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


def infer_options(found: Found, given: Mapping[str, Any], any_heads: bool = False) -> dict[str, Any]:
    """Return options of a SwinBackbone or SwinV2Backbone that fits the weights without resizing.

    Args:
        found: the backbone of a checkpoint.
        given: options from the user, which take precedence over those of the checkpoint.
        any_heads: use one head per stage if the number cannot be inferred.

    Returns:
        ``given``, ``arch`` (a letter or a dict), the options that parameter shapes determine, and, if the weights
        depend on them and determine them, ``window_size``, ``pretrained_window_size`` (V2) and ``pretrain_img_size``.
        A window that is not square can be inferred from buffers only.

    Raises:
        CheckpointError: a required option can neither be inferred nor is it given.
    """
    if found.base is not None:
        raise CheckpointError(
            f'{found.described} is an adapter without its base; give the checkpoint that it was trained from, and this '
            f'file as {checks.argument("adapter_checkpoint", ...)}'
        )
    options = options_of(found.shapes)
    missing = [key for key in ('embed_dims', 'depths') if key not in options]
    if missing:
        reasons = ''.join(f'; {name} is {why}' for name, why in list(found.unusable.items())[:1])
        raise CheckpointError(
            f'{found.described}: cannot infer {" and ".join(missing)}, because parameters are missing or '
            f'disagree{reasons}'
        )
    inferred = {key: options[key] for key in _KEPT if key in options}
    if (adapter := adapter_options(found.shapes)) is not None:
        inferred['adapter'] = adapter
    inferred['arch'] = published_letter(options)
    stages = len(options['depths'])
    if inferred['arch'] is None:
        if 'num_heads' not in options and not any_heads and given.keys().isdisjoint(('arch', 'num_heads')):
            raise CheckpointError(f'{found.described}: cannot infer the number of heads; give the architecture')
        inferred['arch'] = {
            'embed_dims': options['embed_dims'],
            'depths': options['depths'],
            'num_heads': options.get('num_heads', (1,) * stages),
        }
    if set(found.outputs) - {stages - 1}:  # a norm of the last stage only is that of a classifier
        inferred['out_indices'] = found.outputs
    window = found.size_of(_FIRST_TABLE) or found.size_of(_FIRST_SCALE)
    if window is not None:
        inferred['window_size'] = window
    if found.trained_windows:
        trained = [found.trained_windows.get(stage, (0, 0)) for stage in range(stages)]
        inferred['pretrained_window_size'] = tuple(max(sides) for sides in trained)
    elif found.version == 2 and 'pretrained_window_size' not in given:
        raise CheckpointError(
            f'{found.described} is a Swin V2 that does not record the windows it was trained with, which other windows '
            'need; give pretrained_window_size (--source-window-size of swin-dense convert), one side or one per stage'
        )
    position = found.parameters.get('absolute_pos_embed')
    if position is not None and position.ndim == 3 and 'pretrain_img_size' not in given and 'patch_size' in options:
        grid = found.size_of('absolute_pos_embed')
        if grid is None:
            raise CheckpointError(
                f'{found.described}: cannot infer the height and width of its {position.shape[1]} absolute positions; '
                'give pretrain_img_size=(height, width) in pixels'
            )
        inferred['pretrain_img_size'] = tuple(side * options['patch_size'] for side in grid)
    return {**inferred, **given}
