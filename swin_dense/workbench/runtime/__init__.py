"""Exported models, run with numpy and ONNX Runtime or OpenVINO; the public name is ``swin_dense.runtime``.

Must work without torch.
"""

from swin_dense.workbench.runtime.model import Model, load
from swin_dense.workbench.runtime.outputs import Prediction

__all__ = ['Model', 'Prediction', 'load']
