"""What the framework makes of the values in masks of pixels, and whether all splits number their classes alike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swin_dense.mm.mask_values import IGNORED_LABEL
from swin_dense.utils.checks import first_few
from swin_dense.workbench.checking.stated import Source
from swin_dense.workbench.configs.experiment import dicts, mapped_values

_MANY_VALUES = 32  # that are no class: more than annotators add by mistake
_SEAM = 4  # pixels: the width of a line that an interpolation leaves between two classes
_MANY_SEAMS = 20
_UNLIKELY = 0.02  # probability


@dataclass
class PixelTrip:
    """What became of the pixels of a sample of masks.

    Attributes:
        masks: the number of masks.
        pixels: the number of pixels, by the value in the file and the label that the framework makes of it.
        example: the path of a mask that has such pixels.
        with_label: the number of masks that have pixels of a label.
        seams: how often a narrow line separates pixels of a lower and of a higher value than its own.
        steps: how often the values of two neighbouring pixels differ by more than 1. Neither counts ignored pixels.
    """

    masks: int
    pixels: Counter[tuple[int, int]] = field(default_factory=Counter)
    example: dict[tuple[int, int], str] = field(default_factory=dict)
    with_label: Counter[int] = field(default_factory=Counter)
    seams: int = 0
    steps: int = 0

    def add(self, path: str, stored: np.ndarray, labels: np.ndarray) -> None:
        """Add a mask, as it is stored and as the framework labels it."""
        found, counts = np.unique(stored.astype(np.int64) * 256 + labels, return_counts=True)
        pairs = [divmod(pair, 256) for pair in found.tolist()]
        for pair, count in zip(pairs, counts.tolist(), strict=True):
            self.pixels[pair] += count
            self.example.setdefault(pair, path)
        self.with_label.update({label for _, label in pairs})
        for lines in (stored, stored.T):
            # All lines after each other, with an ignored pixel between them, as runs of one value.
            values = np.pad(lines.astype(np.int64), ((0, 0), (0, 1)), constant_values=IGNORED_LABEL).ravel()
            starts = np.flatnonzero(np.diff(values, prepend=-1))
            runs, lengths = values[starts], np.diff(starts, append=len(values))
            steps = np.diff(runs) * (runs[1:] != IGNORED_LABEL) * (runs[:-1] != IGNORED_LABEL)
            self.seams += int(((steps[1:] * steps[:-1] > 0) & (lengths[1:-1] <= _SEAM)).sum())
            self.steps += int((abs(steps) > 1).sum())

    @property
    def stored(self) -> list[int]:
        """The values in the files."""
        return sorted({value for value, _ in self.pixels})

    def values_of(self, classes: Collection[int]) -> dict[int, list[int]]:
        """Return the values in the files that have each label of some classes."""
        values: dict[int, list[int]] = {}
        for value, label in sorted(self.pixels):
            if label in classes:
                values.setdefault(label, []).append(value)
        return values


def notes_on_pixels(trip: PixelTrip, source: Source, steps: Sequence[Any], trained: Sequence[PixelTrip]) -> list[str]:
    """Return notes on ignored pixels, on values of one class, on classes that do not occur, and on seams.

    Args:
        trip: what became of the pixels of a data set.
        source: the data set.
        steps: the steps of its pipeline that load masks.
        trained: the same of the data sets of the training.

    Raises:
        ValueError: values are no class, masks have one class beside ignored pixels, or the training data number the
            classes differently.
    """
    experiment, folder = source.data.experiment, source.built.data_prefix['seg_map_path']
    count = experiment.class_count or len(source.data.classes) or IGNORED_LABEL
    names = source.built.metainfo.get('classes') or range(count)
    not_learned = {part['ignore_index'] for part in dicts(experiment.model) if 'ignore_index' in part} | {IGNORED_LABEL}
    on_numbering = [_note_on_numbering(trip, other, dict(enumerate(names)), folder) for other in trained]
    ignored = [pair for pair in trip.pixels if pair[1] in not_learned]
    _check_values(trip, ignored, count, steps, trained, source)
    notes = [note for note in on_numbering if note]
    if ignored:
        share = 100 * sum(trip.pixels[pair] for pair in ignored) / trip.pixels.total()
        zero = ' (reduce_zero_label=True ignores 0)' if source.built.reduce_zero_label else ''
        given = ', '.join(map(str, sorted({value for value, _ in ignored})))
        notes.append(f'{share:.2g} % of their pixels are ignored, those of the values {given}{zero}')
    values_of = trip.values_of({*range(count)} - not_learned)
    for label, values in values_of.items():
        if len(values) > 1:
            notes.append(f'the values {first_few(values)} are one class, {label}')
    rest = [name for index, name in enumerate(names) if index not in values_of]
    if rest:
        notes.append(f'in these masks, {len(rest)} of {len(names)} classes do not occur: {first_few(rest)}')
    if trip.seams > max(trip.steps, _MANY_SEAMS):
        notes.append(
            f'{trip.seams} lines of up to {_SEAM} pixels separate a lower and a higher value than their own, which '
            f'meet without a line {trip.steps} times, as if the masks had been resized by interpolation; resize them '
            'by nearest neighbour, unless the lines are objects'
        )
    return notes


def _check_values(
    trip: PixelTrip,
    ignored: Sequence[tuple[int, int]],
    count: int,
    steps: Sequence[Any],
    trained: Sequence[PixelTrip],
    source: Source,
) -> None:
    """Raise ValueError for values that are no class of ``count`` and not meant to be ignored, or if 255 may be one."""
    mapped = mapped_values(steps)
    listed = {value for step in steps for value in step.get('values', ())} if mapped else {*trip.stored}
    wrong = [pair for pair in trip.pixels if pair not in ignored and pair[1] >= count]
    wrong += [pair for pair in ignored if pair[0] not in listed | {IGNORED_LABEL}]
    if wrong:
        known = f'are 0 to {count - 1}' if mapped is None else f'have the values {", ".join(map(str, mapped))}'
        raise ValueError(
            f'the mask {trip.example[wrong[0]]} has pixels of the value {wrong[0][0]}, but the classes {known}; '
            + _cure({pair: trip.pixels[pair] for pair in wrong}, trip, trained, source.data.is_evaluated)
        )
    if len(trip.stored) <= 2 and IGNORED_LABEL in trip.stored and mapped is None:
        given = ','.join(map(str, trip.stored))
        use = 'nothing is evaluated' if source.data.is_evaluated else 'the model would learn nothing'
        raise ValueError(
            f'the {trip.masks} checked masks in {source.built.data_prefix["seg_map_path"]} have only the values '
            f'{given}, and 255 is ignored, so that {use}; if 255 is a class, write the config with `swin-dense config '
            f'... --mask-values {given}`; if it is not, with `--mask-values {",".join(map(str, range(count)))}`'
        )


def _note_on_numbering(trip: PixelTrip, trained: PixelTrip, names: dict[int, Any], folder: str) -> str:
    """Return a note if masks and those of the training data seem to number their classes differently, else ''.

    Then one of both has a value that the other never has, and lacks a class that the other has. Chance may explain the
    latter, and the former if it is a class, too, where few masks have them. Raise ValueError if the value is no class:
    data of other scenes may have other classes, but no other values.
    """
    here, there = 'in these masks', 'in those of the training data'
    for one, other, place, elsewhere in ((trip, trained, here, there), (trained, trip, there, here)):
        unnamed = {value for value, label in one.pixels if label not in names}
        added = unnamed | {value for value, label in one.pixels if _is_absent(label, one, other)}
        added -= {*other.stored, IGNORED_LABEL}
        lacked = [label for label in other.with_label if label in names and _is_absent(label, other, one)]
        if not added or not lacked:
            continue
        said = (
            f'the values are {first_few(trip.stored)} {here}, and {first_few(trained.stored)} {there}. The value '
            f'{first_few(sorted(added))} occurs {place} alone, and {names[lacked[0]]}, which '
            f'{other.with_label[lacked[0]]} of {other.masks} masks have {elsewhere}, does not occur {place}'
        )
        if added & unnamed:
            cure = 'number the classes alike, and write 255 where pixels have no label'
            raise ValueError(f'{folder}: {said}; {cure}')
        return f'{said}: are the classes numbered alike?'
    return ''


def _is_absent(label: int, one: PixelTrip, other: PixelTrip) -> bool:
    """Return whether masks have a label that others lack, for another reason than chance."""
    masks = one.with_label[label]
    # The share of all arrangements of the masks of both in which the others have none of those with the label.
    chance = math.comb(one.masks, masks) / math.comb(one.masks + other.masks, masks)
    return label not in other.with_label and chance < _UNLIKELY


def _cure(wrong: dict[tuple[int, int], int], trip: PixelTrip, trained: Sequence[PixelTrip], is_evaluated: bool) -> str:
    """Return what to do about values that are no class, given the number of pixels by value and label."""
    values = sorted({value for value, _ in wrong})
    pixels = f'{sum(wrong.values())} pixels of {trip.masks} masks'
    if len(values) >= _MANY_VALUES:
        return (
            f'{pixels} have {len(values)} such values, as JPEG or an interpolation leaves them between classes; write '
            'masks as .png, and resize them by nearest neighbour'
        )
    learned = sorted({value for other in trained for value in other.stored})
    if is_evaluated and not {*values} <= {*learned}:
        of_training = f', {first_few(learned)}' if learned else ''
        return (
            f'give the masks the values of the training data{of_training}, and write 255 where pixels have no label '
            f'({pixels} have other values)'
        )
    return (
        f'if pixels of other values have no label ({pixels}), ignore them: write the config with `swin-dense config '
        f'... --ignore {",".join(map(str, values))}`; if classes have other values than their indices, with '
        '`--mask-values`; otherwise name all classes, with `--classes`'
    )
