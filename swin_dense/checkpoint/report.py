"""The report of loading a checkpoint, and the error raised if loading fails."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


class CheckpointError(ValueError, RuntimeError):
    """A checkpoint cannot be read or does not fit; the model keeps its weights.

    It is also a RuntimeError because ``load_state_dict`` raises that type.

    Args:
        message: the problem and how to solve it.
        in_python: how to solve it in Python or in a config. The command line omits this part.
    """

    def __init__(self, message: str = '', in_python: str = '') -> None:
        super().__init__(message + in_python)
        self.without_python = message


@dataclass
class Report:
    """The result of loading a checkpoint: lists of the model's parameters and of the checkpoint's tensors.

    Attributes:
        source: the file, address or kind of object that was loaded.
        family: the library whose parameter names the checkpoint uses.
        prefix: the prefix of the backbone's names in the checkpoint.
        version: the version of Swin, 1 or 2.
        loaded: parameters of the backbone that were loaded, including resized ones.
        resized: parameters of the backbone that were resized, mapped to a description of the change.
        missing: parameters of the backbone that were not loaded and keep their values.
        new: the subset of ``missing`` that the checkpoint cannot have: norms of additional outputs, and parameters
            that no Swin has.
        mismatched: the subset of ``missing`` with another shape in the checkpoint, mapped to both shapes.
        damaged: the subset of ``missing`` with NaN or infinite values in the checkpoint, mapped to their number.
        left_out: entries of the checkpoint that were skipped on purpose, mapped to the reason.
        unexpected: entries of the checkpoint that have no parameter in the backbone.
        notes: further remarks on the checkpoint.
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
        """The logging level: WARNING if parameters were resized or are missing without being new, else INFO."""
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
    """Return the first ``limit`` names and, if there are more, the total number."""
    names = list(names)
    more = f'{separator}... ({len(names)} in all)' if len(names) > limit else ''
    return separator.join(names[:limit]) + more


def _grouped(reasons: dict[str, str]) -> list[tuple[str, str]]:
    groups: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        groups.setdefault(reason, []).append(name)
    return [(reason, listed(names)) for reason, names in groups.items()]
