"""The report of loading a checkpoint."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from swin_dense.utils.checks import first_few

_logger = logging.getLogger(__package__)

# Reasons to leave entries of a checkpoint out.
COMPUTED = 'buffers that are computed here'
OTHER_PARTS = 'other parts of the model'


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
    doubts: list[str] = field(default_factory=list)  # reasons why outputs may be wrong, although all parameters fit

    @property
    def level(self) -> int:
        """The logging level: WARNING if parameters were resized or miss without being new, or for doubts; else INFO."""
        is_whole = not self.resized and len(self.missing) == len(self.new)
        return logging.INFO if is_whole and not self.doubts else logging.WARNING

    @property
    def absent(self) -> list[str]:
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
        lines += [f'  missing, not loaded: {first_few(self.absent)}'] if self.absent else []
        lines += _without(self.left_out)
        lines += [f'  unexpected, ignored: {first_few(self.unexpected)}'] if self.unexpected else []
        lines += [f'  note: {note}' for note in self.notes]
        lines += [f'  warning: {doubt}' for doubt in self.doubts]
        return '\n'.join(lines)


def log_report(report: Report) -> None:
    """Log the report of a load at its level."""
    _logger.log(report.level, '%s', report)


def _without(left_out: dict[str, str]) -> list[str]:
    """Return a line for each reason to leave entries out, but for buffers, which every model computes.

    Of the other parts of a model, such as a detector's heads, the line names the parts and not their parameters.
    """
    of_others = [key.split('.') for key, reason in left_out.items() if reason == OTHER_PARTS]
    rest = {key: reason for key, reason in left_out.items() if reason not in (OTHER_PARTS, COMPUTED)}
    lines = [f'  left out, {reason}: {names}' for reason, names in _grouped(rest)]
    if of_others:
        common = 1  # level of the names at which the parts differ
        while len({path[common - 1] for path in of_others}) == 1 and all(len(path) > common + 1 for path in of_others):
            common += 1
        parts = dict.fromkeys('.'.join(path[:common]) for path in of_others)
        lines.append(f'  left out, {OTHER_PARTS}, {len(of_others)} entries: {first_few(parts)}')
    return lines


def _grouped(reasons: dict[str, str]) -> list[tuple[str, str]]:
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    return [(reason, first_few(names)) for reason, names in groups.items()]
