"""Choose the backbone of a checkpoint, and recognise its family, by the names of its parameters alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

from swin_dense.checkpoint.families import FAMILY_OF_SCHEME, MARKS_OF_V2, SCHEMES, Family, plain_name
from swin_dense.checkpoint.report import CheckpointError, listed
from swin_dense.checkpoint.unpickler import StandIn
from swin_dense.utils.checks import shortened
from swin_dense.utils.choices import FAMILIES

Value = Tensor | StandIn
# A naming scheme of blocks, and the prefix of the names.
Candidate = tuple[Family, str]

# Roles whose names distinguish families from each other and a Swin from other networks.
_DISTINCTIVE = ('norm1', 'qkv', 'proj', 'norm2', 'fc1', 'fc2')
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
) -> Candidate:
    """Return the naming scheme and the prefix of the backbone to load; see :func:`swin_dense.load_checkpoint`.

    ``names`` are the keys of ``values``, as :func:`plain_name` spells them.

    Raises CheckpointError if there is none, or if there are several and the options do not choose one.
    """
    candidates: dict[Candidate, set[str]] = {}  # with the roles of their parameters
    for name in names:
        for scheme in SCHEMES:
            start = f'.{name}'.rfind(f'.{scheme.stems[0]}')
            read = scheme.read(name[start:]) if start >= 0 else None
            if read is not None and read.role in _DISTINCTIVE:
                candidates.setdefault((scheme, name[:start]), set()).add(read.role)
    if not candidates:
        raise _none_found(values, described)
    # mmengine's EMAHook saves the average as state_dict and the current weights as ema_state_dict.
    ema = ema and 'ema_state_dict.steps' not in values
    parts = {choice: set(choice[1].split('.')) for choice in candidates}
    chosen = [c for c in candidates if bool(_AVERAGES & parts[c]) == ema and not _MOMENTUM_BRANCHES & parts[c]]
    if prefix is not None:
        # Those with this prefix, or else those whose prefix contains its components.
        wanted = plain_name(f'{prefix.rstrip(".")}.') if prefix else ''
        named = [choice for choice in candidates if choice[1] == wanted]
        if not named and wanted:
            named = [choice for choice in candidates if f'.{wanted}' in f'.{choice[1]}']
        chosen = [choice for choice in named if choice in chosen] or named
    # A few unrelated keys may match, and the schemes of two libraries have the names of the MLP in common, but a
    # backbone, whole or partly wrapped, has more kinds of parameters.
    enough = min(3, max((len(candidates[choice]) for choice in chosen), default=0))
    chosen = [choice for choice in chosen if len(candidates[choice]) >= enough]
    if len(chosen) != 1:
        raise CheckpointError(f'{described}: {_why_no_choice(candidates, chosen, prefix, ema)}')
    return chosen[0]


def family_of(scheme: Family, prefix: str, names: Collection[str]) -> tuple[Family, str]:
    """Return the family of the names with a prefix, of those that share the names of blocks, and its label."""
    own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    read = [name for name in map(scheme.read, own) if name is not None]
    last = max((name.stage for name in read if name.block is not None), default=None)
    merges_first = any(name.role in ('merge', 'merge_norm') and name.stage == last for name in read)
    network = 'swinv2' if all(any(map(mark.search, own)) for mark in MARKS_OF_V2) else 'swin'
    family = FAMILY_OF_SCHEME.get((scheme, network, merges_first))
    family = family or FAMILY_OF_SCHEME.get((scheme, network, False), scheme)
    for library, end, beside, label in _LABELS:
        start = outside(prefix) + beside
        may_be = family.name == library and prefix.endswith(end)
        if may_be and any(name.startswith(start) for name in names):
            return family, label
    return family, family.name


def outside(prefix: str) -> str:
    """Return the prefix of the module that contains the one with this prefix."""
    return ''.join(prefix[:-1].rpartition('.')[:2])


def _none_found(values: Mapping[str, Value], described: str) -> CheckpointError:
    objects = {name: value for name, value in values.items() if isinstance(value, StandIn)}
    tensors = [name for name in values if name not in objects]
    models = [name for name, value in objects.items() if value.is_module]
    if models and not tensors:
        where = f' under {shortened(models[0])!r}' if models[0] else ''
        kind = shortened(objects[models[0]].kind)
        return CheckpointError(
            f'{described} holds a whole model, pickled as a {kind}{where}, not its weights. Reading '
            'it would run the code of its class; nothing was run. Where the class is installed, save the weights '
            "instead: torch.save(model.state_dict(), 'weights.pth')"
            '. Only if you trust the author of the file, load it with load_checkpoint(..., trust=True)',
        )
    kinds = listed(sorted({value.kind for value in objects.values()}))
    ignored = f' and objects of {kinds}, which are not read' if objects else ''
    return CheckpointError(
        f'{described}: no parameters of a Swin Transformer were found; the checkpoint contains '
        f'{listed(tensors) or "no tensors"}{ignored}. Supported families: {", ".join(FAMILIES)}'
    )


def _why_no_choice(candidates: Iterable[Candidate], chosen: list[Candidate], prefix: str | None, ema: bool) -> str:
    if chosen:
        return f'the checkpoint contains several backbones, under {_prefixes(chosen)}; choose one with prefix='
    if prefix is not None:
        return f'no backbone under prefix={prefix!r}, only under {_prefixes(candidates)}'
    if ema:
        return 'the checkpoint contains no running average of the weights; omit ema=True'
    return f'the checkpoint contains only running averages, under {_prefixes(candidates)}; load them with ema=True'


def _prefixes(choices: Iterable[Candidate]) -> str:
    return listed(sorted({repr(shortened(prefix)) for _, prefix in choices}))
