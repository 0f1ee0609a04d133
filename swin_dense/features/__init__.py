"""Images in, feature pyramids out: reading, regions, tiles, batches, folders of features."""

from swin_dense.features.batches import Extractor
from swin_dense.features.pyramid import extract_pyramid

__all__ = ['Extractor', 'extract_pyramid']
