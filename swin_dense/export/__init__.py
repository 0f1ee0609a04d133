"""Export models to ONNX, torch.export and TorchScript for any image size, and verify the files."""

from swin_dense.export.export import export_model
from swin_dense.export.formats import ExportError
from swin_dense.export.verify import Exported
from swin_dense.export.whole import export_detector, export_segmentor

__all__ = ['ExportError', 'Exported', 'export_detector', 'export_model', 'export_segmentor']
