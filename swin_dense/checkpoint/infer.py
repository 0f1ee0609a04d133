"""What a checkpoint tells about the model that it was made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swin_dense.checkpoint.misfit import options_of
from swin_dense.checkpoint.report import CheckpointError
from swin_dense.checkpoint.resize import square_grid, square_window
from swin_dense.checkpoint.source import Source
from swin_dense.checkpoint.target import OUT_NORM
from swin_dense.models.archs import published_letter

_FIRST_TABLE = 'stages.0.blocks.0.attn.w_msa.relative_position_bias_table'
_FIRST_SCALE = 'stages.0.blocks.0.attn.w_msa.logit_scale'
_KEPT = ('in_channels', 'patch_size', 'mlp_ratio', 'qkv_bias', 'use_rel_pos_bias', 'patch_norm', 'use_abs_pos_embed')


def infer_options(found: Source, given: Mapping[str, Any], any_heads: bool = False) -> dict[str, Any]:
    """Return the options of a SwinBackbone, or a SwinV2Backbone, that the weights fit as they are.

    Args:
        found: the backbone of a checkpoint.
        given: options that the user gave, which replace those of the checkpoint.
        any_heads: take one head per stage where nothing tells the number.

    Returns:
        The given options; ``arch``, a letter or a dict; what parameters show; and ``window_size``,
        ``pretrained_window_size`` of V2 and ``pretrain_img_size`` where the weights depend on them and tell. A window
        that is not square is told by buffers alone.

    Raises:
        CheckpointError: something that must be known cannot be read off and is not given.
    """
    options = options_of({name: tuple(tensor.shape) for name, tensor in found.parameters.items()})
    missing = [key for key in ('embed_dims', 'depths') if key not in options]
    if missing:
        raise CheckpointError(f'{found.described}: parameters that tell {" and ".join(missing)} are missing')
    told = {key: options[key] for key in _KEPT if key in options}
    told['arch'] = published_letter(options)
    stages = len(options['depths'])
    if told['arch'] is None:
        if 'num_heads' not in options and not any_heads and given.keys().isdisjoint(('arch', 'num_heads')):
            raise CheckpointError(f'{found.described} does not tell its number of heads; give the architecture')
        told['arch'] = {
            'embed_dims': options['embed_dims'],
            'depths': options['depths'],
            'num_heads': options.get('num_heads', (1,) * stages),
        }
    norms = {int(match[1]) for match in map(OUT_NORM.fullmatch, found.parameters) if match}
    if norms - {stages - 1}:  # that of the last stage alone is a classifier's
        told['out_indices'] = tuple(sorted(norms))
    table = found.parameters.get(_FIRST_TABLE)
    window = (
        found.windows.get(_FIRST_TABLE)
        or found.windows.get(_FIRST_SCALE)
        or (square_window(len(table)) if table is not None else None)
    )
    if window is not None:
        told['window_size'] = window
    if found.trained_windows:
        trained = [found.trained_windows.get(stage, (0, 0)) for stage in range(stages)]
        told['pretrained_window_size'] = tuple(max(sides) for sides in trained)
    elif found.version == 2 and given.keys().isdisjoint(('window_size', 'pretrained_window_size')):
        raise CheckpointError(
            f'{found.described} is a Swin V2 that does not tell the windows it was trained with, which others need to '
            'know; give pretrained_window_size (--source-window-size of swin-dense convert), one side or one per stage'
        )
    position = found.parameters.get('absolute_pos_embed')
    if position is not None and 'pretrain_img_size' not in given:
        grid = found.grid or square_grid(position.shape[1])
        if grid is None:
            raise CheckpointError(
                f'{found.described} does not tell the height and width of its {position.shape[1]} absolute positions; '
                'give pretrain_img_size=(height, width) in pixels'
            )
        told['pretrain_img_size'] = tuple(side * options['patch_size'] for side in grid)
    return {**told, **given}
