"""Layer indices of parameters by name, for layer-wise learning rates, and parameters without weight decay."""

from __future__ import annotations

import re
from collections.abc import Sequence

from swin_dense.utils.names import unwrapped

# Parameters without weight decay, besides biases and norms: those of the published recipes.
UNDECAYED = frozenset({'absolute_pos_embed', 'relative_position_bias_table', 'cpb_mlp', 'logit_scale'})

_IN_STAGE = re.compile(r'stages\.(\d+)\.(?:blocks\.(\d+)|downsample)\.')


def layer_of(name: str, depths: Sequence[int]) -> int:
    """Return the layer index of a backbone parameter, counted as in the authors' fine-tuning code.

    The patch embedding is 0, and the blocks are 1 to ``sum(depths)``. The patch merging of a stage has the index of the
    stage's last block. All other parameters, such as output norms and the absolute position embedding, have the index
    of the head: ``sum(depths) + 1``.

    Blocks beyond the depth of a stage have the index of its last block, so that ``depths`` of 1 count stages.

    Raises:
        ValueError: the parameter is in a stage, but neither in its blocks nor in its patch merging.
    """
    inner = unwrapped(name)
    if inner.startswith('patch_embed.'):
        return 0
    match = _IN_STAGE.match(inner)
    if match is not None:
        stage = int(match[1])
        depth = depths[stage]
        block = depth if match[2] is None else int(match[2]) + 1
        return sum(depths[:stage]) + min(block, depth)
    if inner.startswith('stages.'):
        raise ValueError(
            f'cannot tell the layer of the parameter {name!r}, which is neither in the blocks nor in the patch merging '
            'of its stage; add modules beside the stages, or inside a block'
        )
    return sum(depths) + 1
