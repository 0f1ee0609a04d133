"""Export backbones, and modules around them, to ONNX, torch.export and TorchScript for any size; verify them.

A name is imported when it is first used, because the exporters take long to import.
"""

from typing import TYPE_CHECKING

from swin_dense.utils.lazy import public_names

if TYPE_CHECKING:
    from swin_dense.export.export import export_model
    from swin_dense.export.formats import ExportError
    from swin_dense.export.verify import Exported

__all__ = ['ExportError', 'Exported', 'export_model']
_HOMES = {
    'ExportError': 'swin_dense.export.formats',
    'Exported': 'swin_dense.export.verify',
    'export_model': 'swin_dense.export.export',
}
__getattr__, __dir__ = public_names(__name__, _HOMES)
