"""Time whole backbones on a GPU, each in a process of its own: ours and those of other libraries, eager and compiled.

    python benchmarks/gpu_models.py --packages .venv-peers/lib/python3.11/site-packages --json benchmarks/h200_models.json

All processes prepare their models at once, and then take turns. 'wall' is the time of a step when several are queued,
which is that of the host where it launches kernels more slowly than the GPU runs them; 'device' is the sum of the times
of all kernels. A training step is a forward and a backward pass. float32 is torch's default, without TF32 in products.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmark
import torch
from bench_limits import elapsed
from torch.profiler import ProfilerActivity, profile

EAGER = ('auto', 'triton', 'sdpa', 'reference', 'mmdet', 'timm', 'torchvision', 'transformers')
COMPILED = ('auto', 'triton', 'reference', 'timm', 'torchvision')
# Options of benchmark.py; the compiled models run the first ones alone.
CASES = {
    'training step, bfloat16': ['--mode', 'train', '--dtype', 'bfloat16'],
    'inference, bfloat16': ['--dtype', 'bfloat16'],
    'training step, float32': ['--mode', 'train'],
    'inference, float32': [],
}
COMPILED_CASES = 2
WARM_UP, STEPS = 3, 4


def main() -> None:
    if sys.argv[1:2] == ['--of']:
        serve(sys.argv[2], sys.argv[3], sys.argv[4:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--eager', nargs='*', default=list(EAGER), metavar='MODEL')
    parser.add_argument('--compiled', nargs='*', default=list(COMPILED), metavar='MODEL')
    parser.add_argument('--arch', default='swin_t')
    parser.add_argument('--window', default='7')
    parser.add_argument('--batch', default='2')
    parser.add_argument('--size', nargs=2, default=('800', '1344'), metavar=('HEIGHT', 'WIDTH'))
    parser.add_argument('--turns', type=int, default=5)
    parser.add_argument('--packages', help='as of benchmark.py')
    parser.add_argument('--json', type=Path, required=True)
    args = parser.parse_args()
    options = ['--device', 'cuda', '--arch', args.arch, '--window', args.window, '--batch', args.batch]
    options += ['--size', *args.size, *(['--packages', args.packages] if args.packages else [])]
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        processes = {}
        for form, names in (('eager', args.eager), ('compiled', args.compiled)):
            for name in names:
                command = [sys.executable, '-W', 'ignore', __file__, '--of', name, form, *options]
                pipes = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                processes[name, form] = stack.enter_context(pipes)
        first = {key: receive(process) for key, process in processes.items()}
        print(*(f'{name} {form}: first calls {first[name, form]}' for name, form in processes), sep='\n', flush=True)
        able = [key for key in processes if first[key] is not None]
        for number, case in enumerate(CASES):
            measured = [key for key in able if key[1] == 'eager' or number < COMPILED_CASES]
            turns: dict[tuple[str, str], list[float]] = {key: [] for key in measured}
            for _ in range(args.turns):
                for key in random.sample(measured, len(measured)):
                    turns[key].append(ask(processes[key], f'time {case}'))
            for name, form in measured:
                row = ask(processes[name, form], f'profile {case}')
                row |= {'wall_ms': statistics.median(turns[name, form]), 'first_s': first[name, form][case]}
                row = {'case': case, 'model': name, 'form': form, **row}
                rows.append(row)
                figures = f'wall {row["wall_ms"]:7.2f}, device {row["device_ms"]:7.2f} ms, {row["kernels"]} kernels'
                print(f'{case:24s} {name:12s} {form:8s} {figures}, {row["mib"]:.0f} MiB', flush=True)
            report = {
                'command': 'python benchmarks/gpu_models.py ' + ' '.join(sys.argv[1:]),
                'machine': benchmark.machine(argparse.Namespace(device='cuda')),
                'rows': rows,
            }
            args.json.write_text(json.dumps(report, indent=1) + '\n')


def ask(process: subprocess.Popen[str], question: str) -> Any:
    assert process.stdin is not None
    process.stdin.write(question + '\n')
    process.stdin.flush()
    return receive(process)


def receive(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline() or 'null')


def serve(name: str, form: str, options: list[str]) -> None:
    """Prepare a model for all cases, and answer questions of the form 'time CASE' and 'profile CASE'."""
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # other libraries print
        steps: dict[str, Callable[[], object]] = {}
        first = {}
        for case, of_case in list(CASES.items())[: len(CASES) if form == 'eager' else COMPILED_CASES]:
            sys.argv[1:] = [*options, *of_case, *(['--compile'] if form == 'compiled' else [])]
            steps[case] = prepare(name)
            first[case] = elapsed(steps[case], 'cuda')
            for _ in range(WARM_UP):
                steps[case]()
        print(json.dumps(first), file=answers, flush=True)
        for line in sys.stdin:
            verb, case = line.strip().split(' ', 1)
            answer = time_steps(steps[case]) if verb == 'time' else profiled(steps[case])
            print(json.dumps(answer), file=answers, flush=True)


def prepare(name: str) -> Callable[[], object]:
    args = benchmark.parse_args()
    model, img = benchmark.build(name, args), benchmark.make_image(args)

    def step() -> None:
        benchmark.step(model, img, args)
        model.zero_grad(set_to_none=True)

    return step


def time_steps(step: Callable[[], object]) -> float:
    """Return the time of a step in milliseconds, of several that are queued."""
    return 1e3 / STEPS * elapsed(lambda: [step() for _ in range(STEPS)], 'cuda')


def profiled(step: Callable[[], object]) -> dict[str, Any]:
    """Return the time of all kernels of a step in milliseconds, their number, the longest ones, and the peak memory."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    mib = (torch.cuda.max_memory_allocated() - before) / 2**20
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    times: dict[str, float] = {}
    for kernel in kernels:
        times[kernel.name] = times.get(kernel.name, 0.0) + kernel.device_time / STEPS / 1e3
    longest = sorted(times.items(), key=lambda item: -item[1])[:20]
    return {
        'device_ms': sum(times.values()),
        'kernels': len(kernels) // STEPS,
        'mib': mib,
        'longest': {kernel[:120]: round(milliseconds, 3) for kernel, milliseconds in longest},
    }


if __name__ == '__main__':
    main()
