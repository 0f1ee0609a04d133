"""Explain why a checkpoint does not fit a model, or is no Swin. Only failing loads import this module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swin_dense.archs.arch import published_letter
from swin_dense.checkpoint.convert import ConvertedBackbone
from swin_dense.checkpoint.families import is_standard
from swin_dense.checkpoint.options import BLOCK, options_of
from swin_dense.checkpoint.report import Report
from swin_dense.utils.checks import first_few, shortened
from swin_dense.utils.errors import CheckpointError

_STEM = 'patch_embed.projection.weight'
_LOAD_WHAT_FITS = (
    'To load what fits and keep the rest, use load_checkpoint(..., allow_partial=True), or in a config '
    'allow_partial=True as an option of the backbone, which also applies to load_from.'
)


def misfit(
    report: Report,
    weights: ConvertedBackbone,
    shapes: Mapping[str, tuple[int, ...] | None],
    own: Iterable[str],
    excess: Sequence[str],
) -> CheckpointError:
    """Return the error of a failed load: the likely cause, then the parameters.

    ``shapes`` are those of the model, by our names; ``own`` are its parameters that no Swin has, such as those of LoRA;
    and ``excess`` are the keys of a Swin in the checkpoint that are not part of the model.
    """
    wanted = options_of({name: shape for name, shape in shapes.items() if shape is not None})
    causes = _option_conflicts(options_of(weights.shapes), wanted)
    foreign = [] if causes else _foreign(weights, own)
    if foreign and (report.absent or report.mismatched):
        return _error(report, [_describe_foreign(foreign)], excess, allows_partial=False)
    return _error(report, causes, excess)


def other_network(report: Report, weights: ConvertedBackbone) -> CheckpointError:
    """Return the error of loading a Swin of one version into a model of the other."""
    # Parameters beside the blocks may belong to another part of a model.
    foreign = [name for name in _foreign(weights) if weights.family.is_numbered(name) or name.startswith('patch_embed')]
    if foreign:
        return _error(report, [_describe_foreign(foreign)], allows_partial=False)
    return _error(report, [_describe_version(weights.family.network, options_of(weights.shapes))])


def unknown_size(weights: ConvertedBackbone) -> str:
    """Return why the size of a Swin does not follow from its parameters, by those that it has or lacks."""
    for name, parameter in weights.parameters.items():
        if parameter.unusable:
            return f'{name} is {parameter.unusable}.'
    blocks = dict.fromkeys(match[0] for match in map(BLOCK.match, weights.parameters) if match)
    parts = ('norm1', 'attn.w_msa.qkv', 'attn.w_msa.proj', 'norm2', 'ffn.layers.0.0', 'ffn.layers.1')
    needed = [f'{block}{part}.weight' for block in blocks for part in parts]
    missing = [name for name in needed if name not in weights.tensors]
    if missing:
        foreign = _foreign(weights)
        return f'It lacks {first_few(missing)}. {_describe_foreign(foreign) if foreign else ""}'.rstrip()
    shapes = [f'{name} is {shape}' for name, shape in weights.shapes.items() if name.endswith('qkv.weight')]
    return f'The channels of its stages do not double: {first_few(shapes)}.'


def _foreign(weights: ConvertedBackbone, own: Iterable[str] = ()) -> list[str]:
    """Return the parameters of a checkpoint that no Swin has, nor the model: ``own`` are those of the model."""
    foreign = [name for name in weights.parameters if not is_standard(name) and name not in own]
    patches = weights.shapes.get('patch_embed.projection.weight', ())
    if len(patches) > 4:  # of videos and volumes
        foreign.insert(0, f'patch_embed.projection.weight {patches}')
    return foreign


def _describe_foreign(foreign: Sequence[str]) -> str:
    return (
        f'It has parameters that no Swin has: {first_few(foreign)}. If it is another network, such as a Swin of videos '
        'or of sounds, use the code of that network. If it is a Swin whose layers were wrapped or converted, undo this '
        'where the model is built, and save its state dict then: merge_and_unload() of PEFT merges LoRA, and weights '
        'must be saved before a model is quantised.'
    )


def _error(
    report: Report, causes: Sequence[str], excess: Sequence[str] = (), allows_partial: bool = True
) -> CheckpointError:
    lines = [f'{report.source} ({report.family}) does not fit the model, which keeps its weights.', *causes]
    if report.absent:
        lines.append(f'Missing in the checkpoint: {first_few(report.absent)}.')
    if report.mismatched:
        wrong_shapes = [f'{name} is {how}' for name, how in report.mismatched.items()]
        lines.append(f'Wrong shape or kind: {first_few(wrong_shapes, separator="; ")}.')
    if report.damaged:
        values = [f'{name}: {how}' for name, how in report.damaged.items()]
        lines.append(
            f'Damaged: {first_few(values, separator="; ")}. The training diverged, or the values overflowed in a '
            'conversion to a smaller type; use an earlier checkpoint.'
        )
    extra = dict.fromkeys([*excess, *report.unexpected] if report.absent or excess else [])
    if extra:  # a missing parameter may have another name
        lines.append(f'In the checkpoint, but not in the model: {first_few(extra)}.')
    # Without the patch embedding, the parameters that fit are of no use.
    if (report.missing or excess) and allows_partial and _STEM not in report.missing:
        lines.append(_LOAD_WHAT_FITS)
    return CheckpointError('\n  '.join(lines))


def _describe_version(network: str, given: Mapping[str, Any]) -> str:
    """Return why a network, 'swin' or 'swinv2', does not fit a model of the other."""
    letter = published_letter(given)
    name = f'{network}_{letter}'
    arch = f', arch={name!r}' if letter else ''
    by_name = f', or create_backbone({name!r})' if letter else ''
    if network == 'swin':
        kind = f'Swin V1{arch}; the model is a Swin V2. Build SwinBackbone, SwinDense in a config'
    else:
        kind = f'Swin V2{arch}; the model is a Swin V1. Build SwinV2Backbone, SwinDenseV2 in a config'
    return f'It is a {kind}{by_name}.'


def _option_conflicts(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return one line for each difference between the options of a checkpoint and those of the model."""
    lines = []
    # The model may end at an earlier stage on purpose.
    stages = len(wanted.get('depths', ()))
    comparable = {key: value[:stages] if isinstance(value, tuple) else value for key, value in given.items()}
    if len(comparable.get('depths', ())) < stages:  # compare the heads of common stages only
        common_stages = len(comparable.get('num_heads', ()))
        wanted = {**wanted, 'num_heads': wanted.get('num_heads', ())[:common_stages]}
    different = [key for key, value in comparable.items() if key in wanted and value != wanted[key]]
    of_arch = [key for key in different if key in ('embed_dims', 'depths', 'num_heads')]
    if of_arch:
        letter = published_letter(given)
        options = {'arch': letter} if letter else {key: given[key] for key in of_arch}
        advice = ', '.join(shortened(f'{key}={value!r}') for key, value in options.items())
        shown = ['depths', 'embed_dims'] + ['num_heads'] * ('num_heads' in of_arch)
        lines.append(
            f'The checkpoint is {_architecture(given, shown)}, the model is {_architecture(wanted, shown)}: '
            f'build the model with {advice}.'
        )
    for key in different:
        if key not in ('in_channels', *of_arch):
            lines.append(
                f'The checkpoint was made with {key}={given[key]!r}, the model with {key}={wanted[key]!r}; '
                f'build the model with {key}={given[key]!r}.'
            )
    return lines


def _architecture(options: Mapping[str, Any], keys: Sequence[str]) -> str:
    letter = published_letter(options)
    shown = ' and '.join(shortened(f'{key} {options[key]}') for key in keys if key in options)
    return f'a Swin-{letter.upper()} with {shown}' if letter else f'a Swin with {shown}'
