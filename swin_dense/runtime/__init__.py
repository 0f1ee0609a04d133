"""Whole detectors and segmentors from one ``.onnx`` file, with numpy and ONNX Runtime or OpenVINO: no torch, no mm*.

from swin_dense import runtime

model = runtime.load('model.onnx')
model('photo.jpg')                  # the same as `swin-dense predict` writes as JSON
model.predict('photo.jpg').painted  # and the picture
"""

from swin_dense.runtime.model import Model, Prediction, load

__all__ = ['Model', 'Prediction', 'load']
