"""Feature extraction: reading images, batching, tiling, and storing feature maps or pooled vectors.

A name, or a module such as ``swin_dense.features.folder``, is imported when it is first used: listing images needs no
torch.
"""

from typing import TYPE_CHECKING

from swin_dense.utils.lazy import public_names

if TYPE_CHECKING:
    from swin_dense.features.extractor import Extractor
    from swin_dense.features.pyramid import extract_pyramid
    from swin_dense.images.normalization import Normalization, preset

__all__ = ['Extractor', 'Normalization', 'extract_pyramid', 'preset']
_HOMES = {
    'Extractor': 'swin_dense.features.extractor',
    'Normalization': 'swin_dense.images.normalization',
    'extract_pyramid': 'swin_dense.features.pyramid',
    'preset': 'swin_dense.images.normalization',
}
__getattr__, __dir__ = public_names(__name__, _HOMES)
