"""Measure the error of a tiled pyramid as a function of the overlap of tiles.

    python benchmarks/tile_overlap.py --arch swin_t --side 1344 --tile 448

Prints one JSON object: for each image, overlap in pixels and level, the relative error compared with the whole image
(norm of the difference divided by the norm of the map). Weights are random with a fixed seed, and larger than usual
initial weights, so that attention is far from uniform. With trained weights the errors may differ in size, but become
zero at the same overlap.
"""

import argparse
import json

import numpy as np
import skimage.data
import skimage.transform
import torch

from swin_dense import create_backbone
from swin_dense.features.pyramid import extract_pyramid
from swin_dense.features.tiling import exact_overlap, tile_alignment


def sharpen(backbone: torch.nn.Module) -> None:
    """Initialise linear layers so that their outputs are as large as their inputs, instead of a hundredth of that."""
    for module in backbone.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=module.in_features**-0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--arch', default='swin_t')
    parser.add_argument('--side', type=int, default=1344, help='side of the square image in pixels')
    parser.add_argument('--tile', type=int, default=448)
    args = parser.parse_args()
    torch.manual_seed(0)
    backbone = create_backbone(args.arch)
    sharpen(backbone)
    period = tile_alignment(backbone)[0]
    overlaps = range(0, exact_overlap(backbone, backbone.out_strides)[0] + 1, period)
    side = (args.side, args.side)
    images = {
        'noise': np.random.default_rng(0).random((*side, 3)).astype(np.float32),
        'photograph': skimage.transform.resize(skimage.data.astronaut(), side).astype(np.float32),
    }
    report = {'arch': args.arch, 'side': args.side, 'tile': args.tile, 'torch': torch.__version__, 'errors': {}}
    for name, image in images.items():
        whole = extract_pyramid(backbone, image)
        for overlap in overlaps:
            tiled = extract_pyramid(backbone, image, tile=args.tile, overlap=overlap)
            errors = {s: float(f'{(tiled[s] - whole[s]).norm() / whole[s].norm():.2g}') for s in whole}
            report['errors'].setdefault(name, {})[overlap] = errors
    print(json.dumps(report, indent=2))


if __name__ == '__main__':
    main()
