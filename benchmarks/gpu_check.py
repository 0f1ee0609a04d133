"""Run one piece of the checks and benchmarks for a GPU. tools/gpu_check.sh runs all pieces in sequence.

python benchmarks/gpu_check.py --list
python benchmarks/gpu_check.py t-eager --out work_dirs/gpu_check
python benchmarks/gpu_check.py t-eager --out work_dirs/rehearsal --rehearse      small sizes, without a GPU
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import torch
from bench_limits import elapsed, summary
from bench_models import PEERS, build_ours, build_peer
from torch import Tensor, nn

from swin_dense.doctor import kernel_cases, kernels
from swin_dense.ops.windows import WindowSpec

ROOT = Path(__file__).parent.parent
# In order of preparation.
MODELS = ('auto', 'timm', 'mmdet', 'torchvision', 'transformers', 'sdpa')
SIZE, SMALL_SIZE = (800, 1344), (64, 96)
# (batch size, whether it is a training step)
INFERENCE, TRAINING = ((1, False), (8, False)), ((2, True),)
ROUNDS = 30
# Time limit in seconds for preparing the models of a piece, so that enough time remains for measurements.
PREPARATION = 330


class Report:
    """A JSON file that is rewritten after each new result."""

    def __init__(self, path: Path, is_rehearsal: bool) -> None:
        self._path = path
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or 'CPU'
        self.data: dict[str, Any] = {
            'is_rehearsal': is_rehearsal,
            'device': device,
            'python': platform.python_version(),
            'torch': torch.__version__,
            'numpy': np.__version__,
        }

    def write(self, **found: Any) -> None:
        self.data.update(found)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self.data, indent=1) + '\n')


def check_kernels(report: Report, rehearse: bool) -> None:
    """Verify and time all kernels, as `swin-dense doctor --again` does. Later pieces use the verdict for 'auto'."""
    findings = kernels.examine(again=True)
    for finding in findings:
        print(f'{finding.status:7} {finding.name}: {finding.text}')
    report.write(findings=[dataclasses.asdict(finding) for finding in findings])
    if any(finding.status == 'broken' for finding in findings):
        raise SystemExit(1)


def run_tests(report: Report, rehearse: bool) -> None:
    """Run the tests that need a GPU. Without a GPU, they are collected and skipped."""
    folders = ['tests/ops', 'tests/doctor']
    command = [sys.executable, '-m', 'pytest', '-m', 'gpu', '-q', '-p', 'no:cacheprovider', *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    report.write(exit_status=done.returncode, summary=done.stdout.splitlines()[-1:])
    if done.returncode:
        raise SystemExit(done.returncode)


def sweep_attention(report: Report, rehearse: bool, window: int, stages: Sequence[int], blocks: Sequence[int]) -> None:
    """Time attention for a range of tiles, warps, stages, registers and programs, with the heads of Swin-T (window 7)
    or Swin-B (window 12).
    """
    from swin_dense.ops.triton import attention as backend

    def variants() -> Iterator[dict[str, Any]]:
        for stage, batch in [(stage, 1) for stage in stages] + [(0, 8)]:
            case = {'window': window, 'stage': stage, 'batch': batch}
            usual = backend.parameters(window**2, 32, torch.bfloat16)
            for programs in (8, 4, 16):
                yield {**case, 'tuning': usual, 'programs': programs}
            for block, warps, pipelined in itertools.product(blocks, (1, 2, 4, 8), (1, 2)):
                tuning = {'BLOCK': block, 'num_warps': warps, 'num_stages': pipelined}
                yield {**case, 'tuning': tuning, 'programs': 8}
                if warps == 4:
                    yield {**case, 'tuning': {**tuning, 'maxnreg': 128}, 'programs': 8}

    def call(variant: dict[str, Any]) -> tuple[Callable[..., Tensor], list[Tensor]]:
        heads = (3 if window == 7 else 4) * 2 ** variant['stage']
        qkv = torch.randn(variant['batch'], *_grid(variant['stage'], rehearse), 96 * heads, dtype=torch.bfloat16)
        leaves = [qkv, torch.randn(heads, window**2, window**2), torch.randn(64 * heads)]
        backend._launch.cache_clear()
        spec = WindowSpec(heads, (window, window), (window // 2, window // 2), 32**-0.5)
        return functools.partial(backend.window_attention, spec=spec), leaves

    _sweep(report, backend, variants(), call, rehearse)


def sweep_norm(report: Report, rehearse: bool) -> None:
    """Time the LayerNorm kernels for a range of rows, warps and programs in all layouts, and torch's LayerNorm."""
    from swin_dense.ops.triton import norm

    def variants() -> Iterator[dict[str, Any]]:
        for layout, stage in itertools.product(norm.LAYOUTS, range(4)):
            yield {'layout': layout, 'stage': stage}
            for rows, warps, programs in itertools.product((1, 4, 8, 16, 32), (4, 8), (4, 8)):
                tuning = {'ROWS': rows, 'num_warps': warps}
                yield {'layout': layout, 'stage': stage, 'tuning': tuning, 'programs': programs}

    def call(variant: dict[str, Any]) -> tuple[Callable[..., Tensor], list[Tensor]]:
        channels, layout = 96 * 2 ** variant['stage'], variant['layout']
        normed = channels * (4 if layout == 'merged' else 1)
        leaves = [torch.randn(1, *_grid(variant['stage'], rehearse), channels), torch.ones(normed), torch.zeros(normed)]
        if 'tuning' not in variant and layout == 'tokens':
            return lambda x, *rest: torch.nn.functional.layer_norm(x, (normed,), *rest).bfloat16(), leaves
        dtype = torch.float32 if layout == 'maps' else torch.bfloat16
        return functools.partial(norm.LAYOUTS[layout], eps=1e-5, dtype=dtype), leaves

    _sweep(report, norm, variants(), call, rehearse)


