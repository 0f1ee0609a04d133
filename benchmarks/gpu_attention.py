"""Compare the implementations of window attention on a GPU: errors against float64, times and memory.

    python benchmarks/gpu_attention.py --json benchmarks/results/h200_attention.json

The cases are those of triton_check.py: the first and the third stage of a Swin-T at 800 x 1344 pixels,
with windows of 7 and 12. 'products' is what a CPU uses in training: two matrix products, and a softmax between them.
Errors are the largest absolute differences from the plain operations in float64, relative to the largest value. Times
are the sums of those of all kernels, of attention with its projection of queries, keys and values, without its output
layer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from bench_limits import peak_mib
from torch.profiler import ProfilerActivity, profile
from triton_check import CASES, Case, _attend, _inputs, _results, errors

from swin_dense.ops import gathered

BACKENDS = ('triton', 'sdpa', 'products', 'reference')
DEVICE = torch.device('cuda', 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, help='write all figures to this file')
    args = parser.parse_args()
    rows = []
    print('| window | map | dtype | backend | error | error of gradients | inference ms | training ms | MiB |')
    print('|' + ' --- |' * 9)
    for case in CASES:
        exact = _results(case, 'reference', torch.float64, DEVICE)
        for backend in BACKENDS:
            row = measure(case, backend, exact)
            rows.append(row)
            print(line(row), flush=True)
    if args.json:
        machine = {
            'device': torch.cuda.get_device_name(DEVICE),
            'torch': torch.__version__,
            'triton': triton.__version__,
        }
        command = f'python benchmarks/gpu_attention.py --json {args.json}'
        args.json.write_text(json.dumps({'command': command, 'machine': machine, 'rows': rows}, indent=1) + '\n')


def measure(case: Case, backend: str, exact: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return errors, times and memory of one implementation on one case."""
    row = {**case._asdict(), 'dtype': str(case.dtype).removeprefix('torch.'), 'backend': backend}
    by_products = mock.patch.object(gathered, '_attend_by_groups', gathered._attend_by_products)
    with by_products if backend == 'products' else contextlib.nullcontext():
        chosen = 'sdpa' if backend == 'products' else backend
        row['errors'] = errors(_results(case, chosen, case.dtype, DEVICE), exact)
        inputs = _inputs(case, case.dtype, DEVICE)
        with torch.no_grad():
            row['inference_ms'] = milliseconds(lambda: _attend(case, inputs, chosen))
        grad = torch.randn_like(inputs[0])

        def train() -> None:
            torch.autograd.grad(_attend(case, inputs, chosen), inputs, grad)

        row['training_ms'] = milliseconds(train)
        row['training_mib'] = peak_mib(train)
    return row


def milliseconds(function: Callable[[], object], rounds: int = 10) -> float:
    """Return the time of all kernels of a call, without the host's time to launch them."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            function()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(kernel.device_time for kernel in kernels) / rounds / 1e3


def line(row: dict[str, Any]) -> str:
    gradients = max(error for name, error in row['errors'].items() if name != 'output')
    figures = f'{row["inference_ms"]:.3f} | {row["training_ms"]:.3f} | {row["training_mib"]:.0f}'
    return (
        f'| {row["window"]} | {row["height"]} x {row["width"]} x {row["channels"]} | {row["dtype"]} '
        f'| {row["backend"]} | {row["errors"]["output"]:.1e} | {gradients:.1e} | {figures} |'
    )


if __name__ == '__main__':
    main()
