"""Translation between our parameter names and layouts and those of another library (a family).

A family is a table of its names by role. Loading and export use the same table. The tables are in
:mod:`swin_dense.checkpoint.families`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

# Our names by role of the module or parameter. These are the names of mmdet and mmseg.
_OURS: dict[str, str] = {
    'patch_proj': 'patch_embed.projection',
    'patch_norm': 'patch_embed.norm',
    'position': 'absolute_pos_embed',
    'norm1': 'stages.{stage}.blocks.{block}.norm1',
    'table': 'stages.{stage}.blocks.{block}.attn.w_msa.relative_position_bias_table',
    'logit_scale': 'stages.{stage}.blocks.{block}.attn.w_msa.logit_scale',
    'cpb1': 'stages.{stage}.blocks.{block}.attn.w_msa.cpb_mlp.0',
    'cpb2': 'stages.{stage}.blocks.{block}.attn.w_msa.cpb_mlp.2',
    'q_bias': 'stages.{stage}.blocks.{block}.attn.w_msa.q_bias',
    'v_bias': 'stages.{stage}.blocks.{block}.attn.w_msa.v_bias',
    'qkv': 'stages.{stage}.blocks.{block}.attn.w_msa.qkv',
    'proj': 'stages.{stage}.blocks.{block}.attn.w_msa.proj',
    'norm2': 'stages.{stage}.blocks.{block}.norm2',
    'fc1': 'stages.{stage}.blocks.{block}.ffn.layers.0.0',
    'fc2': 'stages.{stage}.blocks.{block}.ffn.layers.1',
    'merge_norm': 'stages.{stage}.downsample.norm',
    'merge': 'stages.{stage}.downsample.reduction',
    'out_norm': 'norm{stage}',
    'final_norm': 'norm',
}
# Roles of single parameters. All other roles are modules with a weight or a bias.
_PARAMETERS = ('position', 'table', 'logit_scale', 'q_bias', 'v_bias')
# Placeholders for stage and block numbers, as (attribute, scale, offset): number = scale * our number + offset.
_NUMBERS = {
    'stage': ('stage', 1, 0),
    'stage+1': ('stage', 1, 1),
    '2*stage+1': ('stage', 2, 1),
    '2*stage+2': ('stage', 2, 2),
    'block': ('block', 1, 0),
}
# Roles whose names distinguish families from each other and a Swin from other networks.
_DISTINCTIVE = ('norm1', 'table', 'qkv', 'proj', 'norm2', 'fc1', 'fc2')

# Regular expressions that normalise variants of these names: components inserted by wrappers, names of timm's
# features_only models, and in transformers the name of the base model, the norms of MaskFormer and older names.
_RESPELLINGS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r'(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.', ''),
        (r'\blayers_(?=\d+\.)', 'layers.'),
        (r'\bswin(?:v2)?\.(?=embeddings\.|encoder\.|layernorm\.)', ''),
        (
            r'\bpixel_level_module\.encoder\.model\.(?=embeddings\.|encoder\.|layernorm\.|$)',
            'pixel_level_module.encoder.',
        ),
        (r'\bhidden_states_norms\.(\d+)', lambda match: f'hidden_states_norms.stage{int(match[1]) + 1}'),
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
    """A parameter identified by its role, as in ``Name('qkv', stage=0, block=1, leaf='.weight')``.

    Attributes:
        role: a key of the name tables.
        stage: stage number, or None.
        block: block number, or None.
        leaf: '.weight', '.bias', or '' for a single parameter.
        part: the index of the tensor if a family splits our parameter into several, such as q, k and v.
    """

    role: str
    stage: int | None = None
    block: int | None = None
    leaf: str = ''
    part: int = 0

    @property
    def ours(self) -> str:
        return MMDET.write(self)[0]


class _Template:
    """A parameter name with placeholders for numbers, for formatting and parsing."""

    def __init__(self, template: str, leaf: str) -> None:
        self._pieces = re.split(r'\{(.+?)\}', template)
        pattern = ''.join(r'(\d+)' if index % 2 else re.escape(piece) for index, piece in enumerate(self._pieces))
        self.pattern = re.compile(pattern + leaf)

    @property
    def stem(self) -> str:
        """The part before the first number."""
        return self._pieces[0]

    def write(self, name: Name) -> str:
        filled = list(self._pieces)
        for index in range(1, len(filled), 2):
            attribute, scale, offset = _NUMBERS[filled[index]]
            filled[index] = str(scale * getattr(name, attribute) + offset)
        return ''.join(filled) + name.leaf

    def read(self, key: str) -> dict[str, int] | None:
        """Return the stage and block numbers in ``key`` ({} if it has none), or None if it does not match."""
        match = self.pattern.fullmatch(key)
        if match is None:
            return None
        numbers = {}
        for index, text in enumerate(match.groups()[: len(self._pieces) // 2]):
            attribute, scale, offset = _NUMBERS[self._pieces[2 * index + 1]]
            number, rest = divmod(int(text) - offset, scale)
            if rest or number < 0:
                return None
            numbers[attribute] = number
        return numbers


@dataclass(frozen=True, eq=False)
class Family:
    """The parameter names and layouts of one library.

    Attributes:
        name: the name in reports.
        names: maps roles to names that differ from ours. A tuple if our tensor is split into several.
        slice_order: whether patch merging concatenates its inputs by neighbour first. Ours does so by channel first,
            as ``nn.Unfold`` does.
        position_map: whether the absolute position embedding is (1, C, H, W) instead of our (1, L, C).
        index: the index buffer stored with each relative position table: 'square' (T, T), 'flat' (T * T) or None.
        inner: the prefix of all names except those of the output norms.
        version: the version of Swin, 1 or 2. The merging norm of V2 follows the reduction.
        joined_bias: whether V2's query and value biases are stored in one tensor with an unused key bias.
        coordinates: whether the coordinates of each V2 position network are stored as a buffer.
    """

    name: str
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    slice_order: bool = False
    position_map: bool = False
    index: str | None = None
    inner: str = ''
    version: int = 1
    joined_bias: bool = False
    coordinates: bool = False

    @cached_property
    def _templates(self) -> dict[str, tuple[_Template, ...]]:
        return self._spelled(lambda name: name)

    @cached_property
    def _plain_templates(self) -> dict[str, tuple[_Template, ...]]:
        return self._spelled(plain_name)

    def _spelled(self, spell: Callable[[str], str]) -> dict[str, tuple[_Template, ...]]:
        templates = {}
        for role, ours in _OURS.items():
            names = self.names.get(role, ours)
            leaf = '' if role in _PARAMETERS else r'(\.weight|\.bias)'
            listed = (names,) if isinstance(names, str) else names
            templates[role] = tuple(_Template(spell(name), leaf) for name in listed)
        return templates

    @cached_property
    def _anywhere(self) -> re.Pattern[str]:
        names = '|'.join(template.pattern.pattern for role in _DISTINCTIVE for template in self._plain_templates[role])
        return re.compile(rf'((?:.+\.)?)(?:{names})')

    @property
    def stems(self) -> tuple[str, ...]:
        """The common beginnings of the names in stages and of the output norms."""
        return tuple(self._templates[role][0].stem for role in ('norm1', 'out_norm'))

    def prefix_of(self, key: str) -> str | None:
        """Return the prefix before a distinctive name of this family, or None if ``key`` does not end in one."""
        match = self._anywhere.fullmatch(key)
        return None if match is None else match[1]

    def write(self, name: Name) -> tuple[str, ...]:
        """Return the names of a parameter in this family: one, or one per part."""
        return tuple(template.write(name) for template in self._templates[name.role])

    def read(self, key: str) -> Name | None:
        """Return the parameter whose name in this family, as spelled by :func:`plain_name`, is ``key``, or None."""
        for role, templates in self._plain_templates.items():
            for part, template in enumerate(templates):
                numbers = template.read(key)
                if numbers is not None:
                    leaf = '' if role in _PARAMETERS else key[key.rindex('.') :]
                    return Name(role, **numbers, leaf=leaf, part=part)
        return None

    def decode(self, name: Name, parts: list[Tensor]) -> Tensor:
        """Convert a parameter of this family to our layout.

        Args:
            name: the parameter.
            parts: its tensors in this family.
        """
        tensor = parts[0] if len(parts) == 1 else torch.cat([torch.atleast_1d(part) for part in parts])
        if self._is_sliced(name) and tensor.shape[-1:].numel() % 4 == 0:
            # (2x2 column by column, C) to (C, 2x2 row by row)
            tensor = tensor.unflatten(-1, (2, 2, -1)).transpose(-3, -2).movedim(-1, -3).flatten(-3)
        if name.role == 'position' and tensor.ndim == 4:
            tensor = tensor.flatten(2).transpose(1, 2)
        return tensor

    def encode(self, name: Name, tensor: Tensor, grid: tuple[int, int] | None = None) -> list[Tensor]:
        """Undo :meth:`decode`.

        Args:
            name: the parameter.
            tensor: its tensor in our layout.
            grid: (H, W) of the absolute position embedding, if the model has one.
        """
        if self._is_sliced(name):
            tensor = tensor.unflatten(-1, (-1, 2, 2)).movedim(-3, -1).transpose(-3, -2).flatten(-3)
        if name.role == 'position' and self.position_map and grid is not None:
            tensor = tensor.transpose(1, 2).unflatten(2, grid)
        return list(tensor.chunk(len(self.write(name)))) if name.role == 'qkv' else [tensor]

    def _is_sliced(self, name: Name) -> bool:
        return self.slice_order and (name.role == 'merge' or (name.role == 'merge_norm' and self.version == 1))


def plain_name(key: str) -> str:
    """Return ``key`` without components of wrappers and in the spelling of the name tables."""
    for pattern, replacement in _RESPELLINGS:
        key = pattern.sub(replacement, key)
    return key


MMDET = Family('mmdet', index='square')
