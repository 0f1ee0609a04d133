"""Time the construction of window plans for a new image size: eight for a Swin, two per stage.

    python benchmarks/plan_time.py --json benchmarks/plan_time.json

Sizes are random as in multi-scale training: the shorter side is 480 to 800, the longer side at most 1333. The result is
the CPU time of one thread. With --device cuda it is also that of the host, without waiting for asynchronous copies.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path

import torch

from swin_dense.ops import plan

WINDOW, SHIFTS, STRIDES = (7, 7), ((0, 0), (3, 3)), (4, 8, 16, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--images', type=int, default=200)
    parser.add_argument('--json', type=Path, help='write the report to this file')
    args = parser.parse_args()
    device, draw = torch.device(args.device), random.Random(0)
    torch.set_num_threads(1)
    milliseconds = []
    for _ in range(args.images + 5):
        short = draw.randint(480, 800)
        height, width = short, min(1333, round(short * draw.uniform(1.2, 1.7)))
        start = time.process_time()
        for stride in STRIDES:
            for shift in SHIFTS:
                plan._build(-(-height // stride), -(-width // stride), WINDOW, shift, device)
        milliseconds.append(1e3 * (time.process_time() - start))
    milliseconds = sorted(milliseconds[5:])  # the first ones are warm-ups
    report = {
        'device': args.device,
        'machine': platform.processor() or platform.machine(),
        'torch': torch.__version__,
        'images': args.images,
        'median_ms': statistics.median(milliseconds),
        'p90_ms': milliseconds[int(0.9 * len(milliseconds))],
    }
    print(f'plans of a new image size: median {report["median_ms"]:.2f} ms, p90 {report["p90_ms"]:.2f} ms')
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + '\n')


if __name__ == '__main__':
    main()
