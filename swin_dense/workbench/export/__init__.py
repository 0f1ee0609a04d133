"""Export whole detectors of mmdet and segmentors of mmseg to one ONNX file, verified against their framework."""

from swin_dense.workbench.export.whole import export_whole

__all__ = ['export_whole']
