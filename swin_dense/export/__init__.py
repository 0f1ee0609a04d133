"""Export models to ONNX, torch.export and TorchScript for any image size, verify the files, and convert checkpoints.

A name is imported when it is asked for: converting a checkpoint needs no exporter.
"""

from typing import TYPE_CHECKING, Any

from swin_dense.utils.deprecation import former_name
from swin_dense.utils.lazy import public_name

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
_FORMER = {name: f'swin_dense.{name}' for name in ('export_detector', 'export_segmentor')}


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        return former_name(__name__, name, _FORMER)
    return public_name(__name__, name, _HOMES)


def __dir__() -> list[str]:
    return __all__
