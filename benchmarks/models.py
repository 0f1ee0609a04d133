"""Time the published sizes of Swin for the table of models: python benchmarks/models.py, on an idle machine.

Writes ``benchmarks/results/<processor>_models.json``: parameters and FLOPs of each backbone, counted, and the time of a
pass over one image of 512 x 512 pixels, the median of a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bench_host import kind_of_processor, processor

from swin_dense import create_backbone
from swin_dense.analysis.flop_counter import count

RESULTS = Path(__file__).resolve().parent / 'results'
SIZE = (512, 512)
# The side of the windows of the published weights, in tokens.
MODELS = dict.fromkeys(('swin_t', 'swin_s', 'swin_b', 'swin_l'), 7)
MODELS |= dict.fromkeys(('swinv2_t', 'swinv2_s', 'swinv2_b', 'swinv2_l'), 16)
WARM_UP, PASSES = 2, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--of', choices=MODELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.of:
        print(json.dumps(measure(args.of)))
        return
    rows = {}
    for name in MODELS:
        command = [sys.executable, '-W', 'ignore', __file__, '--of', name]
        rows[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(name, rows[name])
    machine = {'processor': processor(), 'threads': torch.get_num_threads(), 'torch': torch.__version__}
    report = {'machine': machine, 'size': SIZE, 'rows': rows}
    (RESULTS / f'{kind_of_processor()}_models.json').write_text(json.dumps(report, indent=1) + '\n')


@torch.no_grad()
def measure(name: str) -> dict[str, Any]:
    """Return parameters, multiply-adds and the median time in ms of a backbone."""
    with torch.device('meta'):
        counted = count(create_backbone(name, window_size=MODELS[name]), *SIZE)
    torch.manual_seed(0)
    model = create_backbone(name, window_size=MODELS[name]).eval()
    img = torch.randn(1, 3, *SIZE)
    times = []
    for _ in range(WARM_UP + PASSES):
        start = time.perf_counter()
        model(img)
        times.append(time.perf_counter() - start)
    ms = 1e3 * statistics.median(times[WARM_UP:])
    return {'parameters': counted.parameters[''], 'flops': counted.flops[''], 'ms': round(ms, 1)}


if __name__ == '__main__':
    main()
