"""Quantise a file of `swin-dense export CONFIG CHECKPOINT` to 8-bit integers with ONNX Runtime, and compare both files.

    python examples/quantize.py model.onnx photos/ int8.onnx

Give photographs like those that the model will see, 20 to 200: half of them measure the ranges of activations, the
others compare. Needs onnx and onnxruntime. On x86 processors without VNNI, add `reduce_range=True`, because sums of
8-bit products overflow there. To let a tool choose the layers that stay in float, see nncf's
`quantize_with_accuracy_control` for OpenVINO, which takes the same file.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
from PIL import Image, ImageOps
from pycocotools import mask as coco

from swin_dense import runtime

# Modules that stay in float: they are small, and what they lose reaches every box, mask and class.
IN_FLOAT = (
    *('patch_embed', 'neck', 'rpn_head', 'pixel_decoder', 'fc_cls', 'fc_reg', 'conv_logits', 'conv_seg'),
    *('retina_cls', 'retina_reg', 'rtm_cls', 'rtm_reg', 'cls_branches', 'reg_branches', 'cls_embed', 'mask_embed'),
)


class Photographs(CalibrationDataReader):
    """The inputs of a model for images, one by one."""

    def __init__(self, model: runtime.Model, files: Iterable[Path]) -> None:
        self._feeds = ({'img': model.prepared(pixels_of(file))[0]} for file in files)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self._feeds, None)


def pixels_of(file: Path) -> np.ndarray:
    return np.asarray(ImageOps.exif_transpose(Image.open(file)).convert('RGB'))


def quantize(source: str, files: Iterable[Path], out: str) -> None:
    """Write a file whose layers outside of ``IN_FLOAT`` have weights and inputs of 8 bits."""
    exported = onnx.load(source)
    optional = list(exported.graph.input[1:])  # of which the calibration knows nothing
    del exported.graph.input[1:]
    modules = {node.name: str(node.metadata_props) for node in exported.graph.node}  # paths of modules, by the exporter
    quantize_static(
        exported,
        out,
        Photographs(runtime.load(source), files),
        per_channel=True,
        op_types_to_quantize=['Conv', 'ConvTranspose', 'MatMul', 'Gemm'],
        nodes_to_exclude=[node for node, path in modules.items() if any(module in path for module in IN_FLOAT)],
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        # Norms, activations and sums follow a linear layer, and products of two activations: all compute in float.
        extra_options={'OpTypesToExcludeOutputQuantization': ['MatMul', 'Gemm'], 'MatMulConstBOnly': True},
    )
    quantized = onnx.load(out)
    quantized.graph.input.extend(optional)
    onnx.save(quantized, out)


def agreement(first: runtime.Prediction, second: runtime.Prediction) -> float:
    """Return the share of pixels of the same class, or of instances that both have with a box IoU of at least 0.9."""
    if first.labels is not None:
        return float(np.mean(first.labels == second.labels))
    instances = [prediction.record['instances'] for prediction in (first, second)]
    if not all(instances):
        return float(instances[0] == instances[1])
    boxes = [[corner_and_size(one['box']) for one in found] for found in instances]
    overlaps = coco.iou(*boxes, [0] * len(boxes[1]))
    labels = [np.array([one['label'] for one in found]) for found in instances]
    same = (overlaps >= 0.9) & (labels[0][:, None] == labels[1])
    return float(np.concatenate([same.any(0), same.any(1)]).mean())


def corner_and_size(box: list[float]) -> list[float]:
    left, top, right, bottom = box
    return [left, top, right - left, bottom - top]


def main(source: str, folder: str, out: str) -> None:
    files = sorted(path for path in Path(folder).iterdir() if path.suffix.lower() in ('.jpg', '.jpeg', '.png'))
    quantize(source, files[::2], out)
    before, after = runtime.load(source), runtime.load(out)
    shares = [agreement(before.predict(file), after.predict(file)) for file in files[1::2]]
    print(
        f'{len(shares)} photographs held out: {np.mean(shares):.2%} of the predictions agree, {min(shares):.2%} of one'
    )


if __name__ == '__main__':
    main(*sys.argv[1:])
