"""Measure what `with_cp` saves and costs in training, beside mmdet's Swin: kept bytes, peak memory and time.

    python benchmarks/checkpointing.py --rounds 3 --json benchmarks/zen5_checkpointing.json

Each process trains one variant of Swin-T in float32 with stochastic depth 0.2; all variants take turns. Kept bytes are
those of the tensors that autograd saves for the backward pass, each storage once, without parameters. The peak is that
of the process above its memory before the first step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from bench_host import processor
from torch import Tensor, nn

BATCH, SIDE, STEPS = 2, 512, 6
# Name of a variant: implementation and its with_cp.
VARIANTS: dict[str, tuple[str, bool | str]] = {
    'ours': ('ours', False),
    "ours, with_cp='mlp'": ('ours', 'mlp'),
    'ours, with_cp=True': ('ours', True),
    'mmdet': ('mmdet', False),
    'mmdet, with_cp=True': ('mmdet', True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--rounds', type=int, default=3, help='processes per variant (default: %(default)s)')
    parser.add_argument('--json', type=Path, help='write the report to this file')
    parser.add_argument('--of', choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.of:
        print(json.dumps(measure(*VARIANTS[args.of])))
        return
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for _ in range(args.rounds):
        for name in VARIANTS:
            done = subprocess.run([sys.executable, '-W', 'ignore', __file__, '--of', name], stdout=-1, check=True)
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    report = {'machine': processor(), 'torch': torch.__version__, 'step': f'{BATCH} x {SIDE} x {SIDE}', 'runs': runs}
    print(table({'processor': processor(), **report}))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + '\n')


def table(*reports: dict[str, Any]) -> str:
    """Return a table with the median of each figure."""
    lines = ['| training step | processor | kept, MiB | peak, MiB | time, ms |', '| --- | --- | --- | --- | --- |']
    for report in reports:
        for name, measured in report['runs'].items():
            figures = [f'{statistics.median(run[key] for run in measured):.0f}' for key in ('kept', 'peak', 'ms')]
            lines.append(f'| {name} | {report["processor"]} | {" | ".join(figures)} |')
    return '\n'.join(lines) + '\n'


def measure(implementation: str, with_cp: bool | str) -> dict[str, float]:
    """Return kept MiB, peak MiB above the start, and the median time of a step in milliseconds."""
    model = build(implementation, with_cp)
    model.train()  # which returns None in mmdet
    img = torch.rand(BATCH, 3, SIDE, SIDE)
    kept = kept_bytes(model, img)
    process, start, highest, is_done = psutil.Process(), psutil.Process().memory_info().rss, [0], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.01):
            highest[0] = max(highest[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        loss_of(model(img)).backward()
        seconds.append(time.perf_counter() - begin)
    is_done.set()
    watcher.join()
    return {'kept': kept / 2**20, 'peak': (highest[0] - start) / 2**20, 'ms': 1e3 * statistics.median(seconds[2:])}


def build(implementation: str, with_cp: bool | str) -> nn.Module:
    torch.manual_seed(0)
    if implementation == 'ours':
        from swin_dense import SwinBackbone

        return SwinBackbone('t', drop_path_rate=0.2, with_cp=with_cp)
    from mmdet.models.backbones.swin import SwinTransformer

    return SwinTransformer(drop_path_rate=0.2, with_cp=with_cp)


def loss_of(maps: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([level.square().mean() for level in maps]).sum()


def kept_bytes(model: nn.Module, img: Tensor) -> int:
    """Return the bytes that autograd keeps after a forward pass, which is discarded."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, Any] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss_of(model(img))
    return sum(storage.nbytes() for storage in storages.values())


if __name__ == '__main__':
    main()
