"""Infer from the shapes of a checkpoint the options of a backbone that fits its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from swin_dense.archs.arch import ARCHS, published_letter
from swin_dense.checkpoint.convert import ConvertedBackbone
from swin_dense.checkpoint.families import OURS_V2
from swin_dense.checkpoint.options import options_of
from swin_dense.ops.windows import Size
from swin_dense.utils.errors import CheckpointError

_KEPT = ('in_channels', 'patch_size', 'mlp_ratio', 'qkv_bias', 'use_rel_pos_bias', 'patch_norm', 'use_abs_pos_embed')


def _window_size(weights: ConvertedBackbone, stages: int, is_dense: bool) -> Size | list[Size] | None:
    """Return the window of all stages, or one per stage, of weights; None if they do not determine it.

    ``is_dense`` says that the weights are certainly not those of a classifier.
    """
    windows = [weights.windows.get(stage) for stage in range(stages)]
    known = [window for window in windows if window is not None]
    if len(known) < stages or len(set(known)) == 1:
        return windows[0]
    if weights.family.network == 'swinv2' and weights.family is not OURS_V2 and not is_dense and _is_shrunk(known):
        return known[0]
    return known


def _is_shrunk(windows: Sequence[Size]) -> bool:
    """Return whether windows per stage follow from a single window that shrinks to the maps of a classifier of V2.

    Once a map is smaller than the first window, it is the window, and each further stage halves it.
    """
    return all(
        old == first >= new >= -(-first // 2) or new == -(-old // 2)
        for first, *sides in zip(*windows, strict=True)
        for old, new in pairwise([first, *sides])
    )


def infer_options(weights: ConvertedBackbone, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a SwinBackbone or SwinV2Backbone that fits the weights without resizing.

    These are ``given``, from the user; ``arch`` (an Arch or a dict); the options that parameter shapes determine; and,
    if the weights depend on them and determine them, ``window_size``, ``pretrained_window_size`` (V2) and
    ``pretrain_img_size``. A window that is not square can be inferred from buffers only.

    Raises CheckpointError if a required option can neither be inferred nor is it given.
    """
    options = options_of(weights.shapes)
    unknown = [key for key in ('embed_dims', 'depths') if key not in options]
    if unknown:
        from swin_dense.checkpoint import explain

        reason = explain.unknown_size(weights)
        raise CheckpointError(f'{weights.described}: cannot infer {" and ".join(unknown)}. {reason}')
    inferred = {key: options[key] for key in _KEPT if key in options}
    stages = len(options['depths'])
    if letter := published_letter(options):
        inferred['arch'] = ARCHS[letter]
    elif 'num_heads' not in options and given.keys().isdisjoint(('arch', 'num_heads')):
        raise CheckpointError(f'{weights.described}: cannot infer the number of heads; give the architecture')
    else:
        inferred['arch'] = {
            'embed_dims': options['embed_dims'],
            'depths': options['depths'],
            'num_heads': options.get('num_heads', (1,) * stages),
        }
    outputs = tuple(stage for stage in range(stages) if f'norm{stage}.weight' in weights.tensors)
    if set(outputs) - {stages - 1}:  # a norm of the last stage only is that of a classifier
        inferred['out_indices'] = outputs
    if window := _window_size(weights, stages, is_dense='out_indices' in inferred):
        inferred['window_size'] = window
    if weights.trained_windows:
        trained = [weights.trained_windows.get(stage) for stage in range(stages)]
        inferred['pretrained_window_size'] = pretrained_sides(trained)
    needed = ['window_size', 'pretrained_window_size'] if weights.family.network == 'swinv2' else ['window_size']
    if absent := [option for option in needed if option not in {**inferred, **given}]:
        raise CheckpointError(
            f'{weights.described} does not record the windows that it was trained with, on which the maps depend; give '
            f'{" and ".join(absent)}'
        )
    position = weights.tensors.get('absolute_pos_embed')
    if position is not None and position.ndim == 3 and 'pretrain_img_size' not in given and 'patch_size' in options:
        grid = weights.parameters['absolute_pos_embed'].size
        if grid is None:
            raise CheckpointError(
                f'{weights.described}: cannot infer the height and width of its {position.shape[1]} absolute '
                'positions; give pretrain_img_size=(height, width) in pixels'
            )
        inferred['pretrain_img_size'] = tuple(side * options['patch_size'] for side in grid)
    return {**inferred, **given}


def pretrained_sides(trained: Sequence[Size | None]) -> tuple[int, ...]:
    """Return ``pretrained_window_size``: 0, which is the model's window, where a window is oblong or unknown."""
    return tuple(window[0] if window and window[0] == window[1] else 0 for window in trained)
