"""Feature extraction: reading images, batching, tiling, and storing feature maps or pooled vectors."""

from swin_dense.features.extractor import Extractor
from swin_dense.features.normalization import Normalization, preset
from swin_dense.features.pyramid import extract_pyramid

__all__ = ['Extractor', 'Normalization', 'extract_pyramid', 'preset']
