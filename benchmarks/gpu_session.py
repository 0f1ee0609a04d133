"""Measure everything that needs a GPU in one command of at most nine minutes, the most valuable first.

    make gpu                                                     # writes benchmarks/results/gpu_session.json
    python benchmarks/gpu_session.py --json session.json --steps kernel eager
    python benchmarks/gpu_session.py --rehearse --json /tmp/session.json          # on a CPU, with tiny inputs

Each step runs in a process of its own with a time limit, and writes a row as soon as it is measured: a step that fails,
breaks the GPU's context or is cut loses its next row only. While a step runs, its rows are in NAME.STEP.json. The
models of a table run in one process and take turns in a random order.

``host_ms`` is the time until a call returns, ``wall_ms`` until the GPU has finished, both medians; ``device_ms`` is the
sum of all kernels, ``launches`` their number. ``error`` is the largest absolute difference from plain operations in
float64, relative to the largest value. ``absent`` names models that cannot be imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from bench_limits import _bandwidth, _peak, peak_mib
from bench_models import build_ours, build_peer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from swin_dense.ops import window_attention
from swin_dense.ops.windows import WindowSpec
from swin_dense.utils.atomic import write_json

# Seconds that each step may take, in the order of their value.
STEPS = {
    'machine': 40,
    'kernel': 60,
    'eager': 120,
    'graphs': 60,
    'tests': 150,
    'memory': 40,
    'compiled': 200,
    'sizes': 60,
}
TOTAL = 525
LEAST = 15  # a step is not begun with fewer seconds left
OURS = ('auto', 'sdpa')
PEERS = ('mmdet', 'timm', 'torchvision')
SIZE = (800, 1344)
ROUNDS = 15


class Case(NamedTuple):
    """A map of a Swin-T: height and width in tokens, channels, heads, the side of its windows, and its dtype."""

    height: int
    width: int
    channels: int
    heads: int
    window: int
    dtype: torch.dtype


# The first and the third stage at 800 x 1344 pixels, with padding, and windows of one tile and of several.
CASES = [
    Case(height, width, channels, heads, window, dtype)
    for height, width, channels, heads in ((200, 336, 96, 3), (50, 84, 384, 12))
    for window in (7, 12)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
]
TINY_CASE = Case(20, 30, 96, 3, 7, torch.float32)


class Report:
    """The rows and notes of a step, written to a file whenever one is added."""

    def __init__(self, path: Path, is_rehearsal: bool) -> None:
        self.path = path
        self.is_rehearsal = is_rehearsal
        self.device = 'cpu' if is_rehearsal else 'cuda'
        self.content: dict[str, Any] = {'rows': []}

    def note(self, **values: Any) -> None:
        self.content.update(values)
        write_json(self.path, self.content)

    @contextlib.contextmanager
    def row(self, **row: Any) -> Iterator[dict[str, Any]]:
        """Add a row with what the block writes into it, or with its error."""
        try:
            yield row
        except Exception as error:
            row['failed'] = f'{type(error).__name__}: {str(error)[:300]}'
        self.content['rows'].append(row)
        print('  ', row, flush=True)
        self.note()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, default=Path('benchmarks/results/gpu_session.json'))
    parser.add_argument('--steps', nargs='+', choices=STEPS, default=list(STEPS), metavar='STEP', help=' '.join(STEPS))
    parser.add_argument('--rehearse', action='store_true', help='run on a CPU, with tiny inputs')
    parser.add_argument('--step', choices=STEPS, help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    if args.step:
        report = Report(args.json, args.rehearse)
        report.note()
        globals()[f'step_{args.step}'](report)
    else:
        run_steps(args.json, args.steps, args.rehearse)


def run_steps(path: Path, steps: Sequence[str], is_rehearsal: bool) -> None:
    """Run steps one after the other, and write what is known after each."""
    end = time.monotonic() + TOTAL
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the step too
    report: dict[str, Any] = {'command': ' '.join(sys.argv), 'steps': {}}
    for name in steps:
        left = end - time.monotonic()
        if left < LEAST:
            report['steps'][name] = {'status': 'no time left'}
        else:
            report['steps'][name] = run_step(path, name, min(STEPS[name], left), is_rehearsal)
        write_json(path, report)


def run_step(path: Path, name: str, limit: float, is_rehearsal: bool) -> dict[str, Any]:
    """Run a step in a process of its own; return its rows, its status and the seconds that it took."""
    rows = path.with_name(f'{path.stem}.{name}.json')
    rows.unlink(missing_ok=True)
    command = [sys.executable, '-W', 'ignore', __file__, '--step', name, '--json', str(rows)]
    if is_rehearsal:
        command.append('--rehearse')
    start = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        _, errors = process.communicate(timeout=limit)
        status = 'done' if process.returncode == 0 else f'exit status {process.returncode}'
    except subprocess.TimeoutExpired:
        errors, status = '', 'cut'
    finally:
        with contextlib.suppress(ProcessLookupError):  # also the programs that the step has started
            os.killpg(process.pid, signal.SIGKILL)
    seconds = round(time.monotonic() - start, 1)
    found = {'status': status, 'seconds': seconds, 'stderr': errors.splitlines()[-6:] if status != 'done' else []}
    if rows.exists():
        found.update(json.loads(rows.read_text()))
        rows.unlink()
    print(f'== {name}: {status}, {seconds} s', *found['stderr'], sep='\n   ', flush=True)
    return found


# Steps


def step_machine(report: Report) -> None:
    report.note(torch=torch.__version__, cores=os.cpu_count(), compiler=shutil.which('cc'))
    with contextlib.suppress(ImportError):
        import triton

        report.note(triton=triton.__version__)
    if not report.is_rehearsal:
        report.note(device=torch.cuda.get_device_name(), capability=torch.cuda.get_device_capability())
        report.note(gb_per_s=_bandwidth('cuda') / 1e9, tflops_bfloat16=_peak(torch.bfloat16, 'cuda') / 1e12)
    x = torch.zeros(1, device=report.device)

    def launch_a_thousand() -> None:
        for _ in range(1000):
            x.add_(1)

    launch_a_thousand()
    with report.row(what='x.add_(1)') as row:
        row['host_us'], row['wall_us'] = (1e3 * seconds for seconds in seconds_of(launch_a_thousand, report.device))


def step_kernel(report: Report) -> None:
    """Compare the kernel and torch's attention with float64, and time them."""
    for case in [TINY_CASE] if report.is_rehearsal else CASES:
        exact = results(case, 'reference', torch.float64, report.device)
        for backend in ('sdpa', 'reference') if report.is_rehearsal else ('triton', 'sdpa', 'reference'):
            shape = case._replace(dtype=str(case.dtype).removeprefix('torch.'))._asdict()  # type: ignore[arg-type]
            with report.row(**shape, backend=backend) as row:
                row['errors'] = errors(results(case, backend, case.dtype, report.device), exact)
                inputs = make_inputs(case, case.dtype, report.device)
                infer = torch.no_grad()(functools.partial(attend, case, inputs, backend))
                train = functools.partial(gradients, case, inputs, backend)
                row['inference_ms'], row['inference_launches'] = device_time(infer, report.device)
                row['training_ms'], row['training_launches'] = device_time(train, report.device)
                row['inference_host_us'] = 1e6 * statistics.median(
                    seconds_of(infer, report.device)[0] for _ in range(9)
                )
                if not report.is_rehearsal:
                    row['training_mib'] = peak_mib(train)


