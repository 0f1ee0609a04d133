"""Models as files that other runtimes execute: ONNX, torch.export and TorchScript, right at every size."""

from swin_dense.export.export import Exported, ExportError, export_model

__all__ = ['ExportError', 'Exported', 'export_model']
