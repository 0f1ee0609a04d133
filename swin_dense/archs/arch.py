"""The four published Swin architectures, shared by V1 and V2, and the names that select them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from swin_dense.archs.published import published
from swin_dense.utils import checks


@dataclass(frozen=True)
class Arch:
    """The size of a Swin: width, depth and number of heads."""

    embed_dims: int  # channels of the first stage; each later stage has twice as many
    depths: tuple[int, ...]  # transformer blocks per stage
    num_heads: tuple[int, ...]  # attention heads per stage

    def __post_init__(self) -> None:
        object.__setattr__(self, 'embed_dims', checks.integer('embed_dims', self.embed_dims))
        object.__setattr__(self, 'depths', checks.integers('depths', self.depths))
        heads = checks.integers('num_heads', self.num_heads)
        if len(heads) != len(self.depths):
            raise ValueError(
                f'depths and num_heads must both have one entry per stage, got depths={self.depths} and '
                f'num_heads={heads}; give both'
            )
        object.__setattr__(self, 'num_heads', heads)
        for stage, (channels, heads_of_stage) in enumerate(zip(self.channels, heads, strict=True)):
            if channels % heads_of_stage:
                raise ValueError(
                    f'num_heads[{stage}] = {heads_of_stage} does not divide the {channels} channels of stage '
                    f'{stage} (embed_dims={self.embed_dims}, doubled per stage); '
                    f'use a number of heads that divides {channels}'
                )

    @property
    def channels(self) -> tuple[int, ...]:
        return tuple(self.embed_dims * 2**stage for stage in range(len(self.depths)))


ARCHS = {
    't': Arch(96, (2, 2, 6, 2), (3, 6, 12, 24)),
    's': Arch(96, (2, 2, 18, 2), (3, 6, 12, 24)),
    'b': Arch(128, (2, 2, 18, 2), (4, 8, 16, 32)),
    'l': Arch(192, (2, 2, 18, 2), (6, 12, 24, 48)),
}
ALIASES = {'tiny': 't', 'small': 's', 'base': 'b', 'large': 'l'}


def published_letter(options: Mapping[str, Any]) -> str | None:
    """Return the letter of the first published architecture that ``options`` does not contradict, or None."""
    for letter, arch in ARCHS.items():
        if all(options.get(key, value) == value for key, value in vars(arch).items()):
            return letter
    return None


_PREFIX = re.compile(r'swin(?P<v2>[_-]?v2)?[_-]')


def split_name(name: str) -> tuple[str | None, str]:
    """Split a model name into its network, 'swin', 'swinv2' or None, and the rest: ('swin', 't') for 'swin_t'."""
    name = name.lower()
    prefix = _PREFIX.match(name)
    if prefix is None:
        return None, name
    return 'swinv2' if prefix['v2'] else 'swin', name[prefix.end() :]


def network_of(name: Any) -> str | None:
    """Return 'swin' or 'swinv2' if a name begins with it, otherwise, as for an architecture without a name, None."""
    return split_name(name)[0] if isinstance(name, str) else None


# The rest of a name, after the prefix, in timm's model names and in the authors' file names.
_CHECKPOINT_NAME = re.compile(rf'({"|".join(ALIASES)})_(?:patch4_)?window(\d+)')


def arch_letter(name: str, network: str = 'swin') -> str:
    """Return the letter of a named architecture: 't' for 't', 'tiny', 'swin_t' and 'swin_tiny'.

    Raises ValueError if the name is unknown, or has the prefix of another network than 'swin' or 'swinv2'.
    """
    named, short = split_name(name)
    if named not in (None, network):
        other = {'swin': 'SwinBackbone, SwinDense in a config', 'swinv2': 'SwinV2Backbone, SwinDenseV2 in a config'}
        raise ValueError(
            f'arch={name!r} belongs to {other[str(named)]}; build that class, or remove {named!r} from the name'
        )
    letter = ALIASES.get(short, short)
    if letter in ARCHS:
        return letter
    if name in published():
        raise ValueError(
            f'{name!r} is the name of published weights: checkpoint={name!r} loads them, and the architecture is '
            f'{published()[name].arch!r}'
        )
    if match := _CHECKPOINT_NAME.match(short):
        arch = f'{named or network}_{match[1][0]}'
        raise ValueError(
            f'{name!r} is a checkpoint name of timm or the authors; the architecture is {arch!r} with '
            f'window_size={int(match[2])}, and checkpoint= loads the weights'
        )
    names = [*ARCHS, *ALIASES]
    whole = [f'{prefix}_{letter}' for prefix in ('swin', 'swinv2') for letter in names]
    advice = checks.closest(short, names) or checks.closest(name, whole)
    if '.' in name:  # names of published weights have a dot
        advice = checks.closest(name, published())
    raise ValueError(f"arch must be one of {names}, with or without '{network}_' in front, got {name!r}{advice}")


def resolve_arch(arch: str | Mapping[str, Any] | Arch, network: str = 'swin') -> Arch:
    """Return the architecture for a name, as of :func:`arch_letter`, or a mapping with the fields of :class:`Arch`.

    Raises ValueError if the name is unknown or the values do not fit together, TypeError for another type.
    """
    if isinstance(arch, Arch):
        return arch
    if isinstance(arch, str):
        return ARCHS[arch_letter(arch, network)]
    if isinstance(arch, Mapping):
        expected = [field.name for field in fields(Arch)]
        if sorted(arch) != sorted(expected):
            raise ValueError(f'arch as a dict must have exactly the keys {expected}, got {sorted(arch)}')
        return Arch(**arch)
    raise TypeError(
        f'arch, the first argument, must be one of {list(ARCHS)} or a dict, got {arch!r} of type '
        f'{type(arch).__name__}; give other options by name'
    )
