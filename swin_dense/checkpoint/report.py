"""The report of loading a checkpoint, and the errors that explain why it does not fit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swin_dense.archs.arch import published_letter
from swin_dense.utils.checks import first_few, shortened
from swin_dense.utils.errors import CheckpointError

_LOAD_WHAT_FITS = (
    'To load what fits and keep the rest, use load_checkpoint(..., allow_partial=True), or in a config '
    'allow_partial=True as an option of the backbone, which also applies to load_from.'
)


@dataclass
class Report:
    """The result of loading a checkpoint: lists of the model's parameters and of the checkpoint's tensors."""

    source: str  # the file, address or kind of object that was loaded
    family: str  # the library whose parameter names the checkpoint uses
    prefix: str  # of the backbone's names in the checkpoint
    loaded: list[str] = field(default_factory=list)  # parameters of the backbone, including resized ones
    resized: dict[str, str] = field(default_factory=dict)  # parameters of the backbone, mapped to the change
    missing: list[str] = field(default_factory=list)  # parameters that were not loaded and keep their values
    # Of the missing ones, those that no checkpoint has: norms of additional outputs, and parameters that no Swin has.
    new: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)  # of the missing: another shape or kind
    damaged: dict[str, str] = field(default_factory=dict)  # of the missing: the number of NaN or infinite values
    left_out: dict[str, str] = field(default_factory=dict)  # entries that were skipped on purpose, and why
    unexpected: list[str] = field(default_factory=list)  # entries that have no parameter in the backbone
    version: int = 1  # of Swin, 1 or 2
    notes: list[str] = field(default_factory=list)  # further remarks on the checkpoint
    doubts: list[str] = field(default_factory=list)  # what may make the outputs wrong, although all parameters fit

    @property
    def level(self) -> int:
        """The logging level: WARNING if parameters were resized or miss without being new, or for doubts; else INFO."""
        is_whole = not self.resized and len(self.missing) == len(self.new)
        return logging.INFO if is_whole and not self.doubts else logging.WARNING

    @property
    def _absent(self) -> list[str]:
        """The subset of ``missing`` that the checkpoint could have and does not contain."""
        explained = {*self.new, *self.mismatched, *self.damaged}
        return [name for name in self.missing if name not in explained]

    def __str__(self) -> str:
        where = f' under {self.prefix!r}' if self.prefix else ''
        lines = [f'Loaded {len(self.loaded)} parameters of the backbone from {self.source}']
        lines.append(f'  family: {self.family}{where}, Swin V{self.version}')
        lines += [f'  resized {names}: {how}' for how, names in _grouped(self.resized)]
        lines += [f'  new, as the checkpoint cannot have them: {first_few(self.new)}'] if self.new else []
        lines += [f'  wrong shape or kind, not loaded: {names}: {how}' for how, names in _grouped(self.mismatched)]
        lines += [f'  damaged, not loaded: {names}: {how}' for how, names in _grouped(self.damaged)]
        lines += [f'  missing, not loaded: {first_few(self._absent)}'] if self._absent else []
        lines += [f'  left out, {reason}: {names}' for reason, names in _grouped(self.left_out)]
        lines += [f'  unexpected, ignored: {first_few(self.unexpected)}'] if self.unexpected else []
        lines += [f'  note: {note}' for note in self.notes]
        lines += [f'  warning: {doubt}' for doubt in self.doubts]
        return '\n'.join(lines)


def _grouped(reasons: dict[str, str]) -> list[tuple[str, str]]:
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    return [(reason, first_few(names)) for reason, names in groups.items()]


def misfit(report: Report, other: str, causes: Sequence[str], excess: Sequence[str] = ()) -> CheckpointError:
    """Return the error of a failed load: the likely cause, then the parameters.

    ``other`` says what the checkpoint is, if it is nearly a Swin. ``causes`` are those of other misfits, and ``excess``
    the keys of a Swin that are not part of the model.
    """
    lines = [f'{report.source} ({report.family}) does not fit the model, which keeps its weights.']
    lines += [other] if other else causes
    if report._absent:
        lines.append(f'Missing in the checkpoint: {first_few(report._absent)}.')
    if report.mismatched:
        wrong_shapes = [f'{name} is {how}' for name, how in report.mismatched.items()]
        lines.append(f'Wrong shape or kind: {first_few(wrong_shapes, separator="; ")}.')
    if report.damaged:
        values = [f'{name}: {how}' for name, how in report.damaged.items()]
        lines.append(
            f'Damaged: {first_few(values, separator="; ")}. The training diverged, or the values overflowed in a '
            'conversion to a smaller type; use an earlier checkpoint.'
        )
    if excess:
        lines.append(f'In the checkpoint, but not in the model: {first_few(excess)}.')
    if (report.missing or excess) and not other:  # of what is nearly a Swin, what fits is of no use without the rest
        lines.append(_LOAD_WHAT_FITS)
    return CheckpointError('\n  '.join(lines))


def of_other_version(network: str, given: Mapping[str, Any]) -> str:
    """Return why a network, 'swin' or 'swinv2', does not fit a model of the other; see :func:`differences`."""
    letter = published_letter(given)
    name = f'{network}_{letter}'
    arch = f', arch={name!r}' if letter else ''
    by_name = f', or create_backbone({name!r})' if letter else ''
    if network == 'swin':
        kind = f'Swin V1{arch}; the model is a Swin V2. Build SwinBackbone, SwinDense in a config'
    else:
        kind = f'Swin V2{arch}; the model is a Swin V1. Build SwinV2Backbone, SwinDenseV2 in a config'
    return f'It is a {kind}{by_name}.'


def option_conflicts(given: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
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
