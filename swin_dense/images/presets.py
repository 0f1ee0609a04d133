"""The normalisations that published weights expect. The help of commands reads them, so this file imports no torch."""

from typing import Any

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_AS_STORED = {'mean': None, 'std': None, 'clamp': True}  # scaled to 0 to 1, without a mean
# The arguments of ``Normalization`` for published weights. Sources: https://github.com/allenai/satlas Normalization.md,
# https://github.com/allenai/satlaspretrain_models README.md, torchgeo/models/swin.py of torchgeo 0.8.
PRESETS: dict[str, dict[str, Any]] = {
    'imagenet': {'mean': IMAGENET_MEAN, 'std': IMAGENET_STD},
    'satlas-rgb': {'scale': 255.0, **_AS_STORED},
    'satlas-sentinel1': {'scale': 255.0, **_AS_STORED},
    'satlas-sentinel2-ms': {'scale': (255.0,) * 3 + (8160.0,) * 6, **_AS_STORED},
    'satlas-landsat': {'scale': 16320.0, 'mean': 4000 / 16320, 'std': 1.0, 'clamp': True},
}
