"""Quantise an exported detector or segmentor to 8-bit integers, and accept it by its predictions on photographs.

Half of the photographs measure the ranges of the layers. The predictions for the other half decide whether the file is
written, and which layers stay in float.
"""

from __future__ import annotations

import logging
import math
import pickle
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import numpy as np

from swin_dense.utils import checks, packages
from swin_dense.utils.atomic import check_destination, written_whole
from swin_dense.utils.choices import LARGEST_LOSS
from swin_dense.workbench.runtime import comparison, pictures, results
from swin_dense.workbench.runtime.model import Model, Outputs, load
from swin_dense.workbench.runtime.quantizer import Quantizer, groups_of, is_sensitive, measured_ranges

_logger = logging.getLogger(__package__)
FEWEST = 20  # photographs; fewer have the ranges of a few scenes
MOST = 200  # photographs that are used; more take longer and change little
# An instance is compared if one of the files gives it a higher score than this.
SCORE = 0.3
TOLERANCE = comparison.Tolerance(overlap=0.9, score=0.1)
# Minimum score to predict: a partner may have a lower score than the instance itself.
LOWEST = SCORE - TOLERANCE.score


class QuantizationError(RuntimeError):
    """The predictions of the quantised file differ too much from those of the float file."""


@dataclass(frozen=True)
class Quantized:
    """A quantised file.

    Attributes:
        path: the file.
        loss: share of the instances, or pixels, of the photographs held out that differ from those of the float file.
        compared: number of these instances or pixels.
        in_float: groups of layers that compute in float, by the modules they belong to.
        in_int8: groups of layers that compute in 8-bit integers.
    """

    path: Path
    loss: float
    compared: int
    in_float: tuple[str, ...]
    in_int8: tuple[str, ...]


def quantize(
    path: str | PathLike[str],
    images: Sequence[str | PathLike[str]],
    out: str | PathLike[str],
    *,
    limit: float = LARGEST_LOSS,
) -> Quantized:
    """Quantise the file of a detector or segmentor to int8.

    Every second photograph measures the ranges of the layers. The others are held out, and decide. Each instance with a
    score above 0.3 in one file must be in the other too, with the same label, a score within 0.1, and a box and a mask
    with an IoU of at least 0.9; of a segmentor and of a panoptic model, every pixel is compared. At most ``limit`` of
    them may differ.

    Patch embedding, neck, pixel decoder, RPN and the last layers stay in float. If too much differs, the loss of every
    other group of layers is measured, and the groups that lose most return to float, one by one, until it is enough.

    Args:
        path: an ``.onnx`` file of ``swin-dense export CONFIG CHECKPOINT --out FILE``.
        images: files of photographs like those that the model will see, at least 20. At most 200 are used, evenly
            chosen from all. Those that cannot be read are left out, with a warning.
        out: the ``.onnx`` file to write. An existing file is overwritten.
        limit: largest share of instances or pixels that may differ.

    Returns:
        What was done, which is in the metadata of the file too.

    Raises:
        TypeError: ``images`` is no list.
        FileNotFoundError: the file or the folder of ``out`` does not exist.
        ValueError: the file contains no whole model, is quantised already, is not in float32 or lacks the names of its
            modules; there are too few photographs, or the model finds too little in them.
        QuantizationError: too much differs even if only one group of layers is quantised.
        ImportError: onnx or onnxruntime is not installed.
    """
    packages.require('quantisation', 'onnx', 'onnxruntime')
    path, out = Path(path), Path(out)
    _check_arguments(path, out, limit)
    model = load(path, score=LOWEST)
    groups = groups_of(path)
    calibration, held_out = _photographs(images, model)
    _logger.info('running the float file on %d photographs ...', len(held_out))
    reference = Reference(model)
    _check_found(reference, held_out, limit)
    _logger.info('measuring the ranges of the layers on %d photographs ...', len(calibration))
    inputs = (model.prepared(pictures.read(photograph))[0] for photograph in calibration)
    quantizer = Quantizer(path, groups, measured_ranges(path, inputs))
    in_float, loss, compared = _chosen(quantizer, reference, calibration, held_out, limit)
    in_int8 = [group for group in groups if group not in in_float]
    quantized = {
        'method': 'static int8: QDQ, MinMax, weights per channel',
        'int8': in_int8,
        'float': in_float,
        'photographs': {'calibration': len(calibration), 'held out': len(held_out)},
        'loss': loss,
        'limit': limit,
    }
    with written_whole(out) as unfinished:
        quantizer.write(in_int8, unfinished.path, {**model.facts, 'quantized': quantized})
    return Quantized(out, loss, compared, tuple(in_float), tuple(in_int8))


