"""Parameter names and layouts of Swin Transformers in other libraries, one table per family.

A family is a table of its names by role. Loading and export use the same table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from swin_dense.utils.names import unwrapped

COORDINATES = 'relative_coords_table'  # the buffer of V2 that determines its windows


def _names(block: str, attention: str, layers: tuple[str, str], downsample: str) -> dict[str, str]:
    """Return the names that most libraries have, by role, given those of modules; an MLP has two linear layers."""
    return {
        'norm1': f'{block}.norm1',
        'table': f'{block}.{attention}.relative_position_bias_table',
        'logit_scale': f'{block}.{attention}.logit_scale',
        'cpb1': f'{block}.{attention}.cpb_mlp.0',
        'cpb2': f'{block}.{attention}.cpb_mlp.2',
        'q_bias': f'{block}.{attention}.q_bias',
        'v_bias': f'{block}.{attention}.v_bias',
        'qkv': f'{block}.{attention}.qkv',
        'proj': f'{block}.{attention}.proj',
        'norm2': f'{block}.norm2',
        'fc1': f'{block}.{layers[0]}',
        'fc2': f'{block}.{layers[1]}',
        'merge_norm': f'{downsample}.norm',
        'merge': f'{downsample}.reduction',
    }


# Our names by role of the module or parameter. These are the names of mmdet and mmseg.
_OURS: dict[str, str] = {
    'patch_proj': 'patch_embed.projection',
    'patch_norm': 'patch_embed.norm',
    'position': 'absolute_pos_embed',
    **_names(
        'stages.{stage}.blocks.{block}', 'attn.w_msa', ('ffn.layers.0.0', 'ffn.layers.1'), 'stages.{stage}.downsample'
    ),
    'out_norm': 'norm{stage}',
    'final_norm': 'norm',
}
# Roles of single parameters. All other roles are modules with a weight or a bias.
_PARAMETERS = ('position', 'table', 'logit_scale', 'q_bias', 'v_bias')
# Roles, by network, that depend on the order in which patch merging concatenates its inputs.
_MERGED = {'swin': ('merge', 'merge_norm'), 'swinv2': ('merge',)}
# Placeholders of the stage in the tables, as (scale, offset): number in the name = scale * our number + offset.
_STAGES = {'stage': (1, 0), 'next': (1, 1), 'odd': (2, 1), 'even': (2, 2)}
# Roles of linear layers.
LINEAR = ('qkv', 'proj', 'fc1', 'fc2', 'merge', 'cpb1', 'cpb2')

# Regular expressions that normalise variants of these names: names of timm's features_only models, and in transformers
# the name of the base model, the norms of MaskFormer and older names.
_RESPELLINGS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r'\blayers_(?=\d+\.)', 'layers.'),
        (r'\bswin(?:v2)?\.(?=embeddings\.|encoder\.|layernorm\.)', ''),
        (
            r'\bpixel_level_module\.encoder\.model\.(?=embeddings\.|encoder\.|layernorm\.|$)',
            'pixel_level_module.encoder.',
        ),
        (r'\bhidden_states_norms\.(\d{1,3})\b', lambda match: f'hidden_states_norms.stage{int(match[1]) + 1}'),
        (r'\brpe_mlp\.', 'cpb_mlp.'),
        (r'\battention\.self\.query\b', 'attention.q_proj'),
        (r'\battention\.self\.key\b', 'attention.k_proj'),
        (r'\battention\.self\.value\b', 'attention.v_proj'),
        (r'\battention\.self\.(?=relative_position_bias_table)', 'attention.relative_position_bias.'),
        (r'\battention\.output\.dense\b', 'attention.o_proj'),
        (r'(?<=[\d}]\.)intermediate\.dense\b', 'mlp.fc1'),
        (r'(?<=[\d}]\.)output\.dense\b', 'mlp.fc2'),
    )
)


@dataclass(frozen=True)
class Name:
    """A parameter identified by its role, as in ``Name('qkv', stage=0, block=1, leaf='.weight')``."""

    role: str  # a key of the name tables
    stage: int = 0  # also where there is none
    block: int | None = None
    leaf: str = ''  # '.weight', '.bias', or '' for a single parameter
    part: int = 0  # index of the tensor if a family splits our parameter into several, such as q, k and v

    @property
    def ours(self) -> str:
        return _OURS[self.role].format(stage=self.stage, block=self.block) + self.leaf


@dataclass(frozen=True, eq=False)
class Family:
    """The parameter names and layouts of one library."""

    name: str  # in reports
    # By role, names that differ from ours; a tuple if our tensor is split into several.
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    slice_order: bool = False  # patch merging concatenates its inputs by neighbour first, ours by channel first
    position_map: bool = False  # the absolute position embedding is (1, C, H, W) instead of our (1, L, C)
    index: str | None = None  # buffer stored with each relative position table: 'square' (T, T), 'flat' (T * T)
    inner: str = ''  # the prefix of all names except those of the output norms
    stems: tuple[str, str] = ('stages.', 'norm')  # the beginnings of the names in stages and of the output norms
    network: str = 'swin'  # or 'swinv2', whose merging norm follows the reduction
    joined_bias: bool = False  # V2's query and value biases are in one tensor, with an unused key bias
    coordinates: bool = False  # the coordinates of each V2 position network are stored as a buffer

    def is_numbered(self, key: str) -> bool:
        """Return whether ``key`` is in a numbered stage or output norm, as all parameters of blocks and outputs are."""
        return any(key.startswith(stem) and key[len(stem) :][:1].isdecimal() for stem in self.stems)

    def templates(self, role: str) -> tuple[str, ...]:
        """Return the names of a role, with placeholders for numbers: one, or one per part."""
        names = self.names.get(role, _OURS[role])
        return (names,) if isinstance(names, str) else names

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], str, int]]:
        """The pattern of each name, as spelled by :func:`plain_name`, with its role and part."""
        patterns = []
        for role in _OURS:
            leaf = '' if role in _PARAMETERS else r'\.(?:weight|bias)'
            for part, template in enumerate(self.templates(role)):
                name = re.sub(r'\\{(\w+)\\}', r'(?P<\1>\\d{1,3})', re.escape(plain_name(template)))
                patterns.append((re.compile(f'{name}(?P<leaf>{leaf})'), role, part))
        return patterns

    def write(self, name: Name) -> tuple[str, ...]:
        """Return the names of a parameter in this family: one, or one per part."""
        numbers = {place: scale * name.stage + offset for place, (scale, offset) in _STAGES.items()}
        return tuple(text.format(**numbers, block=name.block) + name.leaf for text in self.templates(name.role))

    def read(self, key: str) -> Name | None:
        """Return the parameter whose name in this family, as spelled by :func:`plain_name`, is ``key``, or None."""
        for pattern, role, part in self._patterns:
            if match := pattern.fullmatch(key):
                numbers = match.groupdict()
                leaf, block, stage = numbers.pop('leaf'), numbers.pop('block', None), 0
                for place, number in numbers.items():  # of the stage, if the role has one
                    stage, rest = divmod(int(number) - _STAGES[place][1], _STAGES[place][0])
                    if rest or stage < 0:
                        return None
                return Name(role, stage, None if block is None else int(block), leaf, part)
        return None

    def decode(self, name: Name, parts: list[Tensor]) -> Tensor:
        """Convert the tensors of a parameter in this family to our layout."""
        tensor = parts[0] if len(parts) == 1 else torch.cat([torch.atleast_1d(part) for part in parts])
        if self.slice_order and name.role in _MERGED[self.network] and tensor.shape[-1:].numel() % 4 == 0:
            # (2x2 column by column, C) to (C, 2x2 row by row)
            by_column = tensor.unflatten(-1, (2, 2, -1))
            tensor = by_column.transpose(-3, -2).movedim(-1, -3).flatten(-3)
        if name.role == 'position' and tensor.ndim == 4:
            tensor = tensor.flatten(2).transpose(1, 2)
        return tensor

    def encode(self, name: Name, tensor: Tensor, grid: tuple[int, int] | None = None) -> list[Tensor]:
        """Undo :meth:`decode`; ``grid`` is (H, W) of the absolute position embedding, if the model has one."""
        if self.slice_order and name.role in _MERGED[self.network]:
            by_row = tensor.unflatten(-1, (-1, 2, 2))
            tensor = by_row.movedim(-3, -1).transpose(-3, -2).flatten(-3)
        if name.role == 'position' and self.position_map and grid is not None:
            tensor = tensor.transpose(1, 2).unflatten(2, grid)
        return list(tensor.chunk(len(self.write(name)))) if name.role == 'qkv' else [tensor]


def is_standard(name: str) -> bool:
    """Return whether one of our names is that of a backbone parameter, for any options."""
    read = MMDET.read(name)
    return read is not None and read.role != 'final_norm'


def plain_name(key: str) -> str:
    """Return ``key`` without components of wrappers and in the spelling of the name tables."""
    key = unwrapped(key)
    for pattern, replacement in _RESPELLINGS:
        key = pattern.sub(replacement, key)
    return key


MMDET = Family('mmdet', index='square')
_OFFICIAL_BLOCK = 'layers.{stage}.blocks.{block}', 'attn', ('mlp.fc1', 'mlp.fc2')
# The names of the authors' code.
OFFICIAL = Family(
    'official',
    {'patch_proj': 'patch_embed.proj', **_names(*_OFFICIAL_BLOCK, 'layers.{stage}.downsample')},
    stems=('layers.', 'norm'),
    slice_order=True,
    position_map=True,
)
MMSEG = replace(MMDET, name='mmseg')  # mmdet, mmseg and mmpretrain share one layout
MMPRETRAIN = replace(MMDET, name='mmpretrain')
TIMM = replace(
    OFFICIAL,
    name='timm',
    names={**OFFICIAL.names, **_names(*_OFFICIAL_BLOCK, 'layers.{next}.downsample')},
    position_map=False,
)
TORCHVISION = Family(
    'torchvision',
    {
        'patch_proj': 'features.0.0',
        'patch_norm': 'features.0.2',
        **_names('features.{odd}.{block}', 'attn', ('mlp.0', 'mlp.3'), 'features.{even}'),
    },
    stems=('features.', 'norm'),
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
        'out_norm': 'hidden_states_norms.stage{next}',
        'final_norm': 'layernorm',
    },
    stems=('encoder.layers.', 'hidden_states_norms.stage'),
    slice_order=True,
    inner='swin.',
)
OFFICIAL_V2 = replace(OFFICIAL, network='swinv2', coordinates=True)
TIMM_V2 = replace(TIMM, network='swinv2')
TORCHVISION_V2 = replace(TORCHVISION, network='swinv2', joined_bias=True, coordinates=True)
_ATTENTION_V2 = 'encoder.layers.{stage}.blocks.{block}.attention'
TRANSFORMERS_V2 = replace(
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
    stems=('encoder.layers.', 'norm'),
    inner='',
    network='swinv2',
)
MMPRETRAIN_V2 = replace(
    MMPRETRAIN,
    names={'merge_norm': 'stages.{next}.downsample.norm', 'merge': 'stages.{next}.downsample.reduction'},
    network='swinv2',
    coordinates=True,
)
OURS_V2 = Family('swin_dense', network='swinv2')
EXPORTED = {family.name: family for family in (OFFICIAL, MMDET, MMSEG, MMPRETRAIN, TIMM, TORCHVISION, TRANSFORMERS)}
EXPORTED_V2 = {family.name: family for family in (OFFICIAL_V2, MMPRETRAIN_V2, TIMM_V2, TORCHVISION_V2, TRANSFORMERS_V2)}
# One family for each naming scheme of blocks, and the others that share it: by network, and by whether stages begin
# with patch merging, as in timm, so that the last stage has a merging layer.
SCHEMES = (OFFICIAL, MMDET, TORCHVISION, TRANSFORMERS)
FAMILY_OF_SCHEME = {
    (OFFICIAL, 'swin', True): TIMM,
    (OFFICIAL, 'swinv2', False): OFFICIAL_V2,
    (OFFICIAL, 'swinv2', True): TIMM_V2,
    (MMDET, 'swinv2', False): OURS_V2,
    (MMDET, 'swinv2', True): MMPRETRAIN_V2,
    (TORCHVISION, 'swinv2', False): TORCHVISION_V2,
    (TRANSFORMERS, 'swinv2', False): TRANSFORMERS_V2,
}
# Only Swin V2 has parameters that match both patterns; Swin V1 and other networks called "V2" do not.
MARKS_OF_V2 = (re.compile(r'\.logit_scale$'), re.compile(r'\.(cpb_mlp|continuous_position_bias_mlp)\.'))
