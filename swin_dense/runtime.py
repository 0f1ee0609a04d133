"""Run detectors and segmentors from one ``.onnx`` file with OpenCV and ONNX Runtime or OpenVINO, without torch and mm*.

from swin_dense import runtime

model = runtime.load('model.onnx')
model('photo.jpg')                  # the record that `swin-dense predict` writes as JSON
model.predict('photo.jpg').painted  # the image with the prediction drawn on it
"""

from swin_dense.workbench.runtime import Model, Prediction, load

__all__ = ['Model', 'Prediction', 'load']