def _sweep(
    report: Report,
    kernels: ModuleType,
    variants: Iterator[dict[str, Any]],
    call: Callable[[dict[str, Any]], tuple[Callable[..., Tensor], list[Tensor]]],
    rehearse: bool,
) -> None:
    """Time the forward pass, and the forward and backward pass, of all variants. Failures are recorded.

    Args:
        report: written after each variant.
        kernels: the module whose launch parameters vary.
        variants: dicts whose 'tuning' and 'programs' replace those of the module.
        call: returns a function and its arguments for a variant.
        rehearse: only compile the kernels of a few variants for an H100, without running them.
    """
    rows: list[dict[str, Any]] = []
    with _compiling_only() if rehearse else contextlib.nullcontext():
        for variant in variants:
            torch.manual_seed(0)
            function, leaves = call(variant)
            with contextlib.ExitStack() as stack:
                if 'tuning' in variant:
                    tuning, programs = variant['tuning'], variant['programs']
                    stack.enter_context(mock.patch.object(kernels, 'parameters', return_value=tuning))
                    stack.enter_context(mock.patch.object(kernels, '_PROGRAMS_PER_MULTIPROCESSOR', programs))
                try:
                    variant |= _times(function, leaves)
                except Exception as error:  # a variant may need more than the GPU has
                    variant['failed'] = _reason(error)
            rows.append(variant)
            report.write(rows=rows)
            if rehearse and len(rows) == 4:
                break