def step_eager(report: Report) -> None:
    """Time whole models: inference and training by autocast, and inference in bfloat16."""
    compare(report, SIZE, 2, is_training=False, is_pure=False)
    compare(report, SIZE, 2, is_training=True, is_pure=False)
    compare(report, SIZE, 2, is_training=False, is_pure=True)


def step_sizes(report: Report) -> None:
    for size, batch in (((224, 224), 1), ((224, 224), 32), ((512, 512), 1), (SIZE, 8)):
        compare(report, size, batch, is_training=False, is_pure=False)


def step_graphs(report: Report) -> None:
    """Time replays of captured graphs, which launch nothing from the host."""
    if report.is_rehearsal:
        report.note(skipped='a CPU has no graphs')
        return
    for size, batch in ((SIZE, 2), (SIZE, 1), ((224, 224), 1)):
        img = torch.randn(batch, 3, *size, device='cuda')
        for name, model in build_models(report, size, is_training=False, is_pure=False).items():
            with report.row(model=name, size=size, batch=batch) as row:
                run = pass_of(model, img, is_training=False, is_pure=False, caches_casts=False)
                graph, outs = captured(run)
                graph.replay()
                replayed = [out.clone() for out in outs]
                row['same_bits'] = all(torch.equal(a, b) for a, b in zip(replayed, run(), strict=True))
                row['wall_ms'] = 1e3 * statistics.median(seconds_of(graph.replay, 'cuda')[1] for _ in range(ROUNDS))


