"""Pass images of random sizes through one tiny model, thousands of times, and see what stays behind in the process.

    PYTHONPATH=. python benchmarks/long_run.py --passes 10000 --json benchmarks/long_run.json

Memory is that of the process in RAM; handles and threads are counted by the system, tensors by the garbage collector.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
from pathlib import Path
from typing import Any

import torch

from swin_dense import SwinBackbone

TINY = {'embed_dims': 16, 'depths': (2, 2, 2, 2), 'num_heads': (1, 2, 4, 8)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--passes', type=int, default=10_000, help='default: %(default)s')
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    report = {'torch': torch.__version__, 'passes': args.passes, **run(args.passes)}
    text = json.dumps(report, indent=2) + '\n'
    if args.json is not None:
        args.json.write_text(text)
    print(text)


def run(passes: int) -> dict[str, Any]:
    """Return how many sizes there were, and what the process held after each tenth of the passes.

    Sizes are from 1 to 200 pixels a side. Every tenth pass is one of training, forward and backward.
    """
    draw = random.Random(0)
    model = SwinBackbone(**TINY).eval()
    sizes = set()
    held = []
    for index in range(1, passes + 1):
        size = draw.randint(1, 200), draw.randint(1, 200)
        sizes.add(size)
        images = torch.rand(1, 3, *size)
        if index % 10:
            with torch.no_grad():
                model(images)
        else:
            model.train()
            sum(out.mean() for out in model(images)).backward()
            model.zero_grad()
            model.eval()
        if index % (passes // 10) == 0:
            held.append(what_is_held())
    return {'sizes': len(sizes), 'held': held}


def what_is_held() -> dict[str, float]:
    """Return the memory in MiB, open handles, threads and living tensors of this process."""
    gc.collect()
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return {
        'mib': round(pages * os.sysconf('SC_PAGE_SIZE') / 2**20, 1),
        'handles': len(os.listdir('/proc/self/fd')),
        'threads': len(os.listdir('/proc/self/task')),
        'tensors': sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
    }


if __name__ == '__main__':
    main()
