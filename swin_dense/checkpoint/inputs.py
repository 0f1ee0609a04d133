"""Recognise published weights whose images are not normalised with ImageNet's mean and standard deviation."""

from __future__ import annotations

import re

from swin_dense.checkpoint.find import Found

# The files of SatlasPretrain, and those of torchgeo with a hash behind the name.
_SATLAS = re.compile(r'(aerial|landsat|sentinel1|sentinel2)_swin[bt]_(si|mi)')
_SATLAS_PREFIX = 'backbone.backbone.'  # in SatlasPretrain's own files, under any file name
_BY_CHANNELS = {2: 'satlas-sentinel1', 3: 'satlas-rgb', 9: 'satlas-sentinel2-ms', 11: 'satlas-landsat'}


def preset_of(found: Found) -> str | None:
    """Return the preset of ``swin_dense.features.preset`` that the weights of a checkpoint expect, None if unknown."""
    is_satlas = (
        found.version == 2
        and found.family == 'torchvision'
        and (_SATLAS.search(found.described) or found.prefix.startswith(_SATLAS_PREFIX))
    )
    projection = found.parameters.get('patch_embed.projection.weight')
    if not is_satlas or projection is None:
        return None
    return _BY_CHANNELS.get(projection.shape[1])
