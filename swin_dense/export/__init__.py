"""Export models to ONNX, torch.export and TorchScript for any image size, and verify the files."""

from typing import Any

from swin_dense.export.export import export_model
from swin_dense.export.formats import ExportError
from swin_dense.export.verify import Exported
from swin_dense.utils.deprecation import former_name

__all__ = ['ExportError', 'Exported', 'export_model']

_FORMER = {name: f'swin_dense.{name}' for name in ('export_detector', 'export_segmentor')}


def __getattr__(name: str) -> Any:
    return former_name(__name__, name, _FORMER)
