"""Parameter names and layouts of Swin Transformers in other libraries, and how to recognise them.

A family is a table of its names by role. Loading and export use the same table. :func:`choose` finds the backbones in a
checkpoint only by these names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from swin_dense.checkpoint.unpickler import StandIn
from swin_dense.utils.checks import first_few, shortened
from swin_dense.utils.choices import FAMILIES
from swin_dense.utils.errors import CheckpointError
from swin_dense.utils.names import unwrapped

Value = Tensor | StandIn

COORDINATES = 'relative_coords_table'  # the buffer of V2 that determines its windows


def _merging(downsample: str) -> dict[str, str]:
    """Return the names of a patch merging by role."""
    return {'merge_norm': f'{downsample}.norm', 'merge': f'{downsample}.reduction'}


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
        **_merging(downsample),
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
_RESPELLINGS: dict[str, str | Callable[[re.Match[str]], str]] = {
    r'\blayers_(?=\d+\.)': 'layers.',
    r'\bswin(?:v2)?\.(?=embeddings\.|encoder\.|layernorm\.)': '',
    r'\bpixel_level_module\.encoder\.model\.(?=embeddings\.|encoder\.|layernorm\.|$)': 'pixel_level_module.encoder.',
    r'\bhidden_states_norms\.(\d{1,3})\b': lambda match: f'hidden_states_norms.stage{int(match[1]) + 1}',
    r'\b(?:rpe_mlp|continuous_position_bias_mlp)\.': 'cpb_mlp.',
    r'\battention\.self\.query\b': 'attention.q_proj',
    r'\battention\.self\.key\b': 'attention.k_proj',
    r'\battention\.self\.value\b': 'attention.v_proj',
    r'\battention\.self\.(?=relative_position_bias_table)': 'attention.relative_position_bias.',
    r'\battention\.output\.dense\b': 'attention.o_proj',
    r'(?<=[\d}]\.)intermediate\.dense\b': 'mlp.fc1',
    r'(?<=[\d}]\.)output\.dense\b': 'mlp.fc2',
}


@dataclass(frozen=True)
class Name:
    """A parameter identified by its role, as in ``Name('qkv', stage=0, block=1, leaf='.weight')``."""

    role: str  # a key of the name tables
    stage: int = 0  # also outside of stages
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
    network: str = 'swin'  # or 'swinv2', whose merging norm follows the reduction
    joined_bias: bool = False  # V2's query and value biases are in one tensor, with an unused key bias
    coordinates: bool = False  # the coordinates of each V2 position network are stored as a buffer

    @cached_property
    def stems(self) -> tuple[str, ...]:
        """The beginnings of the names in stages and of the output norms, up to the number."""
        return tuple(self.templates(role)[0].partition('{')[0] for role in ('norm1', 'out_norm'))

    def is_numbered(self, key: str) -> bool:
        """Return whether ``key`` is in a numbered stage or output norm, as all parameters of blocks and outputs are."""
        return any(re.match(rf'{re.escape(stem)}\d', key) for stem in self.stems)

    def templates(self, role: str) -> tuple[str, ...]:
        """Return the names of a role, with placeholders for numbers: a single name, or a name per part."""
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
        """Return the names of a parameter in this family: a single name, or a name per part."""
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

    def decode(self, name: Name, parts: list[Tensor], is_transposed: bool) -> Tensor:
        """Convert the tensors of a parameter in this family to our layout.

        ``is_transposed`` says that linear weights are (inputs, outputs).
        """
        if is_transposed and name.role in LINEAR:
            parts = [part.T if part.ndim == 2 else part for part in parts]
        tensor = parts[0] if len(parts) == 1 else torch.cat([torch.atleast_1d(part) for part in parts])
        if self.slice_order and name.role in _MERGED[self.network] and tensor.shape[-1:].numel() % 4 == 0:
            # (2x2 column by column, C) to (C, 2x2 row by row)
            by_column = tensor.unflatten(-1, (2, 2, -1))
            tensor = by_column.transpose(-3, -2).movedim(-1, -3).flatten(-3)
        if name.role == 'position' and tensor.ndim == 4:
            tensor = tensor.flatten(2).transpose(1, 2)
        return tensor

    def encode(self, name: Name, tensor: Tensor, grid: tuple[int, int] | None = None) -> Sequence[Tensor]:
        """Undo :meth:`decode`; ``grid`` is (H, W) of the absolute position embedding, if the model has one."""
        if self.slice_order and name.role in _MERGED[self.network]:
            by_row = tensor.unflatten(-1, (-1, 2, 2))
            tensor = by_row.movedim(-3, -1).transpose(-3, -2).flatten(-3)
        if name.role == 'position' and self.position_map and grid is not None:
            tensor = tensor.transpose(1, 2).unflatten(2, grid)
        return tensor.chunk(len(self.templates(name.role)))


def is_standard(name: str) -> bool:
    """Return whether one of our names is that of a backbone parameter, for any options."""
    read = MMDET.read(name)
    return read is not None and read.role != 'final_norm'


def plain_name(key: str) -> str:
    """Return ``key`` without components of wrappers and in the spelling of the name tables."""
    key = unwrapped(key)
    for pattern, replacement in _RESPELLINGS.items():
        key = re.sub(pattern, replacement, key)
    return key


MMDET = Family('mmdet', index='square')
# The names of the authors' code.
OFFICIAL = Family(
    'official',
    {
        'patch_proj': 'patch_embed.proj',
        **_names('layers.{stage}.blocks.{block}', 'attn', ('mlp.fc1', 'mlp.fc2'), 'layers.{stage}.downsample'),
    },
    slice_order=True,
    position_map=True,
)
MMSEG = replace(MMDET, name='mmseg')  # mmdet, mmseg and mmpretrain share one layout
MMPRETRAIN = replace(MMDET, name='mmpretrain')
TIMM = replace(
    OFFICIAL,
    name='timm',
    names={**OFFICIAL.names, **_merging('layers.{next}.downsample')},
    position_map=False,
)
TORCHVISION = Family(
    'torchvision',
    {
        'patch_proj': 'features.0.0',
        'patch_norm': 'features.0.2',
        **_names('features.{odd}.{block}', 'attn', ('mlp.0', 'mlp.3'), 'features.{even}'),
    },
    slice_order=True,
    index='flat',
)
_TRANSFORMERS_BLOCK = 'encoder.layers.{stage}.blocks.{block}'
# The names of transformers 5.x, which also loads the names of older versions.
TRANSFORMERS = Family(
    'transformers',
    {
        'patch_proj': 'embeddings.patch_embeddings.projection',
        'patch_norm': 'embeddings.norm',
        'position': 'embeddings.position_embeddings',
        **_names(_TRANSFORMERS_BLOCK, 'attention', ('mlp.fc1', 'mlp.fc2'), 'encoder.layers.{stage}.downsample'),
        'norm1': f'{_TRANSFORMERS_BLOCK}.layernorm_before',
        'table': f'{_TRANSFORMERS_BLOCK}.attention.relative_position_bias.relative_position_bias_table',
        'qkv': tuple(f'{_TRANSFORMERS_BLOCK}.attention.{part}_proj' for part in 'qkv'),
        'proj': f'{_TRANSFORMERS_BLOCK}.attention.o_proj',
        'norm2': f'{_TRANSFORMERS_BLOCK}.layernorm_after',
        'out_norm': 'hidden_states_norms.stage{next}',
        'final_norm': 'layernorm',
    },
    slice_order=True,
    inner='swin.',
)
OFFICIAL_V2 = replace(OFFICIAL, network='swinv2', coordinates=True)
TIMM_V2 = replace(TIMM, network='swinv2')
TORCHVISION_V2 = replace(TORCHVISION, network='swinv2', joined_bias=True, coordinates=True)
TRANSFORMERS_V2 = replace(
    TRANSFORMERS,
    names={
        **{role: name for role, name in TRANSFORMERS.names.items() if role != 'out_norm'},
        'logit_scale': f'{_TRANSFORMERS_BLOCK}.attention.self.logit_scale',
        'cpb1': f'{_TRANSFORMERS_BLOCK}.attention.self.continuous_position_bias_mlp.0',
        'cpb2': f'{_TRANSFORMERS_BLOCK}.attention.self.continuous_position_bias_mlp.2',
        'q_bias': f'{_TRANSFORMERS_BLOCK}.attention.self.query.bias',
        'v_bias': f'{_TRANSFORMERS_BLOCK}.attention.self.value.bias',
        'qkv': tuple(f'{_TRANSFORMERS_BLOCK}.attention.self.{part}' for part in ('query', 'key', 'value')),
        'proj': f'{_TRANSFORMERS_BLOCK}.attention.output.dense',
        'fc1': f'{_TRANSFORMERS_BLOCK}.intermediate.dense',
        'fc2': f'{_TRANSFORMERS_BLOCK}.output.dense',
    },
    inner='',
    network='swinv2',
)
MMPRETRAIN_V2 = replace(MMPRETRAIN, names=_merging('stages.{next}.downsample'), network='swinv2', coordinates=True)
OURS_V2 = Family('swin_dense', network='swinv2')
ALL: tuple[Family, ...] = (OFFICIAL, MMDET, MMSEG, MMPRETRAIN, TIMM, TORCHVISION, TRANSFORMERS)
ALL += (OFFICIAL_V2, OURS_V2, MMPRETRAIN_V2, TIMM_V2, TORCHVISION_V2, TRANSFORMERS_V2)
# One family for each naming scheme of blocks. Those that share a scheme differ in the network and the place of merging.
SCHEMES = (OFFICIAL, MMDET, TORCHVISION, TRANSFORMERS)
# Roles whose names distinguish families from each other and a Swin from other networks.
_DISTINCTIVE = {'norm1', 'qkv', 'proj', 'norm2', 'fc1', 'fc2'}
# Name components that mark a running average of the weights.
_AVERAGES = {'ema', 'ema_state_dict', 'model_ema', 'state_dict_ema', 'ema_model', 'module_ema'}
# The momentum encoder of contrastive pretraining, which is not used for dense prediction.
_MOMENTUM_BRANCHES = {'encoder_k'}
# Entries that distinguish libraries with the same names: the library, the end of the backbone's prefix, the beginning
# of an entry beside the backbone, and the label of the family.
_LABELS = (
    ('official', 'encoder.', 'encoder_k.', 'moby'),
    ('official', 'encoder.', 'encoder.mask_token', 'simmim'),
    ('mmdet', '', 'decode_head.', 'mmseg'),
    ('mmdet', '', 'head.fc.weight', 'mmpretrain'),
)


def choose(
    values: Mapping[str, Value], names: Collection[str], described: str, prefix: str | None, ema: bool
) -> tuple[Family, str, str]:
    """Return the family of the backbone to load, its label, and its prefix; see :func:`swin_dense.load_checkpoint`.

    ``names`` are the keys of ``values``, as :func:`plain_name` spells them.

    Raises CheckpointError if there is no backbone, or if there are several and the options do not choose between them.
    """
    found = _names_of_blocks(names)
    # A few unrelated keys may match, and the schemes of two libraries have the names of the MLP in common, but a
    # backbone, whole or partly wrapped, has more kinds of parameters.
    kinds = {choice: len(_DISTINCTIVE & {name.role for name in read}) for choice, read in found.items()}
    candidates = [choice for choice in found if kinds[choice]]
    if not candidates:
        raise _none_found(values, described)
    # mmengine's EMAHook saves the average as state_dict and the current weights as ema_state_dict.
    ema = ema and 'ema_state_dict.steps' not in values
    chosen = []
    for choice in candidates:
        components = set(choice[1].split('.'))  # of the prefix
        is_average = bool(_AVERAGES & components)
        if is_average == ema and not _MOMENTUM_BRANCHES & components:
            chosen.append(choice)
    if prefix is not None:
        named = _named(candidates, prefix)
        chosen = [choice for choice in named if choice in chosen] or named
    most = max((kinds[choice] for choice in chosen), default=0)
    chosen = [choice for choice in chosen if kinds[choice] >= min(3, most)]
    if len(chosen) == 1:
        scheme, prefix = chosen[0]
        return *_family_of(scheme, found[chosen[0]], prefix, names), prefix
    shown = first_few(sorted({repr(shortened(start)) for _, start in chosen or candidates}))
    if chosen:
        why = f'the checkpoint contains several backbones, under {shown}; choose one with prefix='
    elif prefix is not None:
        why = f'no backbone under prefix={prefix!r}, only under {shown}'
    elif ema:
        why = 'the checkpoint contains no running average of the weights; omit ema=True'
    else:
        why = f'the checkpoint contains only running averages, under {shown}; load them with ema=True'
    raise CheckpointError(f'{described}: {why}')


def _names_of_blocks(names: Collection[str]) -> dict[tuple[Family, str], list[Name]]:
    """Return the names that are those of a block, by naming scheme of blocks and prefix."""
    found: dict[tuple[Family, str], list[Name]] = {}
    for name in names:
        for scheme in SCHEMES:
            start = f'.{name}'.rfind(f'.{scheme.stems[0]}')
            read = scheme.read(name[start:]) if start >= 0 else None
            if read is not None:
                found.setdefault((scheme, name[:start]), []).append(read)
    return found


def _named(candidates: Collection[tuple[Family, str]], prefix: str) -> list[tuple[Family, str]]:
    """Return the backbones under a prefix, or else those whose prefix contains its components."""
    wanted = plain_name(f'{prefix.rstrip(".")}.') if prefix else ''
    named = [choice for choice in candidates if choice[1] == wanted]
    if named or not wanted:
        return named
    return [choice for choice in candidates if f'.{wanted}' in f'.{choice[1]}']


def _family_of(scheme: Family, read: list[Name], prefix: str, names: Collection[str]) -> tuple[Family, str]:
    """Return the family of those that share the names of blocks, and its label in reports."""
    # Stages may begin with patch merging, as in timm, so that the last stage has a merging layer.
    last = max(name.stage for name in read if name.block is not None)
    merges_first = any(name.role in ('merge', 'merge_norm') and name.stage == last for name in read)
    # Only Swin V2 has both; Swin V1 and other networks called "V2" do not.
    own = [name for name in names if name.startswith(prefix)]
    is_v2 = any(name.endswith('.logit_scale') for name in own) and any('.cpb_mlp.' in name for name in own)
    network = 'swinv2' if is_v2 else 'swin'
    sharing = [family for family in ALL if family.network == network and family.stems[0] == scheme.stems[0]]
    fitting = [family for family in sharing if ('{next}' in family.templates('merge')[0]) == merges_first]
    family = (fitting or sharing)[0]
    for library, end, beside, label in _LABELS:
        start = outside(prefix) + beside
        may_be = family.name == library and prefix.endswith(end)
        if may_be and any(name.startswith(start) for name in names):
            return family, label
    return family, family.name


def outside(prefix: str) -> str:
    """Return the prefix of the parent of the module with this prefix."""
    return ''.join(prefix[:-1].rpartition('.')[:2])


def _none_found(values: Mapping[str, Value], described: str) -> CheckpointError:
    objects = {name: value for name, value in values.items() if isinstance(value, StandIn)}
    tensors = [name for name in values if name not in objects]
    models = [name for name, value in objects.items() if value.is_module]
    if models and not tensors:
        where = f' under {shortened(models[0])!r}' if models[0] else ''
        kind = shortened(objects[models[0]].kind)
        return CheckpointError(
            f'{described} holds a whole model, pickled as a {kind}{where}, not its weights. Reading it would run the '
            'code of its class; nothing was run. Where the class is installed, save the weights instead: '
            "torch.save(model.state_dict(), 'weights.pth'). Only if you trust the author of the file, load it with "
            'load_checkpoint(..., trust=True)'
        )
    kinds = first_few(sorted({value.kind for value in objects.values()}))
    ignored = f' and objects of {kinds}, which are not read' if objects else ''
    return CheckpointError(
        f'{described}: no parameters of a Swin Transformer were found; the checkpoint contains '
        f'{first_few(tensors) or "no tensors"}{ignored}. Supported families: {", ".join(FAMILIES)}'
    )
