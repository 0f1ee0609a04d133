"""Parameter names of Swin Transformers in other libraries, one table per family, and detection of the family."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable

from swin_dense.checkpoint.names import MMDET, Family

_LAYER = 'layers.{stage}.blocks.{block}'
# The names of the authors' code, also used by version 0.1 of this package.
OFFICIAL = Family(
    'official',
    {
        'patch_proj': 'patch_embed.proj',
        'norm1': f'{_LAYER}.norm1',
        'table': f'{_LAYER}.attn.relative_position_bias_table',
        'logit_scale': f'{_LAYER}.attn.logit_scale',
        'cpb1': f'{_LAYER}.attn.cpb_mlp.0',
        'cpb2': f'{_LAYER}.attn.cpb_mlp.2',
        'q_bias': f'{_LAYER}.attn.q_bias',
        'v_bias': f'{_LAYER}.attn.v_bias',
        'qkv': f'{_LAYER}.attn.qkv',
        'proj': f'{_LAYER}.attn.proj',
        'norm2': f'{_LAYER}.norm2',
        'fc1': f'{_LAYER}.mlp.fc1',
        'fc2': f'{_LAYER}.mlp.fc2',
        'merge_norm': 'layers.{stage}.downsample.norm',
        'merge': 'layers.{stage}.downsample.reduction',
    },
    slice_order=True,
    position_map=True,
)
MMSEG = dataclasses.replace(MMDET, name='mmseg')  # mmdet, mmseg and mmpretrain share one layout
MMPRETRAIN = dataclasses.replace(MMDET, name='mmpretrain')
TIMM = dataclasses.replace(
    OFFICIAL,
    name='timm',
    names={
        **OFFICIAL.names,
        'merge_norm': 'layers.{stage+1}.downsample.norm',
        'merge': 'layers.{stage+1}.downsample.reduction',
    },
    position_map=False,
)
TORCHVISION = Family(
    'torchvision',
    {
        'patch_proj': 'features.0.0',
        'patch_norm': 'features.0.2',
        'norm1': 'features.{2*stage+1}.{block}.norm1',
        'table': 'features.{2*stage+1}.{block}.attn.relative_position_bias_table',
        'qkv': 'features.{2*stage+1}.{block}.attn.qkv',
        'proj': 'features.{2*stage+1}.{block}.attn.proj',
        'norm2': 'features.{2*stage+1}.{block}.norm2',
        'fc1': 'features.{2*stage+1}.{block}.mlp.0',
        'fc2': 'features.{2*stage+1}.{block}.mlp.3',
        'merge_norm': 'features.{2*stage+2}.norm',
        'merge': 'features.{2*stage+2}.reduction',
    },
    slice_order=True,
    index='flat',
)
# The names of transformers 5.x, which also loads the names of older versions.
TRANSFORMERS = Family(
    'transformers',
    {
        'patch_proj': 'embeddings.patch_embeddings.projection',
        'patch_norm': 'embeddings.norm',
        'position': 'embeddings.position_embeddings',
        'norm1': 'encoder.layers.{stage}.blocks.{block}.layernorm_before',
        'table': 'encoder.layers.{stage}.blocks.{block}.attention.relative_position_bias.relative_position_bias_table',
        'qkv': tuple(f'encoder.layers.{{stage}}.blocks.{{block}}.attention.{part}_proj' for part in 'qkv'),
        'proj': 'encoder.layers.{stage}.blocks.{block}.attention.o_proj',
        'norm2': 'encoder.layers.{stage}.blocks.{block}.layernorm_after',
        'fc1': 'encoder.layers.{stage}.blocks.{block}.mlp.fc1',
        'fc2': 'encoder.layers.{stage}.blocks.{block}.mlp.fc2',
        'merge_norm': 'encoder.layers.{stage}.downsample.norm',
        'merge': 'encoder.layers.{stage}.downsample.reduction',
        'out_norm': 'hidden_states_norms.stage{stage+1}',
        'final_norm': 'layernorm',
    },
    slice_order=True,
    inner='swin.',
)
OFFICIAL_V2 = dataclasses.replace(OFFICIAL, version=2, coordinates=True)
TIMM_V2 = dataclasses.replace(TIMM, version=2)
TORCHVISION_V2 = dataclasses.replace(
    TORCHVISION,
    names={
        **TORCHVISION.names,
        'logit_scale': 'features.{2*stage+1}.{block}.attn.logit_scale',
        'cpb1': 'features.{2*stage+1}.{block}.attn.cpb_mlp.0',
        'cpb2': 'features.{2*stage+1}.{block}.attn.cpb_mlp.2',
    },
    version=2,
    joined_bias=True,
    coordinates=True,
)
_ATTENTION_V2 = 'encoder.layers.{stage}.blocks.{block}.attention'
TRANSFORMERS_V2 = dataclasses.replace(
    TRANSFORMERS,
    names={
        **{role: name for role, name in TRANSFORMERS.names.items() if role != 'out_norm'},
        'logit_scale': f'{_ATTENTION_V2}.self.logit_scale',
        'cpb1': f'{_ATTENTION_V2}.self.continuous_position_bias_mlp.0',
        'cpb2': f'{_ATTENTION_V2}.self.continuous_position_bias_mlp.2',
        'q_bias': f'{_ATTENTION_V2}.self.query.bias',
        'v_bias': f'{_ATTENTION_V2}.self.value.bias',
        'qkv': tuple(f'{_ATTENTION_V2}.self.{part}' for part in ('query', 'key', 'value')),
        'proj': f'{_ATTENTION_V2}.output.dense',
        'fc1': 'encoder.layers.{stage}.blocks.{block}.intermediate.dense',
        'fc2': 'encoder.layers.{stage}.blocks.{block}.output.dense',
    },
    inner='',
    version=2,
)
MMPRETRAIN_V2 = dataclasses.replace(
    MMPRETRAIN,
    names={'merge_norm': 'stages.{stage+1}.downsample.norm', 'merge': 'stages.{stage+1}.downsample.reduction'},
    version=2,
    coordinates=True,
)
OURS_V2 = Family('swin_dense', version=2)
EXPORTED = {family.name: family for family in (OFFICIAL, MMDET, MMSEG, MMPRETRAIN, TIMM, TORCHVISION, TRANSFORMERS)}
EXPORTED_V2 = {family.name: family for family in (OFFICIAL_V2, MMPRETRAIN_V2, TIMM_V2, TORCHVISION_V2, TRANSFORMERS_V2)}
# One family for each naming scheme of blocks. `resolve_family` distinguishes families that share a scheme.
_SPELLINGS = (OFFICIAL, MMDET, TORCHVISION, TRANSFORMERS)


def find_backbones(keys: Iterable[str]) -> Counter[tuple[Family, str]]:
    """Count the keys that match a Swin parameter, for each candidate pair of naming scheme and prefix."""
    found: Counter[tuple[Family, str]] = Counter()
    for key in keys:
        for family in _SPELLINGS:
            prefix = family.prefix_of(key)
            if prefix is not None:
                found[family, prefix] += 1
    return found


def resolve_family(family: Family, prefix: str, keys: Iterable[str]) -> Family:
    """Return the family of the keys among those that share the block names of ``family``.

    Args:
        family: the naming scheme, from :func:`find_backbones`.
        prefix: the prefix of the backbone's keys.
        keys: keys in the spelling of :func:`~swin_dense.checkpoint.names.plain_name`.
    """
    own = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    at_start = family in (OFFICIAL, MMDET) and _merges_at_stage_start(family, own)
    if family is OFFICIAL and at_start:
        family = TIMM
    if not all(any(re.search(mark, key) for key in own) for mark in _MARKS_OF_V2):
        return family
    if family is MMDET:
        return MMPRETRAIN_V2 if at_start else OURS_V2
    return {OFFICIAL: OFFICIAL_V2, TIMM: TIMM_V2, TORCHVISION: TORCHVISION_V2, TRANSFORMERS: TRANSFORMERS_V2}[family]


# Only Swin V2 has parameters that match both patterns; Swin V1 and other networks called "V2" do not.
_MARKS_OF_V2 = (r'\.logit_scale$', r'\.(cpb_mlp|continuous_position_bias_mlp)\.')


def _merges_at_stage_start(family: Family, keys: Iterable[str]) -> bool:
    """Return whether stages begin with patch merging, as in timm, so that the last stage has a merging layer."""
    stages, merges = set(), set()
    for name in filter(None, map(family.read, keys)):
        if name.block is not None:
            stages.add(name.stage or 0)
        elif name.role in ('merge', 'merge_norm'):
            merges.add(name.stage or 0)
    return bool(merges) and max(merges) == max(stages)