def _check_arguments(path: Path, out: Path, limit: float) -> None:
    if not 0 < checks.number('limit', limit) < 1:
        raise ValueError(f'{checks.argument("limit")} must lie between 0 and 1, got {limit}')
    if out.suffix.lower() != '.onnx':
        raise ValueError(f'the file to write must end in .onnx, got {str(out)!r}')
    check_destination(out, force=True)
    if out.resolve() == path.resolve():
        raise ValueError(f'{out} is the float file itself; choose another name')


def _photographs(images: Sequence[str | PathLike[str]], model: Model) -> tuple[list[Path], list[Path]]:
    """Return the photographs that measure ranges, and those that are held out."""
    if isinstance(images, (str, PathLike)):
        raise TypeError(f'images must be a list of files, got {str(images)!r}')
    # A photograph that is given twice must not measure ranges and be held out too.
    different = list({Path(image).resolve(): Path(image) for image in images}.values())
    count = min(len(different), MOST)
    chosen = [different[index * len(different) // count] for index in range(count)]
    usable = [photograph for photograph in chosen if _is_usable(photograph, model)]
    if len(usable) < FEWEST:
        unusable = f', and {count - len(usable)} that cannot be used' if len(usable) < count else ''
        raise ValueError(
            f'give at least {FEWEST} photographs, of which half measure the ranges of the layers and half are held '
            f'out, got {len(usable)}{unusable}'
        )
    return usable[::2], usable[1::2]


def _is_usable(photograph: Path, model: Model) -> bool:
    """Return whether a photograph can be read and has a size that the model supports; warn if not."""
    try:
        model.prepared(pictures.read(photograph))
    except (ValueError, FileNotFoundError) as error:
        _logger.warning('%s; left out', results.reason(str(photograph), error))
        return False
    return True


class Reference:
    """The predictions of the float file for photographs. Each is computed once."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._kept: dict[Path, bytes] = {}

    def outputs(self, photograph: Path) -> Outputs:
        """Return what the model predicts for a photograph."""
        if photograph not in self._kept:
            outputs = self.model.outputs(pictures.read(photograph))
            # Masks and maps of classes have a byte or more for each pixel, and shrink to hundredths.
            self._kept[photograph] = zlib.compress(pickle.dumps(outputs), level=1)
        kept: Outputs = pickle.loads(zlib.decompress(self._kept[photograph]))
        return kept


def _check_found(reference: Reference, photographs: Sequence[Path], limit: float) -> None:
    """Raise ValueError if the float file finds too little in photographs to compare another file with it."""
    instances = 0
    values: set[int] = set()
    for photograph in photographs:
        labels, found, panoptic = reference.outputs(photograph)
        if found is not None:
            instances += int((found.scores > SCORE).sum())
        for part in (labels, panoptic):
            if part is not None:
                values.update(np.unique(part).tolist())
    needed = math.ceil(1 / limit)
    if not values and instances < needed:
        number = f'{instances} instances' if instances else 'nothing'
        raise ValueError(
            f'the float file finds {number} in the {len(photographs)} photographs held out; a loss of {limit:.1%} can '
            f'be measured on {needed} or more: give more photographs, which show objects of its classes'
        )
    if len(values) == 1:
        raise ValueError(
            f'the float file gives all pixels of the {len(photographs)} photographs held out the same class; give '
            'photographs that show several'
        )


def _chosen(
    quantizer: Quantizer, reference: Reference, calibration: Sequence[Path], held_out: Sequence[Path], limit: float
) -> tuple[list[str], float, int]:
    """Return the groups that stay in float, the loss on the photographs held out, and the number compared.

    Raises:
        QuantizationError: the loss is above the limit even if only one group is quantised.
    """
    in_float = [group for group in quantizer.groups if is_sensitive(group)]
    in_int8 = [group for group in quantizer.groups if not is_sensitive(group)]
    loss, compared = _loss(quantizer, in_int8, reference, held_out)
    if loss <= limit:
        return in_float, loss, compared
    _logger.info('%.2f%% of the predictions differ; measuring the loss of each group of layers ...', 100 * loss)
    alone = {}
    for group in in_int8:
        alone[group], _ = _loss(quantizer, [group], reference, calibration)
        _logger.info('  %s: %.2f%%', group, 100 * alone[group])
    in_int8.sort(key=alone.__getitem__)
    while loss > limit and len(in_int8) > 1:
        in_float.append(in_int8.pop())
        loss, compared = _loss(quantizer, in_int8, reference, held_out)
        _logger.info('%.2f%% of the predictions differ with %s in float', 100 * loss, in_float[-1])
    if loss > limit:
        by_loss = sorted(alone, key=alone.__getitem__, reverse=True)
        listed = ', '.join(f'{group} {alone[group]:.1%}' for group in by_loss)
        raise QuantizationError(
            f'the file was not written: {loss:.1%} of its predictions differ from those of the float file, at most '
            f'{limit:.1%} is allowed ({checks.argument("limit", ...)}). Each group of layers alone changes: {listed}'
        )
    return in_float, loss, compared


def _loss(
    quantizer: Quantizer, in_int8: Iterable[str], reference: Reference, photographs: Sequence[Path]
) -> tuple[float, int]:
    """Return the share of predictions that differ if these groups are quantised, and the number compared."""
    with tempfile.TemporaryDirectory(prefix='swin-dense-') as folder:
        candidate = Path(folder) / 'candidate.onnx'
        quantizer.write(in_int8, candidate)
        return difference(reference, load(candidate, score=LOWEST), photographs)


def difference(expected: Reference, found: Model, photographs: Iterable[Path]) -> tuple[float, int]:
    """Return the larger share of instances or pixels in which two files differ, and the number compared.

    Args:
        expected: a file, loaded with the minimum score ``LOWEST``.
        found: another file of the same model, loaded likewise.
        photographs: files of photographs.
    """
    counts = np.zeros((2, 2), np.int64)
    for photograph in photographs:
        outputs = found.outputs(pictures.read(photograph))
        counts += _differences(expected.outputs(photograph), outputs, len(found.classes))
    return max((different / max(compared, 1), compared) for different, compared in counts.tolist())


def _differences(expected: Outputs, found: Outputs, classes: int) -> np.ndarray:
    """Return how many instances and pixels of an image differ and how many there are: rows of (different, compared)."""
    counts = np.zeros((2, 2), np.int64)
    if expected.instances is not None and found.instances is not None:
        counts[0] = comparison.count_unmatched(expected.instances, found.instances, SCORE, TOLERANCE)
    if expected.labels is not None and found.labels is not None:
        counts[1] = (expected.labels != found.labels).sum(), found.labels.size
    if expected.panoptic is not None and found.panoptic is not None:
        share, _ = comparison.share_of_other_segments(expected.panoptic, found.panoptic, classes)
        counts[1] = round(share * found.panoptic.size), found.panoptic.size
    return counts
