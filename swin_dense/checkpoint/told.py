"""What a checkpoint tells about the backbone that it was made with, so that nobody has to say it again."""

from __future__ import annotations

from typing import Any

from swin_dense.archs import published_letter
from swin_dense.checkpoint.misfit import options_of
from swin_dense.checkpoint.report import CheckpointError
from swin_dense.checkpoint.resize import square_window
from swin_dense.checkpoint.source import Source

_FIRST_TABLE = 'layers.0.blocks.0.attn.relative_position_bias_table'
_FIRST_SCALE = 'layers.0.blocks.0.attn.logit_scale'
_KEPT = ('in_channels', 'patch_size', 'mlp_ratio', 'qkv_bias', 'use_rel_pos_bias', 'patch_norm', 'use_abs_pos_embed')


def told_options(found: Source, any_heads: bool = False) -> dict[str, Any]:
    """Return the options of a SwinBackbone, or a SwinV2Backbone, that the weights fit as they are.

    Args:
        found: the backbone of a checkpoint.
        any_heads: say one head per stage where nothing tells the number, for those to whom it makes no difference.

    Returns:
        ``arch``, a letter or a dict; what parameters show; and ``window_size``, ``pretrained_window_size`` of V2 and
        ``pretrain_img_size`` where the weights depend on them and tell. A window that is not square is told by buffers
        alone.

    Raises:
        CheckpointError: the architecture cannot be read off.
    """
    options = options_of({name: tuple(tensor.shape) for name, tensor in found.parameters.items()})
    missing = [key for key in ('embed_dims', 'depths') if key not in options]
    if missing:
        raise CheckpointError(f'{found.described}: parameters that tell {" and ".join(missing)} are missing')
    told = {key: options[key] for key in _KEPT if key in options}
    told['arch'] = published_letter(options)
    if told['arch'] is None:
        if 'num_heads' not in options and not any_heads:
            raise CheckpointError(f'{found.described} does not tell its number of heads; give the architecture')
        told['arch'] = {
            'embed_dims': options['embed_dims'],
            'depths': options['depths'],
            'num_heads': options.get('num_heads', (1,) * len(options['depths'])),
        }
    table = found.parameters.get(_FIRST_TABLE)
    window = (
        found.windows.get(_FIRST_TABLE)
        or found.windows.get(_FIRST_SCALE)
        or (square_window(len(table)) if table is not None else None)
    )
    if found.trained_windows:
        trained = [found.trained_windows.get(stage, (0, 0)) for stage in range(len(options['depths']))]
        told['pretrained_window_size'] = tuple(max(sides) for sides in trained)
    if window is not None:
        told['window_size'] = window
    position = found.parameters.get('absolute_pos_embed')
    if position is not None:
        told['pretrain_img_size'] = tuple(side * options['patch_size'] for side in position.shape[2:])
    return told
