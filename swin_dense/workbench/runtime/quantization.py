"""Quantise an exported detector or segmentor to 8-bit integers, and accept it by its predictions on photographs.

Static quantisation with ONNX Runtime's tools: half of the photographs measure the range of the inputs and outputs of
every layer, which then multiplies 8-bit integers. The predictions for the other half decide whether the file is
written, and which layers stay in float.
"""

from __future__ import annotations

import ast
import json
import logging
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from swin_dense.utils import checks, packages
from swin_dense.utils.atomic import check_destination, written_whole
from swin_dense.utils.choices import LARGEST_LOSS
from swin_dense.workbench.runtime import comparison, pictures
from swin_dense.workbench.runtime.model import Model, Outputs, load
from swin_dense.workbench.runtime.queries import Found
from swin_dense.workbench.runtime.sessions import KEY

_logger = logging.getLogger(__package__)
FEWEST = 20  # photographs; fewer have the ranges of a few scenes
MOST = 200  # photographs that are used; more take longer and change little
# An instance is compared if one of the files gives it a higher score than this.
SCORE = 0.3
TOLERANCE = comparison.Tolerance(overlap=0.9, score=0.1)
# The operators of layers. In 8 bits, those between them would cost accuracy and gain no speed.
TYPES = ('Conv', 'ConvTranspose', 'MatMul', 'Gemm')
# Modules that stay in float from the start: they are small, and what they lose reaches every box, mask and class.
SENSITIVE = {
    *('patch_embed', 'neck', 'rpn_head', 'pixel_decoder'),
    *('fc_cls', 'fc_reg', 'conv_logits', 'conv_seg'),
    *('retina_cls', 'retina_reg', 'rtm_cls', 'rtm_reg'),
    *('cls_branches', 'reg_branches', 'cls_embed', 'mask_embed'),
}
_SCOPES = 'pkg.torch.onnx.name_scopes'  # of a node: the paths of the modules around it, from the outermost to its own
_QUANTIZED = frozenset(('QuantizeLinear', 'DequantizeLinear', 'DynamicQuantizeLinear', 'MatMulInteger'))


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
            chosen from all.
        out: the ``.onnx`` file to write. An existing file is overwritten.
        limit: largest share of instances or pixels that may differ.

    Returns:
        What was done, which is in the metadata of the file too.

    Raises:
        TypeError: ``images`` is no list.
        FileNotFoundError: a file or the folder of ``out`` does not exist.
        ValueError: the file contains no whole model, is quantised already, is not in float32 or lacks the names of its
            modules; there are too few photographs, or the model finds too little in them.
        QuantizationError: too much differs even if only one group of layers is quantised.
        ImportError: onnx or onnxruntime is not installed.
    """
    packages.require('quantisation', 'onnx', 'onnxruntime')
    import onnx

    path, out = Path(path), Path(out)
    if not 0 < checks.number('limit', limit) < 1:
        raise ValueError(f'{checks.argument("limit")} must lie between 0 and 1, got {limit}')
    if out.suffix.lower() != '.onnx':
        raise ValueError(f'the file to write must end in .onnx, got {str(out)!r}')
    check_destination(out, force=True)
    if out.resolve() == path.resolve():
        raise ValueError(f'{out} is the float file itself; choose another name')
    # A partner may have a lower score than the instance itself.
    model = load(path, score=SCORE - TOLERANCE.score)
    groups = groups_of(path, onnx.load(path).graph)
    calibration, held_out = _split(images)
    _logger.info('running the float file on %d photographs ...', len(held_out))
    _check_found(model, held_out, limit)
    with calibrated(path, model, groups, calibration) as quantizer:
        in_float, loss, compared = _chosen(quantizer, calibration, held_out, limit)
        in_int8 = [group for group in quantizer.groups if group not in in_float]
        facts = {
            'method': 'static int8: QDQ, MinMax, weights per channel',
            'int8': in_int8,
            'float': in_float,
            'photographs': {'calibration': len(calibration), 'held out': len(held_out)},
            'loss': loss,
            'limit': limit,
        }
        with written_whole(out) as unfinished:
            quantizer.write(in_int8, unfinished.path, facts)
    return Quantized(out, loss, compared, tuple(in_float), tuple(in_int8))


class Quantizer:
    """Quantises groups of layers of a file.

    Attributes:
        model: the float file.
        groups: maps groups to the names of their nodes.
    """

    def __init__(self, path: Path, model: Model, groups: dict[str, list[str]], ranges: Any, folder: Path) -> None:
        self.model = model
        self.groups = groups
        self._path = path
        self._ranges = ranges
        self._candidate = folder / 'candidate.onnx'

    def loss(self, in_int8: Iterable[str], photographs: Sequence[Path]) -> tuple[float, int]:
        """Return the share of predictions that differ if these groups are quantised, and the number compared."""
        self.write(in_int8, self._candidate)
        candidate = load(self._candidate, score=SCORE - TOLERANCE.score)
        return difference(self.model, candidate, photographs)

    def write(self, in_int8: Iterable[str], path: Path, facts: dict[str, Any] | None = None) -> None:
        """Write a file in which these groups are quantised, with ``facts`` as ``quantized`` in its metadata."""
        import onnx
        from onnxruntime.quantization import QDQQuantizer, QuantType

        quantizer = QDQQuantizer(
            onnx.load(self._path),
            per_channel=True,
            reduce_range=False,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QUInt8,
            tensors_range=self._ranges,
            nodes_to_quantize=[node for group in in_int8 for node in self.groups[group]],
            nodes_to_exclude=[],
            op_types_to_quantize=list(TYPES),
            # After a linear layer come norms, activations and sums, which compute in float.
            extra_options={'OpTypesToExcludeOutputQuantization': ['MatMul', 'Gemm']},
        )
        quantizer.quantize_model()
        quantizer.model.topological_sort()
        quantized = quantizer.model.model
        # `swin-dense export` describes weights without their type, which is no valid entry once they are in 8 bits.
        described = [value for value in quantized.graph.value_info if value.type.WhichOneof('value') is not None]
        del quantized.graph.value_info[:]
        quantized.graph.value_info.extend(described)
        if facts is not None:
            for entry in quantized.metadata_props:
                if entry.key == KEY:
                    entry.value = json.dumps({**self.model.facts, 'quantized': facts})
        onnx.save(quantized, path)


@contextmanager
def calibrated(
    path: Path, model: Model, groups: dict[str, list[str]], photographs: Sequence[Path]
) -> Iterator[Quantizer]:
    """Measure the ranges of the layers on photographs, and return a quantizer for the block."""
    import onnx
    from onnxruntime.quantization import create_calibrator

    with tempfile.TemporaryDirectory(prefix='swin-dense-') as name:
        folder = Path(name)
        # A copy, because the calibrator writes a file beside it; without optional inputs, of which ONNX Runtime warns.
        model_proto = onnx.load(path)
        del model_proto.graph.input[1:]
        onnx.save(model_proto, folder / 'float.onnx')
        calibrator = create_calibrator(folder / 'float.onnx', TYPES, str(folder / 'augmented.onnx'))
        _logger.info('measuring the ranges of the layers on %d photographs ...', len(photographs))
        calibrator.collect_data(_Inputs(model, photographs))
        yield Quantizer(path, model, groups, calibrator.compute_data(), folder)


class _Inputs:
    """The inputs of a model for photographs, one by one, as a calibrator of ONNX Runtime reads them."""

    def __init__(self, model: Model, photographs: Sequence[Path]) -> None:
        self._inputs = ({'img': model.prepared(pictures.read(photograph))[0]} for photograph in photographs)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """Return the next input, or None at the end."""
        return next(self._inputs, None)


def groups_of(path: Path, graph: Any) -> dict[str, list[str]]:
    """Return the groups of layers in a graph, in its order, and the names of their nodes.

    Raises:
        ValueError: the graph is quantised, is not in float32, lacks the names of its modules or has no layers.
    """
    import onnx

    if not _QUANTIZED.isdisjoint(node.op_type for node in graph.node):
        raise ValueError(f'{path} is quantised already; give the file that `swin-dense export` wrote')
    weights = {weight.name: weight.data_type for weight in graph.initializer}
    groups: dict[str, list[str]] = {}
    for node in graph.node:
        # Products of two activations, as in attention, stay in float.
        if node.op_type not in TYPES or node.input[1] not in weights:
            continue
        if weights[node.input[1]] != onnx.TensorProto.FLOAT:
            raise ValueError(f'{path} is not in float32; give the file that `swin-dense export` wrote')
        scopes = [entry.value for entry in node.metadata_props if entry.key == _SCOPES]
        if not scopes:
            raise ValueError(f'{path} lacks the names of its modules; export the model again with this version')
        groups.setdefault(_group_of(ast.literal_eval(scopes[0])[-2]), []).append(node.name)
    if all(is_sensitive(group) for group in groups):
        raise ValueError(f'{path} has no layers that could be quantised')
    return groups


def _group_of(module: str) -> str:
    """Return the group of a module by its path, which begins with the name that the exported graph gives the model."""
    parts = module.split('.')[1:]
    sensitive = [index for index, part in enumerate(parts) if part in SENSITIVE]
    return '.'.join(parts[: sensitive[0] + 1 if sensitive else 3])


def is_sensitive(group: str) -> bool:
    return not SENSITIVE.isdisjoint(group.split('.'))


def _split(images: Sequence[str | PathLike[str]]) -> tuple[list[Path], list[Path]]:
    """Return the photographs that measure ranges, and those that are held out."""
    if isinstance(images, (str, PathLike)):
        raise TypeError(f'images must be a list of files, got {str(images)!r}')
    if len(images) < FEWEST:
        raise ValueError(
            f'give at least {FEWEST} photographs, of which half measure the ranges of the layers and half are held '
            f'out, got {len(images)}'
        )
    count = min(len(images), MOST)
    used = [Path(images[index * len(images) // count]) for index in range(count)]
    return used[::2], used[1::2]


def _check_found(model: Model, photographs: Sequence[Path], limit: float) -> None:
    """Raise ValueError if the float file finds too little in photographs to compare another file with it."""
    instances = 0
    values: set[int] = set()
    for photograph in photographs:
        labels, found, panoptic = model.outputs(pictures.read(photograph))
        instances += 0 if found is None else int((found[1] > SCORE).sum())
        values.update(*(np.unique(part).tolist() for part in (labels, panoptic) if part is not None))
    needed = math.ceil(1 / limit)
    if not values and instances < needed:
        raise ValueError(
            f'the float file finds {instances or "nothing"}{" instances" * bool(instances)} in the {len(photographs)} '
            f'photographs held out; a loss of {limit:.1%} can be measured on {needed} or more: give more '
            'photographs, which show objects of its classes'
        )
    if len(values) == 1:
        raise ValueError(
            f'the float file gives all pixels of the {len(photographs)} photographs held out the same class; give '
            'photographs that show several'
        )


def _chosen(
    quantizer: Quantizer, calibration: Sequence[Path], held_out: Sequence[Path], limit: float
) -> tuple[list[str], float, int]:
    """Return the groups that stay in float, the loss on the photographs held out, and the number compared.

    Raises:
        QuantizationError: the loss is above the limit even if only one group is quantised.
    """
    in_float = [group for group in quantizer.groups if is_sensitive(group)]
    rest = [group for group in quantizer.groups if not is_sensitive(group)]
    loss, compared = quantizer.loss(rest, held_out)
    if loss <= limit:
        return in_float, loss, compared
    _logger.info('%.2f%% of the predictions differ; measuring the loss of each group of layers ...', 100 * loss)
    alone = {}
    for group in rest:
        alone[group], _ = quantizer.loss([group], calibration)
        _logger.info('  %s: %.2f%%', group, 100 * alone[group])
    by_loss = sorted(rest, key=alone.__getitem__)
    while len(by_loss) > 1 and loss > limit:
        in_float.append(by_loss.pop())
        loss, compared = quantizer.loss(by_loss, held_out)
        _logger.info('%.2f%% of the predictions differ with %s in float', 100 * loss, in_float[-1])
    if loss > limit:
        listed = ', '.join(f'{group} {alone[group]:.1%}' for group in sorted(rest, key=lambda one: -alone[one]))
        raise QuantizationError(
            f'the file was not written: {loss:.1%} of its predictions differ from those of the float file, at most '
            f'{limit:.1%} is allowed ({checks.argument("limit", ...)}). Each group of layers alone changes: {listed}'
        )
    return in_float, loss, compared


def difference(expected: Model, found: Model, photographs: Iterable[Path]) -> tuple[float, int]:
    """Return the larger share of instances or pixels in which two files differ, and the number compared.

    Args:
        expected: a file, loaded with a minimum score of at most ``SCORE - TOLERANCE.score``.
        found: another file of the same model, loaded likewise.
        photographs: files of photographs.
    """
    counts = np.zeros((2, 2), np.int64)
    for photograph in photographs:
        pixels = pictures.read(photograph)
        counts += _differences(expected.outputs(pixels), found.outputs(pixels), len(expected.classes))
    return max((different / max(compared, 1), compared) for different, compared in counts.tolist())


def _differences(expected: Outputs, found: Outputs, classes: int) -> np.ndarray:
    """Return how many instances and pixels of an image differ and how many there are: rows of (different, compared)."""
    counts = np.zeros((2, 2), np.int64)
    if expected[1] is not None and found[1] is not None:
        both = _instances(expected[1]), _instances(found[1])
        counts[0] = comparison.count_unmatched(*both, SCORE, TOLERANCE)
    if expected[0] is not None and found[0] is not None:
        counts[1] = (expected[0] != found[0]).sum(), found[0].size
    if expected[2] is not None and found[2] is not None:
        share, _ = comparison.share_of_other_segments(expected[2], found[2], classes)
        counts[1] = round(share * found[2].size), found[2].size
    return counts


def _instances(found: Found) -> comparison.Instances:
    boxes, scores, labels, masks = found
    return comparison.Instances(boxes, scores, labels, masks or None)