@contextlib.contextmanager
def _compiling_only() -> Iterator[None]:
    """Replace launches of Triton kernels by compilation for an H100."""
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self):
            return GPUTarget('cuda', 90, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

    def launch(kernel, grid):
        return lambda *args, **options: kernel.warmup(*args, grid=grid, **options)

    triton.runtime.driver.set_active(Driver())
    with mock.patch.object(triton.JITFunction, '__getitem__', launch):
        yield


def _times(function: Callable[..., Tensor], leaves: list[Tensor]) -> dict[str, float]:
    """Return the median time in microseconds of a forward pass without gradients, and of forward and backward."""
    device = torch.device(_device())
    leaves = [leaf.to(device).requires_grad_() for leaf in leaves]
    passes = kernel_cases.passes(function, leaves)
    return {f'{mode}_us': kernel_cases.microseconds(one, device) for mode, one in passes.items()}


def compare(report: Report, rehearse: bool, arch: str, cases: Sequence[tuple[int, bool]], way: str) -> None:
    """Time all models, which alternate in each round, and measure the memory of one step, in this process.

    Args:
        report: written after each round.
        rehearse: use small images and few rounds.
        arch: 't' or 'b'.
        cases: (batch size, whether it is a training step).
        way: 'eager', 'compiled' or 'graphs'.
    """
    size, rounds = (SMALL_SIZE, 2) if rehearse else (SIZE, ROUNDS)
    results: list[dict[str, Any]] = []
    for batch, is_training in cases[-1:] if rehearse else cases:
        started = time.monotonic()
        img = torch.randn(batch, 3, *size).to(_device())
        result: dict[str, Any] = {'batch': batch, 'train': is_training, 'size': size, 'left_out': {}, 'models': {}}
        results.append(result)
        steps: dict[str, Callable[[], Any]] = {}
        for name in MODELS:
            try:
                if time.monotonic() - started > PREPARATION / len(cases):
                    raise TimeoutError('the time limit for preparation was reached')
                steps[name], memory = _prepare(name, arch, img, is_training, way, rehearse)
                result['models'][name] = {'peak_mib': memory, 'milliseconds': []}
            except Exception as error:  # an error in one model must not prevent timing the others
                result['left_out'][name] = _reason(error)
                print(f'{name} is skipped: {_reason(error)}', file=sys.stderr)
            report.write(cases=results)
        for _ in range(rounds):
            for name, step in steps.items():
                result['models'][name]['milliseconds'].append(1e3 * elapsed(step, _device()))
            report.write(cases=results)
        for name in steps:
            row = result['models'][name]
            row |= summary([ms / 1e3 for ms in row['milliseconds']], batch)
            print(
                f'{arch} {way} batch {batch} {"train" if is_training else "infer"} {name}: '
                f'{row["median_ms"]:.2f} ms, {row["peak_mib"]} MiB'
            )
        report.write(cases=results)
        del steps
        torch._dynamo.reset()
        _free()


def _prepare(
    name: str, arch: str, img: Tensor, is_training: bool, way: str, rehearse: bool
) -> tuple[Callable[[], Any], float | None]:
    """Return a function for one step of a model, after warm-up, and the peak memory of a step in MiB above weights."""
    _free()
    ours = build_ours(arch, 7, 'auto' if name in PEERS else name)
    model: nn.Module = build_peer(name, ours, (img.shape[2], img.shape[3])) if name in PEERS else ours
    del ours
    model = model.to(_device())
    model.train(is_training)
    if way == 'compiled':
        model = torch.compile(model, dynamic=False, backend='aot_eager' if rehearse else 'inductor')  # type: ignore
    if way == 'graphs':
        step = _captured(model, img, is_training)
    else:
        step = functools.partial(_step, model, img, is_training)
    for _ in range(3):
        step()
    if not torch.cuda.is_available():
        return step, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return step, round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


def _forward(model: nn.Module, img: Tensor, cache: bool = True) -> list[Tensor]:
    with torch.autocast(img.device.type, torch.bfloat16, cache_enabled=cache):
        return list(model(img))


def _step(model: nn.Module, img: Tensor, is_training: bool, cache: bool = True) -> list[Tensor]:
    """Run one inference or one forward and backward pass."""
    with torch.set_grad_enabled(is_training):
        outs = _forward(model, img, cache)
    if is_training:
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
    return outs


def _captured(model: nn.Module, img: Tensor, is_training: bool) -> Callable[[], Any]:
    """Return a function that replays a CUDA graph of one step.

    The cache of autocast is disabled, because cached casts would outlive the captured graph.
    """
    if not torch.cuda.is_available():
        raise RuntimeError('CUDA graphs need a CUDA device')
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            _step(model, img, is_training, cache=False)
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = _step(model, img, is_training, cache=False)
    return functools.partial(_replay, graph, kept)


def _replay(graph: Any, kept: list[Tensor]) -> None:
    graph.replay()


def profile(report: Report, rehearse: bool) -> None:
    """Profile the kernels of Swin-T in inference with batch size 1 and in a training step with batch size 2."""
    size = SMALL_SIZE if rehearse else SIZE
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    found = {}
    for batch, is_training in ((1, False), (2, True)):
        model = build_ours('t', 7, 'auto').to(_device())
        model.train(is_training)
        img = torch.randn(batch, 3, *size).to(_device())
        for _ in range(3):
            _step(model, img, is_training)
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(1 if rehearse else 5):
                _step(model, img, is_training)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        events = profiler.key_averages()
        found['train' if is_training else 'infer'] = [
            {'name': e.key, 'calls': e.count, 'gpu_us': e.self_device_time_total, 'cpu_us': e.self_cpu_time_total}
            for e in sorted(events, key=lambda e: -(e.self_device_time_total or e.self_cpu_time_total))[:60]
        ]
        report.write(profile=found)
        order = 'self_cuda_time_total' if torch.cuda.is_available() else 'self_cpu_time_total'
        print(events.table(sort_by=order, row_limit=25, max_name_column_width=60))


def _device() -> str:
    return 'cuda' if torch.cuda.is_available() else 'cpu'


def _grid(stage: int, rehearse: bool) -> tuple[int, int]:
    height, width = SMALL_SIZE if rehearse else SIZE
    return -(-height // (4 * 2**stage)), -(-width // (4 * 2**stage))


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return f'{type(error).__name__}: {lines[0] if lines else ""}'


def collect(folder: Path) -> dict[str, Any]:
    """Return the medians of all comparisons in a folder of reports, in the format of tools/update_readme.py."""
    cases: list[dict[str, Any]] = []
    machine: dict[str, Any] = {}
    for name in COMPARISONS:
        path = folder / f'{name}.json'
        found = json.loads(path.read_text()) if path.exists() else {}
        machine |= {key: found[key] for key in ('is_rehearsal', 'device', 'torch') if key in found}
        arch, way = name.split('-')[:2]
        for case in found.get('cases', ()):
            models = {
                model: {key: row[key] for key in ('median_ms', 'peak_mib')}
                for model, row in case['models'].items()
                if 'median_ms' in row
            }
            about = {key: case[key] for key in ('batch', 'train', 'size', 'left_out')}
            cases.append({'arch': arch, 'way': way, **about, 'models': models})
    return {**machine, 'cases': cases}


def _comparisons(way: str) -> dict[str, Callable[[Report, bool], None]]:
    if way != 'compiled':
        cases = INFERENCE + TRAINING
        return {f'{arch}-{way}': functools.partial(compare, arch=arch, cases=cases, way=way) for arch in 'tb'}
    return {  # compilation is slow, so each case is a separate piece
        f'{arch}-compiled-{"train" if case[1] else "infer"}-{case[0]}': functools.partial(
            compare, arch=arch, cases=(case,), way=way
        )
        for arch in 'tb'
        for case in INFERENCE + TRAINING
    }


COMPARISONS = {**_comparisons('eager'), **_comparisons('compiled'), **_comparisons('graphs')}
# The most important pieces come first.
PIECES: dict[str, Callable[[Report, bool], None]] = {
    'kernels': check_kernels,
    'tests': run_tests,
    **COMPARISONS,
    'profile': profile,
    'sweep-window-7': functools.partial(sweep_attention, window=7, stages=range(4), blocks=(64,)),
    'sweep-window-12': functools.partial(sweep_attention, window=12, stages=(0, 2), blocks=(16, 32, 64)),
    'sweep-norm': sweep_norm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('piece', nargs='?', choices=PIECES)
    parser.add_argument('--list', action='store_true', help='print the pieces, the most important first')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/gpu_check'), help='folder of the reports')
    parser.add_argument('--rehearse', action='store_true', help='use small sizes; works without a GPU')
    args = parser.parse_args()
    if args.list:
        print(*PIECES, sep='\n')
        return
    if args.piece is None:
        parser.error('give a piece, or --list')
    if not args.rehearse and not torch.cuda.is_available():
        parser.error('torch detects no CUDA device; --rehearse runs the same steps with small sizes on the CPU')
    report = Report(args.out / f'{args.piece}.json', args.rehearse)
    report.write()
    PIECES[args.piece](report, args.rehearse)
    report.write(is_complete=True)
    (args.out / 'gpu.json').write_text(json.dumps(collect(args.out), indent=1) + '\n')


if __name__ == '__main__':
    main()
