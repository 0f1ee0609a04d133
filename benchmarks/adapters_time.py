"""Time a training step of a Swin-T with all weights, frozen stages, Mona and LoRA, in turns, on this machine's CPU.

    python benchmarks/adapters_time.py --json benchmarks/adapters_time.json

A step is a forward and a backward pass of the backbone and a step of AdamW. The median of all rounds counts.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from bench_host import processor

from swin_dense import SwinBackbone

SIZE, BATCH = 512, 1
MONA, LORA = {'type': 'mona', 'dim': 64}, {'type': 'lora', 'rank': 8}
METHODS = {
    'all weights': {},
    'all weights but `frozen_stages=2`': {'frozen_stages': 2},
    'Mona': {'adapter': MONA},
    'Mona in stages 3 and 4, `frozen_stages=2`': {'adapter': {**MONA, 'stages': (2, 3)}, 'frozen_stages': 2},
    'LoRA': {'adapter': LORA},
    'LoRA in stages 3 and 4, `frozen_stages=2`': {'adapter': {**LORA, 'stages': (2, 3)}, 'frozen_stages': 2},
}


def make_step(options, img):
    model = SwinBackbone('t', **options).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-4)

    def step():
        clock = time.perf_counter()
        optimizer.zero_grad()
        sum(level.square().mean() for level in model(img)).backward()
        optimizer.step()
        return time.perf_counter() - clock

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, required=True)
    parser.add_argument('--rounds', type=int, default=8)
    args = parser.parse_args()
    torch.manual_seed(0)
    img = torch.rand(BATCH, 3, SIZE, SIZE)
    steps = {name: make_step(options, img) for name, options in METHODS.items()}
    seconds = {name: [] for name in steps}
    for index in range(1 + args.rounds):
        for name, step in steps.items():
            taken = step()
            if index:  # the first round warms up
                seconds[name].append(taken)
    report = {
        'processor': processor(),
        'threads': torch.get_num_threads(),
        'torch': torch.__version__,
        'arch': 'swin_t',
        'size': SIZE,
        'batch': BATCH,
        'seconds': seconds,
    }
    args.json.write_text(json.dumps(report, indent=1) + '\n')
    for name, taken in seconds.items():
        print(f'{name}: {statistics.median(taken):.2f} s')


if __name__ == '__main__':
    main()
