"""Run detectors and segmentors from one ``.onnx`` file with OpenCV and ONNX Runtime or OpenVINO, without torch and mm*.

from swin_dense import runtime

model = runtime.load('model.onnx')
model('photo.jpg')                  # the record that `swin-dense predict` writes as JSON
model.predict('photo.jpg').painted  # the image with the prediction drawn on it
"""

from typing import Any

from swin_dense.utils.deprecation import why_gone
from swin_dense.workbench.runtime import Model, Prediction, load

__all__ = ['Model', 'Prediction', 'load']


def __getattr__(name: str) -> Any:
    """Raise an ImportError for a name that is gone; ``from runtime import`` hides the words of an AttributeError."""
    if (reason := why_gone(f'{__name__}.{name}')) is not None:
        raise ImportError(reason)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
