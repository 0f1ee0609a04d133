"""Quantise a file of `swin-dense export CONFIG CHECKPOINT` to 8-bit integers with ONNX Runtime, and compare it.

    python examples/quantize.py model.onnx photos/ int8.onnx

Needs onnx and onnxruntime. Half of the photographs measure ranges, the others compare both files. To let a tool choose
the layers that stay in float, see nncf.quantize_with_accuracy_control of OpenVINO, which takes the same file.
"""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

from swin_dense import runtime
from swin_dense.workbench.runtime import pictures

# Modules that stay in float: they are small, and what they lose reaches every box, mask and class.
IN_FLOAT = ('patch_embed', 'neck', 'rpn_head', 'pixel_decoder', 'fc_cls', 'fc_reg', 'conv_logits', 'conv_seg',
            'retina_', 'rtm_', '_branches', 'cls_embed', 'mask_embed')  # fmt: skip


class Photographs(CalibrationDataReader):
    def __init__(self, model: runtime.Model, files: list[Path]) -> None:
        self._feeds = ({'img': model.prepared(pictures.read(file))[0]} for file in files)

    def get_next(self):
        return next(self._feeds, None)


def main(source: str, folder: str, out: str) -> None:
    files = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in ('.jpg', '.jpeg', '.png'))
    model = runtime.load(source)
    graph = onnx.load(source)
    optional = list(graph.graph.input[1:])  # which the calibration does not know
    del graph.graph.input[1:]
    modules = {node.name: str(node.metadata_props) for node in graph.graph.node}
    quantize_static(
        graph,
        out,
        Photographs(model, files[::2]),
        per_channel=True,
        op_types_to_quantize=['Conv', 'ConvTranspose', 'MatMul', 'Gemm'],
        nodes_to_exclude=[name for name, scopes in modules.items() if any(part in scopes for part in IN_FLOAT)],
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        extra_options={'OpTypesToExcludeOutputQuantization': ['MatMul', 'Gemm'], 'MatMulConstBOnly': True},
    )
    quantized = onnx.load(out)
    quantized.graph.input.extend(optional)
    onnx.save(quantized, out)
    small = runtime.load(out)
    for file in files[1::2]:
        ours, theirs = model(file), small(file)
        if 'instances' in ours:
            print(f'{file.name}: {len(ours["instances"])} instances in float, {len(theirs["instances"])} in int8')
        else:
            labels = [one.outputs(pictures.read(file)).labels for one in (model, small)]
            print(f'{file.name}: {np.mean(labels[0] == labels[1]):.2%} of the pixels agree')


if __name__ == '__main__':
    main(*sys.argv[1:])
