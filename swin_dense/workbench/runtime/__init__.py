"""Exported models, run with numpy and ONNX Runtime or OpenVINO; the public name is ``swin_dense.runtime``.

Must work without torch.
"""

from swin_dense.workbench.runtime.coco import Coco
from swin_dense.workbench.runtime.model import Model, Prediction, load
from swin_dense.workbench.runtime.quantization import QuantizationError, Quantized, quantize

__all__ = ['Coco', 'Model', 'Prediction', 'QuantizationError', 'Quantized', 'load', 'quantize']
