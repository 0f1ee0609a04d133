"""Models as files that other runtimes execute: ONNX, torch.export and TorchScript, right at every size."""

from swin_dense.export.export import Exported, ExportError, export_model
from swin_dense.export.whole import export_detector, export_segmentor

__all__ = ['ExportError', 'Exported', 'export_detector', 'export_model', 'export_segmentor']
