"""What a load did, for people and programs, and the error of a load that did nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


class CheckpointError(ValueError, RuntimeError):
    """A checkpoint cannot be read or does not fit; the model keeps its weights.

    It is a RuntimeError too because that is what ``load_state_dict`` raises.

    Args:
        message: what is wrong, and what to do.
        in_python: what to do in a program or in a config, which the command line leaves out.
    """

    def __init__(self, message: str = '', in_python: str = '') -> None:
        super().__init__(message + in_python)
        self.without_python = message


@dataclass
class Report:
    """What became of every parameter of the model and of every entry of the checkpoint.

    Attributes:
        source: the file, address or kind of object that was loaded.
        family: the code base whose names the checkpoint has.
        prefix: what stands before the backbone's names in the checkpoint.
        version: of Swin, 1 or 2.
        loaded: parameters of the backbone that arrived, the resized ones included.
        resized: parameters of the backbone that were fitted to another shape, with what was done.
        missing: parameters of the backbone that did not arrive and keep their values.
        new: those of the missing that the checkpoint cannot have: norms of further outputs, and what no Swin has.
        mismatched: those of the missing that the checkpoint holds in another shape, with the shapes.
        damaged: those of the missing that the checkpoint holds with values that are NaN or infinite, with how many.
        left_out: entries of the checkpoint left out on purpose, with the reason.
        unexpected: entries of the checkpoint that the backbone has no place for.
        notes: what else to know about such a checkpoint.
    """

    source: str
    family: str
    prefix: str
    loaded: list[str] = field(default_factory=list)
    resized: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    version: int = 1
    notes: list[str] = field(default_factory=list)

    @property
    def level(self) -> int:
        """The level at which to log it: a warning where parameters were changed, or did not arrive and should have."""
        is_whole = not self.resized and len(self.missing) == len(self.new)
        return logging.INFO if is_whole else logging.WARNING

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain lists and dicts, ready for JSON."""
        return dict(vars(self))

    def __str__(self) -> str:
        where = f' under {self.prefix!r}' if self.prefix else ''
        lines = [f'Loaded {len(self.loaded)} parameters of the backbone from {self.source}']
        lines.append(f'  family: {self.family}{where}, Swin V{self.version}')
        lines += [f'  resized {names}: {how}' for how, names in _grouped(self.resized)]
        if self.new:
            lines.append(f'  new, as the checkpoint cannot have them: {listed(self.new)}')
        lines += [f'  wrong shape, not loaded: {names}: {how}' for how, names in _grouped(self.mismatched)]
        lines += [f'  damaged, not loaded: {names}: {how}' for how, names in _grouped(self.damaged)]
        rest = [name for name in self.missing if name not in {*self.new, *self.mismatched, *self.damaged}]
        if rest:
            lines.append(f'  missing, not loaded: {listed(rest)}')
        lines += [f'  left out, {reason}: {names}' for reason, names in _grouped(self.left_out)]
        if self.unexpected:
            lines.append(f'  unexpected, ignored: {listed(self.unexpected)}')
        lines += [f'  note: {note}' for note in self.notes]
        return '\n'.join(lines)


def listed(names: Iterable[str], limit: int = 4, separator: str = ', ') -> str:
    """Return the first few of the names, and how many there are."""
    names = list(names)
    more = f'{separator}... ({len(names)} in all)' if len(names) > limit else ''
    return separator.join(names[:limit]) + more


def _grouped(reasons: dict[str, str]) -> list[tuple[str, str]]:
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    return [(reason, listed(names)) for reason, names in groups.items()]
