"""How the names and layouts of a family's parameters are read and written.

A family is a table from our parameter names to its own. The same table serves both directions, loading and export. The
tables stand in :mod:`swin_dense.checkpoint.families`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

# Our names, by the role of the module or parameter. These are the names of mmdet and mmseg.
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
# Roles that are parameters; the others are modules with a weight or a bias.
_PARAMETERS = ('position', 'table', 'logit_scale', 'q_bias', 'v_bias')
# What may stand for a stage or block number in a name: number = scale * ours + offset.
_NUMBERS = {
    'stage': ('stage', 1, 0),
    'stage+1': ('stage', 1, 1),
    '2*stage+1': ('stage', 2, 1),
    '2*stage+2': ('stage', 2, 2),
    'block': ('block', 1, 0),
}
# Roles whose spelling tells one family from another and a Swin from other networks.
_TELLING = ('norm1', 'table', 'qkv', 'proj', 'norm2', 'fc1', 'fc2')

# Other spellings of the same names, brought to the ones above: what wrappers insert, timm's features_only, the
# base model's name, its MaskFormer's norms beside the base model and the older names of transformers.
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
    """A parameter, by role: ``Name('qkv', stage=0, block=1, leaf='.weight')``.

    Attributes:
        role: a key of the name tables.
        stage: stage number, or None.
        block: block number, or None.
        leaf: '.weight', '.bias' or '' for a parameter that belongs to no submodule.
        part: which part of ours it holds where a family keeps several tensors for it, as q, k and v.
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
    """A name with numbers left open, which can be filled in and recognised."""

    def __init__(self, template: str, leaf: str) -> None:
        self._pieces = re.split(r'\{(.+?)\}', template)
        pattern = ''.join(r'(\d+)' if index % 2 else re.escape(piece) for index, piece in enumerate(self._pieces))
        self.pattern = re.compile(pattern + leaf)

    @property
    def stem(self) -> str:
        """What comes before the first number."""
        return self._pieces[0]

    def write(self, name: Name) -> str:
        filled = list(self._pieces)
        for index in range(1, len(filled), 2):
            attribute, scale, offset = _NUMBERS[filled[index]]
            filled[index] = str(scale * getattr(name, attribute) + offset)
        return ''.join(filled) + name.leaf

    def read(self, key: str) -> dict[str, int] | None:
        """Return the stage and block in ``key``, {} where it has none, or None if it is another name."""
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
    """The names and layouts of one code base.

    Attributes:
        name: what reports call it.
        names: role to name, where it differs from ours; a tuple where one tensor of ours is several there.
        slice_order: whether patch merging sorts its inputs by neighbour first, as against our order, that of
            ``nn.Unfold``, by channel first.
        position_map: whether the absolute position embedding is (1, C, H, W), as against our (1, L, C).
        index: whether each relative position table comes with an index buffer, 'square' (T, T) or 'flat' (T * T).
        inner: what stands before all names but those of the output norms.
        version: of Swin, 1 or 2. V2 has its merging norm after the reduction.
        joined_bias: whether V2's biases of queries and values are parts of one, with a part for keys that has no use.
        coordinates: whether each position network of V2 comes with its coordinates in a buffer.
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
        names = '|'.join(template.pattern.pattern for role in _TELLING for template in self._plain_templates[role])
        return re.compile(rf'((?:.+\.)?)(?:{names})')

    @property
    def stems(self) -> tuple[str, ...]:
        """What the names of everything in a stage and of the output norms begin with."""
        return tuple(self._templates[role][0].stem for role in ('norm1', 'out_norm'))

    def prefix_of(self, key: str) -> str | None:
        """Return what stands before a telling name of this family, or None if ``key`` does not end in one."""
        match = self._anywhere.fullmatch(key)
        return None if match is None else match[1]

    def write(self, name: Name) -> tuple[str, ...]:
        """Return what this family calls a parameter: one name, or one per part."""
        return tuple(template.write(name) for template in self._templates[name.role])

    def read(self, key: str) -> Name | None:
        """Return which parameter this family calls ``key``, in the plain spelling, or None."""
        for role, templates in self._plain_templates.items():
            for part, template in enumerate(templates):
                numbers = template.read(key)
                if numbers is not None:
                    leaf = '' if role in _PARAMETERS else key[key.rindex('.') :]
                    return Name(role, **numbers, leaf=leaf, part=part)
        return None

    def decode(self, name: Name, parts: list[Tensor]) -> Tensor:
        """Bring a parameter of this family into our layout.

        Args:
            name: which parameter.
            parts: its tensors.
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
            name: which parameter.
            tensor: in our layout.
            grid: (H, W) of the absolute position embedding, where there is one.
        """
        if self._is_sliced(name):
            tensor = tensor.unflatten(-1, (-1, 2, 2)).movedim(-3, -1).transpose(-3, -2).flatten(-3)
        if name.role == 'position' and self.position_map and grid is not None:
            tensor = tensor.transpose(1, 2).unflatten(2, grid)
        return list(tensor.chunk(len(self.write(name)))) if name.role == 'qkv' else [tensor]

    def _is_sliced(self, name: Name) -> bool:
        return self.slice_order and (name.role == 'merge' or (name.role == 'merge_norm' and self.version == 1))


def plain_name(key: str) -> str:
    """Return ``key`` in the spelling of the name tables."""
    for pattern, replacement in _RESPELLINGS:
        key = pattern.sub(replacement, key)
    return key


MMDET = Family('mmdet', index='square')