def step_tests(report: Report) -> None:
    """Run the tests marked gpu, without those that compile models for minutes."""
    command = [sys.executable, '-m', 'pytest', '-m', 'gpu', '-v', '--tb=line', '-p', 'no:cacheprovider']
    command += ['tests/ops', 'tests/models/test_gpu.py', '-k', 'not compile', '--maxfail', '20']
    if report.is_rehearsal:
        command.append('--collect-only')
    passed, lines = 0, []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            lines = [*lines[-24:], line.rstrip()]
            passed += ' PASSED' in line
            report.note(passed=passed, last_lines=lines)
            if ' FAILED' in line or ' ERROR' in line:
                with report.row(test=line.split(' ')[0]):
                    pass


def step_memory(report: Report) -> None:
    if report.is_rehearsal:
        report.note(skipped='torch counts the memory of a GPU alone')
        return
    img = torch.randn(2, 3, *SIZE, device='cuda')
    for is_training in (False, True):
        for name, model in build_models(report, SIZE, is_training, is_pure=False).items():
            with report.row(model=name, training=is_training) as row:
                run = pass_of(model, img, is_training, is_pure=False)
                run()
                model.zero_grad(set_to_none=True)
                row['peak_mib'] = peak_mib(run)


def step_compiled(report: Report) -> None:
    """Time compiled models, of ours with plain operations ('auto') and with the kernel; inference first."""
    size = (64, 96) if report.is_rehearsal else SIZE
    img = torch.randn(2, 3, *size, device=report.device)
    for is_training in (False, True):
        for name in ('auto',) if report.is_rehearsal else ('auto', 'triton', 'timm', 'torchvision'):
            torch._dynamo.reset()
            with report.row(model=name, training=is_training) as row:
                (model,) = build_models(report, size, is_training, is_pure=False, names=[name]).values()
                run = pass_of(torch.compile(model, dynamic=False), img, is_training, is_pure=False)
                row['compile_s'] = seconds_of(run, report.device)[1]
                run()
                row.update(median_times({name: run}, report)[name])
                row['device_ms'], row['launches'] = device_time(run, report.device)


# Attention alone


