"""Measure how much CPU time a batch of images saves compared with running each image separately.

    python benchmarks/batching.py --arch swin_t --side 224 --images 8

Images of different sizes could be packed into one batch as ragged lists of windows. Packing adds work, so it saves at
most as much as a batch of equal sizes: the result is an upper bound. Rounds alternate in one process. The benchmark
measures the CPU time of a single thread, which is least sensitive to other load.
"""

import argparse
import json
import statistics
import time

import torch

from swin_dense import create_backbone
from swin_dense.features.inference import run_batch
from swin_dense.features.normalization import Inference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--arch', default='swin_t')
    parser.add_argument('--side', type=int, default=224, help='side of the square images in pixels')
    parser.add_argument('--images', type=int, default=8)
    parser.add_argument('--rounds', type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    backbone = create_backbone(args.arch)
    images = torch.rand(args.images, 3, args.side, args.side)
    ways = {
        'together': lambda: run_batch(backbone, images, Inference()),
        'alone': lambda: [run_batch(backbone, image[None], Inference()) for image in images],
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for name, way in [*ways.items()] * (args.rounds + 1):
        start = time.process_time()
        way()
        seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}  # the first round is a warm-up
    print(
        json.dumps(
            {
                **vars(args),
                'torch': torch.__version__,
                'cpu_seconds': {name: round(value, 4) for name, value in medians.items()},
                'alone_over_together': round(medians['alone'] / medians['together'], 3),
            }
        )
    )


if __name__ == '__main__':
    main()
