"""Run detectors and segmentors from one ``.onnx`` file with numpy and ONNX Runtime or OpenVINO, without torch and mm*.

from swin_dense import runtime

model = runtime.load('model.onnx')
model('photo.jpg')                  # the record that `swin-dense predict` writes as JSON
model.predict('photo.jpg').painted  # the image with the prediction drawn on it
runtime.quantize('model.onnx', photographs, 'int8.onnx')  # a smaller file, mostly faster; needs onnx
"""

from swin_dense.workbench.runtime import Coco, Model, Prediction, QuantizationError, Quantized, load, quantize

__all__ = ['Coco', 'Model', 'Prediction', 'QuantizationError', 'Quantized', 'load', 'quantize']
