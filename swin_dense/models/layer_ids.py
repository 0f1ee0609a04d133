"""Layer indices of parameters by name, for layer-wise learning rates, and parameters without weight decay."""

from __future__ import annotations

import re
from collections.abc import Sequence

from swin_dense.utils.names import unwrapped

# Parameters without weight decay, besides biases and norms: those of the published recipes, and the scales of Mona.
_OF_MONA = {'norm_scale', 'input_scale'}
UNDECAYED = frozenset({'absolute_pos_embed', 'relative_position_bias_table', 'cpb_mlp', 'logit_scale'} | _OF_MONA)

_IN_STAGE = re.compile(r'stages\.(\d+)\.(?:blocks\.(\d+)|downsample)\.')


def layer_of(name: str, depths: Sequence[int]) -> int:
    """Return the layer index of a backbone parameter, counted as in the authors' fine-tuning code.

    The patch embedding is 0, and the blocks are 1 to ``sum(depths)``. The patch merging of a stage has the index of the
    stage's last block. All other parameters, such as output norms and the absolute position embedding, have the index
    of the head: ``sum(depths) + 1``.

    Raises:
        ValueError: the parameter is in a stage, but neither in its blocks nor in its patch merging.
    """
    if _is_stem(name):
        return 0
    match = _in_stage(name)
    if match is None:
        return sum(depths) + 1
    stage = int(match[1])
    return sum(depths[:stage]) + (depths[stage] if match[2] is None else int(match[2]) + 1)


def stage_of(name: str, stages: int) -> int:
    """Return the stage index of a parameter: 0 for the embedding, 1 to ``stages``, and ``stages + 1`` for the rest.

    Raises:
        ValueError: as for :func:`layer_of`.
    """
    if _is_stem(name):
        return 0
    match = _in_stage(name)
    return stages + 1 if match is None else int(match[1]) + 1


def _is_stem(name: str) -> bool:
    return unwrapped(name).startswith('patch_embed.')


def _in_stage(name: str) -> re.Match[str] | None:
    """Return the match of a name in a stage, or None for a parameter outside of the stages."""
    match = _IN_STAGE.match(unwrapped(name))
    if match is None and unwrapped(name).startswith('stages.'):
        raise ValueError(
            f'cannot tell the layer of the parameter {name!r}, which is neither in the blocks nor in the patch merging '
            'of its stage; put what you add beside the stages, or inside a block'
        )
    return match