def make_inputs(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Return a map, weight and bias of its projection, and a position table, the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(0)
    shapes = (
        (1, case.height, case.width, case.channels),
        (3 * case.channels, case.channels),
        (3 * case.channels,),
        ((2 * case.window - 1) ** 2, case.heads),
    )
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    drawn[1] /= case.channels**0.5
    return tuple(x.to(case.dtype).to(device, dtype).requires_grad_() for x in drawn)


def attend(case: Case, inputs: tuple[Tensor, ...], backend: str) -> Tensor:
    x, weight, bias, position = inputs
    window = case.window, case.window
    shift = case.window // 2, case.window // 2
    spec = WindowSpec(case.heads, window, shift, (case.channels // case.heads) ** -0.5)
    return window_attention(x, lambda tokens: F.linear(tokens, weight, bias), position, spec, nn.Dropout(0.0), backend)


def gradients(case: Case, inputs: tuple[Tensor, ...], backend: str) -> tuple[Tensor, ...]:
    """Return the output and the gradients of all inputs."""
    out = attend(case, inputs, backend)
    factors = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    return out.detach(), *torch.autograd.grad(out, inputs, factors.to(case.dtype).to(out.dtype))


def results(case: Case, backend: str, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    names = ('output', 'map', 'weight', 'bias', 'position bias')
    return dict(zip(names, gradients(case, make_inputs(case, dtype, device), backend), strict=True))


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest error of each result, relative to its largest value."""
    return {
        name: ((found[name].double() - truth).abs().max() / truth.abs().max()).item() for name, truth in exact.items()
    }


# Whole models


def compare(report: Report, size: tuple[int, int], batch: int, is_training: bool, is_pure: bool) -> None:
    """Time all models in turns."""
    if report.is_rehearsal:
        size, batch = (64, 96), 1
    img = torch.randn(batch, 3, *size, device=report.device)
    settings = {'size': size, 'batch': batch, 'training': is_training, 'pure_bfloat16': is_pure}
    runs = {}
    for name, model in build_models(report, size, is_training, is_pure).items():
        run = pass_of(model, img, is_training, is_pure)
        try:
            run()
            runs[name] = run
        except Exception as error:
            with report.row(model=name, **settings):
                raise error
    if not report.is_rehearsal:
        from swin_dense.ops.triton import choice

        report.note(trials={str(trial): reason for trial, reason in choice._reasons.items()})
    measured = median_times(runs, report)
    for name, run in runs.items():
        with report.row(model=name, **settings, **measured[name]) as row:
            row['device_ms'], row['launches'] = device_time(run, report.device)


def build_models(
    report: Report,
    size: tuple[int, int],
    is_training: bool,
    is_pure: bool,
    names: Sequence[str] = (*OURS, *PEERS),
) -> dict[str, nn.Module]:
    """Return the models that can be built here, with the same weights."""
    built: dict[str, nn.Module] = {}
    for name in names:
        try:
            model: nn.Module = build_ours('swin_t', 7, 'auto' if name in PEERS else name)
            if name in PEERS:
                model = build_peer(name, model, size)  # type: ignore[arg-type]
        except Exception as error:  # a package that is not installed, or is broken
            report.note(
                absent={**report.content.get('absent', {}), name: f'{type(error).__name__}: {str(error)[:200]}'}
            )
            continue
        model = model.to(report.device, torch.bfloat16 if is_pure else torch.float32)
        model.train(is_training)  # mmdet's returns None
        built[name] = model
    return built


def pass_of(
    model: Any,
    img: Tensor,
    is_training: bool,
    is_pure: bool,
    caches_casts: bool = True,
) -> Callable[[], Sequence[Tensor]]:
    """Return a function that runs a pass, in training a forward and a backward pass."""
    img = img.to(torch.bfloat16) if is_pure else img
    autocast = torch.autocast(img.device.type, torch.bfloat16, enabled=not is_pure, cache_enabled=caches_casts)

    def run() -> Sequence[Tensor]:
        with torch.set_grad_enabled(is_training):
            with autocast:
                outs = model(img)
            if is_training:
                model.zero_grad(set_to_none=True)
                torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
        return outs

    return run


def captured(run: Callable[[], Sequence[Tensor]]) -> tuple[torch.cuda.CUDAGraph, Sequence[Tensor]]:
    """Return a graph of a pass and its outputs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    return graph, outs


# Times


def median_times(runs: dict[str, Callable[[], object]], report: Report) -> dict[str, dict[str, float]]:
    """Return medians of host and wall time in milliseconds; the models take turns in a random order."""
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(2 if report.is_rehearsal else ROUNDS):
        for name in random.sample(list(runs), len(runs)):
            measured[name].append(seconds_of(runs[name], report.device))
    medians = {}
    for name, pairs in measured.items():
        host, wall = (1e3 * statistics.median(times) for times in zip(*pairs, strict=True))
        medians[name] = {'host_ms': host, 'wall_ms': wall}
    return medians


def seconds_of(function: Callable[[], object], device: str) -> tuple[float, float]:
    """Return the seconds until a call returns, and until the device has finished."""
    if device == 'cuda':
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    host = time.perf_counter() - start
    if device == 'cuda':
        torch.cuda.synchronize()
    return host, time.perf_counter() - start


def device_time(function: Callable[[], object], device: str, rounds: int = 5) -> tuple[float, float]:
    """Return the milliseconds of all kernels of a call, and their number; 0 on a CPU."""
    function()
    if device == 'cpu':
        return 0.0, 0.0
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            function()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(kernel.device_time for kernel in kernels) / rounds / 1e3, len(kernels) / rounds


if __name__ == '__main__':
    main()
