"""What can be chosen by name, for functions and for the help of commands, which imports neither torch nor numpy."""

from typing import Any

# Libraries in whose format weights are written.
FAMILIES = ('mmdet', 'mmseg', 'official', 'mmpretrain', 'timm', 'torchvision', 'transformers')

# Power of the generalised mean over the cells of a level; gem's, of the positive part, lies between the average and the
# maximum.
POOLINGS = {'avg': 1.0, 'gem': 3.0}

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

# Suffixes of image files.
IMAGE_SUFFIXES = frozenset(
    f'.{suffix}'
    for suffixes in (
        'apng avif bmp dib gif j2c j2k jfif jp2 jpc jpe jpeg jpf jpg jpx',
        'pbm pcx pfm pgm png pnm ppm qoi sgi tga tif tiff webp',
    )
    for suffix in suffixes.split()
)

LANGUAGES = ('en', 'zh')  # of the page of `swin-dense explore`
LARGEST_PAGE = 12_000_000  # bytes
RUNTIMES = ('onnxruntime', 'openvino')  # libraries that execute whole models
PRECISIONS = ('float32', 'bfloat16')  # in which they compute
EXPORT_SUFFIXES = ('.onnx', '.pt2', '.ts')
