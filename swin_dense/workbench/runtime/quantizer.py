"""Quantise groups of layers of an exported model to 8-bit integers, with the tools of ONNX Runtime.

Quantisation is static: the ranges of the inputs and outputs of layers are measured beforehand on images.
"""

from __future__ import annotations

import ast
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from swin_dense.workbench.runtime.sessions import KEY

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


@dataclass(frozen=True)
class Quantizer:
    """Writes files in which groups of layers are quantised.

    Attributes:
        path: the float file.
        groups: names of the nodes of each group of layers, as :func:`groups_of` returns them.
        ranges: ranges of the inputs and outputs of the layers, as :func:`measured_ranges` returns them.
    """

    path: Path
    groups: dict[str, list[str]]
    ranges: Any

    def write(self, in_int8: Iterable[str], out: Path, facts: dict[str, Any] | None = None) -> None:
        """Write a file in which some groups are quantised.

        Args:
            in_int8: names of the groups.
            out: the file to write.
            facts: metadata of the new file; None keeps those of the float file.
        """
        import onnx
        from onnxruntime.quantization import QDQQuantizer, QuantType

        quantizer = QDQQuantizer(
            onnx.load(self.path),
            per_channel=True,
            reduce_range=False,
            weight_qType=QuantType.QInt8,
            activation_qType=QuantType.QUInt8,
            tensors_range=self.ranges,
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
            props = {entry.key: entry.value for entry in quantized.metadata_props}
            onnx.helper.set_model_props(quantized, {**props, KEY: json.dumps(facts)})
        onnx.save(quantized, out)


def groups_of(path: Path) -> dict[str, list[str]]:
    """Return the groups of layers of a file, in its order, and the names of their nodes.

    Raises:
        ValueError: the file is quantised, is not in float32, lacks the names of its modules or has no layers.
    """
    import onnx

    graph = onnx.load(path).graph
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
        # The path of a module begins with the name that the exported graph gives the model.
        parts = ast.literal_eval(scopes[0])[-2].split('.')[1:]
        sensitive = [index for index, part in enumerate(parts) if part in SENSITIVE]
        depth = sensitive[0] + 1 if sensitive else 3
        group = '.'.join(parts[:depth])
        groups.setdefault(group, []).append(node.name)
    if all(is_sensitive(group) for group in groups):
        raise ValueError(f'{path} has no layers that could be quantised')
    return groups


def is_sensitive(group: str) -> bool:
    """Return whether a group of layers stays in float from the start."""
    return not SENSITIVE.isdisjoint(group.split('.'))


def measured_ranges(path: Path, inputs: Iterable[np.ndarray]) -> Any:
    """Return the least and the largest value of the inputs and outputs of every layer, as ONNX Runtime stores them.

    Args:
        path: the float file.
        inputs: its inputs for some images, (1, 3, H, W) float32 each.
    """
    import onnx
    from onnxruntime.quantization import create_calibrator

    with tempfile.TemporaryDirectory(prefix='swin-dense-') as folder:
        # A copy, because the calibrator writes a file beside it; without optional inputs, of which ONNX Runtime warns.
        copy, augmented = Path(folder) / 'float.onnx', Path(folder) / 'augmented.onnx'
        model = onnx.load(path)
        del model.graph.input[1:]
        onnx.save(model, copy)
        calibrator = create_calibrator(copy, TYPES, str(augmented))
        calibrator.infer_session = _frugal_session(augmented)
        feeds = ({'img': img} for img in inputs)
        calibrator.collect_data(SimpleNamespace(get_next=lambda: next(feeds, None)))
        return calibrator.compute_data()


def _frugal_session(path: Path) -> Any:
    """Return a session that computes the range of an output as soon as it has the output.

    By default, ONNX Runtime computes all ranges at the end, and keeps the outputs of all layers until then.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    # The outputs of layers that are fused could not be measured.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
