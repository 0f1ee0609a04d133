"""Infer from a checkpoint the options of a backbone that fits its weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swin_dense.archs.arch import published_letter
from swin_dense.archs.shapes import options_of
from swin_dense.checkpoint.find import FIRST_SCALE, Found
from swin_dense.checkpoint.fit import pretrained_sides
from swin_dense.checkpoint.report import CheckpointError

_TABLE = 'relative_position_bias_table'
_KEPT = ('in_channels', 'patch_size', 'mlp_ratio', 'qkv_bias', 'use_rel_pos_bias', 'patch_norm', 'use_abs_pos_embed')


def infer_options(found: Found, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a SwinBackbone or SwinV2Backbone that fits the weights without resizing.

    These are ``given``, from the user; ``arch`` (a letter or a dict); the options that parameter shapes determine; and,
    if the weights depend on them and determine them, ``window_size``, ``pretrained_window_size`` (V2) and
    ``pretrain_img_size``. A window that is not square can be inferred from buffers only.

    Raises CheckpointError if a required option can neither be inferred nor is it given.
    """
    options = options_of(found.shapes)
    missing = [key for key in ('embed_dims', 'depths') if key not in options]
    if missing:
        reasons = ''.join(f'; {name} is {why}' for name, why in list(found.unusable.items())[:1])
        raise CheckpointError(
            f'{found.described}: cannot infer {" and ".join(missing)}, because parameters are missing or '
            f'disagree{reasons}'
        )
    inferred = {key: options[key] for key in _KEPT if key in options}
    inferred['arch'] = published_letter(options)
    stages = len(options['depths'])
    if inferred['arch'] is None:
        if 'num_heads' not in options and given.keys().isdisjoint(('arch', 'num_heads')):
            raise CheckpointError(f'{found.described}: cannot infer the number of heads; give the architecture')
        inferred['arch'] = {
            'embed_dims': options['embed_dims'],
            'depths': options['depths'],
            'num_heads': options.get('num_heads', (1,) * stages),
        }
    if set(found.outputs) - {stages - 1}:  # a norm of the last stage only is that of a classifier
        inferred['out_indices'] = found.outputs
    tables = [found.size_of(f'stages.{stage}.blocks.0.attn.w_msa.{_TABLE}') for stage in range(stages)]
    # The windows of V2 in other files than our own are those of a classifier, shrunk to its maps.
    windows = found.windows[:stages] or tables
    if len(windows) == stages and None not in windows:
        inferred['window_size'] = windows[0] if len(set(windows)) == 1 else windows
    elif window := windows[0] or found.size_of(FIRST_SCALE):
        inferred['window_size'] = window
    if found.trained_windows:
        trained = [found.trained_windows.get(stage) for stage in range(stages)]
        inferred['pretrained_window_size'] = pretrained_sides(trained)
    elif found.version == 2 and 'pretrained_window_size' not in given:
        raise CheckpointError(
            f'{found.described} is a Swin V2 that does not record the windows it was trained with, which other windows '
            'need; give pretrained_window_size, one side or one per stage'
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
