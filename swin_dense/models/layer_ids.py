"""How deep in the network a parameter lies, by its name, and which parameters weight decay spares."""

from __future__ import annotations

import re
from collections.abc import Sequence

# What the published recipes of V1 and V2 spare beside biases and norms.
UNDECAYED = ('absolute_pos_embed', 'relative_position_bias_table', 'cpb_mlp', 'logit_scale')

_IN_STAGE = re.compile(r'stages\.(\d+)\.(?:blocks\.(\d+)|downsample)\.')


def layer_of(name: str, depths: Sequence[int]) -> int:
    """Return the layer of a parameter of a backbone, counted as in the authors' fine-tuning code.

    The embedding is 0, the blocks are 1 to ``sum(depths)``, the merging behind a stage counts with the stage's last
    block, and what else there is, norms of outputs and the absolute position, with the head: ``sum(depths) + 1``.
    """
    if name.startswith('patch_embed.'):
        return 0
    match = _IN_STAGE.match(name)
    if match is None:
        return sum(depths) + 1
    stage = int(match[1])
    return sum(depths[:stage]) + (depths[stage] if match[2] is None else int(match[2]) + 1)


def stage_of(name: str, stages: int) -> int:
    """Return the same by stages: the embedding is 0, stages are 1 to ``stages``, the rest ``stages + 1``."""
    if name.startswith('patch_embed.'):
        return 0
    match = _IN_STAGE.match(name)
    return stages + 1 if match is None else int(match[1]) + 1
