"""Compare time and memory of our backbone with the Swins of other libraries and with the limits of the machine.

    python benchmarks/benchmark.py --arch t --size 800 1344 --mode infer --json benchmarks/results/infer.json
    python benchmarks/benchmark.py --size 512 512 --batch 2 --mode train --ours auto auto+cp --peers mmdet timm
    python benchmarks/benchmark.py --packages .venv-peers/lib/python3.11/site-packages  # all five peers in one process
    python benchmarks/benchmark.py --sweep --rounds 3 --peers --plot cost.png

All models run in one process with the same weights and image. They take turns in each round, in a random order, so
that other load affects all of them. Memory on a CPU is measured in three separate processes per model: the peak above
the memory after a pass over a small image. A training step is a forward and a backward pass, without the optimizer
step, which is the same for all models.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from bench_host import processor
from bench_limits import elapsed, matrix_products, peak_mib, roofline, summary
from bench_models import PEERS, build_ours, build_peer, must_agree
from torch import Tensor, nn

from swin_dense.ops import BACKENDS

DTYPES = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}
SMALL_SIDE = 64
# Relative to the largest output, for another order of summation in float32, or for 8 bits of mantissa.
TOLERANCE = {'float32': 1e-3, 'bfloat16': 1e-1, 'float16': 2e-2}


def main() -> None:
    args = parse_args()
    if args.memory_of:
        print(json.dumps({'peak_mib': peak_memory(args)}))
        return
    if args.sweep:
        report = sweep(args)
    else:
        report = compare(args) if args.processes == 1 else compare_in_processes(args)
    report = {'command': 'python benchmarks/benchmark.py ' + ' '.join(sys.argv[1:]), 'machine': machine(args), **report}
    print(sweep_table(report) if args.sweep else table(report))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + '\n')
    if args.plot:
        plot(report, args.plot)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--arch', default='swin_t', help='swin_t to swin_l or swinv2_t to swinv2_l')
    parser.add_argument('--size', nargs=2, type=int, default=(800, 1344), metavar=('HEIGHT', 'WIDTH'), help='in pixels')
    parser.add_argument('--batch', type=int, default=1)
    parser.add_argument('--window', type=int, default=7, help='side of a window in tokens')
    parser.add_argument('--mode', choices=('infer', 'train'), default='infer')
    parser.add_argument('--dtype', choices=DTYPES, default='float32', help='types other than float32 use autocast')
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cpu')
    parser.add_argument('--compile', action='store_true', help='compile all models with torch.compile')
    parser.add_argument('--rounds', type=int, default=15, help='rounds in each process (default: %(default)s)')
    parser.add_argument(
        '--processes',
        type=int,
        default=1,
        help='number of new processes, run in sequence, because allocators treat large temporaries differently in each',
    )
    parser.add_argument('--threads', type=int, help="number of threads; default: torch's own choice")
    parser.add_argument('--ours', nargs='+', default=['auto'], help='backends; the suffix "+cp" enables with_cp')
    parser.add_argument('--peers', nargs='*', choices=PEERS, default=list(PEERS), metavar='PEER', help=' '.join(PEERS))
    parser.add_argument(
        '--packages',
        type=Path,
        help='site-packages of another environment with the same torch, for peers that are not installed here',
    )
    parser.add_argument('--no-memory', action='store_true', help='do not measure memory')
    parser.add_argument('--sweep', action='store_true', help='time a range of image areas, batch sizes and windows')
    parser.add_argument('--json', type=Path, help='write the report to this file')
    parser.add_argument('--plot', type=Path, help='plot the report to this file')
    parser.add_argument('--memory-of', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.rounds, args.processes, args.batch, *args.size) < 1:
        parser.error('--rounds, --processes, --batch and --size must be at least 1')
    unknown = {name.removesuffix('+cp') for name in args.ours} - set(BACKENDS)
    if unknown:
        parser.error(
            f'--ours must be of {", ".join(BACKENDS)}, with or without "+cp"; got {", ".join(sorted(unknown))}'
        )
    if args.device == 'cuda' and not torch.cuda.is_available():
        parser.error('--device cuda: torch detects no CUDA device')
    if args.packages:
        sys.path.append(str(args.packages.resolve()))
        # mmdet imports mmpretrain if it is installed, which may not be compatible with the other packages.
        sys.modules['mmpretrain'] = None  # type: ignore[assignment]
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def build(name: str, args: argparse.Namespace) -> Any:
    """Build the model for a row of the table, on its device and in its mode."""
    if name in PEERS:
        ours = build_ours(args.arch, args.window, 'auto')
        model = build_peer(name, ours, tuple(args.size))
    else:
        model = build_ours(args.arch, args.window, name)
    model = model.to(args.device)
    model.train(args.mode == 'train')  # mmdet's and mmseg's train() return None
    return torch.compile(model) if args.compile else model


def step(model: nn.Module, img: Tensor, args: argparse.Namespace) -> tuple[Tensor, ...]:
    """Run one inference or one training step, without the update."""
    is_training = args.mode == 'train'
    dtype = DTYPES[args.dtype]
    with torch.set_grad_enabled(is_training):
        with torch.autocast(args.device, dtype, enabled=dtype != torch.float32):
            outs = model(img)
        if is_training:
            model.zero_grad(set_to_none=True)
            torch.stack([out.float().square().mean() for out in outs]).sum().backward()
    return outs


def make_image(args: argparse.Namespace, size: tuple[int, int] | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(args.batch, 3, *(size or args.size), generator=generator).to(args.device)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    img = make_image(args)
    models, absent = {}, {}
    for name in [*args.ours, *args.peers]:
        try:
            model = build(name, args)
            if name not in PEERS:  # an unsupported backend raises an error on first use
                with torch.no_grad():
                    model(make_image(args, (SMALL_SIDE, SMALL_SIDE)))
            models[name] = model
        except (ImportError, RuntimeError, AssertionError) as error:
            absent[name] = f'{type(error).__name__}: {str(error).splitlines()[0]}'
            print(f'{name} is skipped: {absent[name]}', file=sys.stderr)
    if not models:
        sys.exit('none of the models can run here')
    agreement = check_outputs(models, img, args)

    reference = build_ours(args.arch, args.window, 'auto')
    shape: Any = (reference, tuple(args.size), args.batch, args.mode, DTYPES[args.dtype], args.device)
    runs: dict[str, Callable[[], object]] = {
        name: functools.partial(step, model, img, args) for name, model in models.items()
    }
    runs['matrix products'] = matrix_products(*shape)
    first = {name: elapsed(run, args.device) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        # In a fixed order, a model would always find the caches and the allocator as the same other model left them.
        for name, run in random.sample(list(runs.items()), len(runs)):
            seconds[name].append(elapsed(run, args.device))
            if name in models:
                models[name].zero_grad(set_to_none=True)
    rows: dict[str, dict[str, Any]] = {
        name: summary(times, args.batch) | {'first_call_ms': 1e3 * first[name]} for name, times in seconds.items()
    }
    for name, model in models.items() if not args.no_memory else ():
        is_cuda = args.device == 'cuda'  # whose allocator counts exactly, whatever ran before
        rows[name]['peak_mib'] = device_memory(model, img, args) if is_cuda else memory_in_processes(name)
    limit = roofline(*shape)
    return {
        'options': written(args),
        'rows': rows,
        'seconds': seconds,
        'roofline': limit,
        'agreement': agreement,
        'absent': absent,
    }


def compare_in_processes(args: argparse.Namespace) -> dict[str, Any]:
    """Compare in several new processes. Times are medians over processes; ``ratios`` has one ratio per process."""
    reports = []
    for index in range(args.processes):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / 'report.json'
            own = ['--processes', '1', '--json', str(report), *(['--no-memory'] if index else [])]
            command = [sys.executable, '-W', 'ignore', __file__, *sys.argv[1:], *own]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            reports.append(json.loads(report.read_text()))
        print(f'process {index + 1} of {args.processes} is done', file=sys.stderr)
    first = reports[0]
    del first['command']  # the caller adds its own command
    ours = next(iter(first['rows']))
    names = [name for name in first['rows'] if all(name in report['rows'] for report in reports)]
    rows, ratios = {}, {}
    for name in names:
        own_rows = [report['rows'][name] for report in reports]
        over = {key: statistics.median(row[key] for row in own_rows) for key in own_rows[0] if key != 'peak_mib'}
        rows[name] = {**first['rows'][name], **over}
        ratios[name] = [report['rows'][name]['median_ms'] / report['rows'][ours]['median_ms'] for report in reports]
    seconds = {name: [report['seconds'][name] for report in reports] for name in names}
    return {**first, 'options': written(args), 'rows': rows, 'ratios': ratios, 'seconds': seconds}


def written(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options in a form that JSON can store."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}


def check_outputs(models: dict[str, nn.Module], img: Tensor, args: argparse.Namespace) -> dict[str, float]:
    """Return the largest difference of each model from the first, relative to the largest output.

    Raises:
        RuntimeError: a model differs although it should compute the same function at this size.
    """
    first, *_ = models
    differences = {}
    with torch.no_grad():
        expected = None
        for name, model in models.items():
            model.eval()
            with torch.autocast(args.device, DTYPES[args.dtype], enabled=args.dtype != 'float32'):
                outs = model(img)
            model.train(args.mode == 'train')
            expected = expected or outs
            pairs = zip(outs, expected, strict=True)
            differences[name] = max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)
    for name, difference in differences.items():
        is_expected = name not in PEERS or must_agree(name, tuple(args.size), args.window)
        if is_expected and not difference < TOLERANCE[args.dtype]:
            raise RuntimeError(f'{name} differs from {first} by {difference:.2g}, so their times cannot be compared')
    return differences


def memory_in_processes(name: str) -> float | None:
    """Return the peak memory in MiB of a model, the median of three separate processes, or None if one fails."""
    command = [sys.executable, '-W', 'ignore', __file__, *sys.argv[1:], '--memory-of', name]
    peaks = []
    for _ in range(3):  # what the allocator returns to the system varies by a tenth
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f'exit status {done.returncode}']
            print(f'memory of {name} could not be measured: {lines[-1]}', file=sys.stderr)
            return None
        peaks.append(json.loads(done.stdout.splitlines()[-1])['peak_mib'])
    return statistics.median(peaks)


def device_memory(model: nn.Module, img: Tensor, args: argparse.Namespace) -> float:
    """Return the peak memory in MiB that a step allocates on the GPU, above that of the weights."""
    model.zero_grad(set_to_none=True)
    peak = peak_mib(lambda: step(model, img, args))
    model.zero_grad(set_to_none=True)
    return peak


def peak_memory(args: argparse.Namespace) -> float:
    """Return the peak memory in MiB of two steps, above the memory before them (libraries and weights)."""
    model = build(args.memory_of, args)
    img = make_image(args)
    # timm accepts only the size that it was built for, so it has no small pass.
    if args.memory_of != 'timm':
        step(model, make_image(args, (SMALL_SIDE, SMALL_SIDE)), args)
        model.zero_grad(set_to_none=True)
    process, done = psutil.Process(), threading.Event()
    start = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, process.memory_info().rss)
            time.sleep(1e-3)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(2):
        step(model, img, args)
    done.set()
    watcher.join()
    return (peak - start) / 2**20


def sweep(args: argparse.Namespace) -> dict[str, Any]:
    """Time our first backend and the peers for increasing area, batch size and window, one at a time."""
    sides = (224, 320, 448, 640, 896, 1280, 2048)
    cases: list[dict[str, Any]] = [{'size': (side, side)} for side in sides]
    cases += [{'size': (224, 224), 'batch': batch} for batch in (1, 2, 4, 8)]
    cases += [{'size': (672, 672), 'window': window} for window in (4, 7, 12, 16)]
    rows = []
    for case in cases:
        options = argparse.Namespace(**{**vars(args), **case, 'no_memory': True})
        img = make_image(options)
        models = {name: build(name, options) for name in [args.ours[0], *args.peers]}
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for round_ in range(args.rounds + 1):
            for name, model in models.items():
                taken = elapsed(functools.partial(step, model, img, options), args.device)
                if round_:
                    seconds[name].append(taken)
        for name, times in seconds.items():
            setting = {'model': name, 'size': options.size, 'batch': options.batch, 'window': options.window}
            rows.append({**setting, **summary(times, options.batch)})
    return {'sweep': rows}


def machine(args: argparse.Namespace) -> dict[str, Any]:
    is_cuda = args.device == 'cuda'
    return {
        'device': torch.cuda.get_device_name() if is_cuda else processor(),
        'threads': torch.get_num_threads(),
        'torch': torch.__version__,
        'python': platform.python_version(),
        'load_average': psutil.getloadavg(),
    }


def table(report: dict[str, Any]) -> str:
    """Return the comparison as a Markdown table. Ratios are relative to our first row."""
    rows, agreement = report['rows'], report['agreement']
    ours = next(iter(rows))
    head = ['model', 'median ms', 'p10', 'p90', 'images/s', f'time / {ours}', 'peak MiB', 'difference']
    lines = ['| ' + ' | '.join(head) + ' |', '|' + ' --- |' * len(head)]
    for name, row in rows.items():
        peak = row.get('peak_mib')
        cells = [
            name,
            *(f'{row[key]:.1f}' for key in ('median_ms', 'p10_ms', 'p90_ms')),
            f'{row["images_per_s"]:.2f}',
            ratio(report, name, ours),
            '' if peak is None else f'{peak:.0f}',
            f'{agreement[name]:.1e}' if name in agreement else '',
        ]
        lines.append('| ' + ' | '.join(cells) + ' |')
    limit = report['roofline']
    lines.append(
        f'\nroofline {1e3 * limit["seconds"]:.1f} ms, {1e3 * limit["seconds"] / rows[ours]["median_ms"]:.2f} of {ours} '
        f'({limit["peak_gflops_per_s"]:.0f} GFLOP/s, {limit["bandwidth_gb_per_s"]:.0f} GB/s)'
    )
    return '\n'.join([*lines, *(f'skipped: {name}: {reason}' for name, reason in report['absent'].items())])


def ratio(report: dict[str, Any], name: str, ours: str) -> str:
    """Return the time of a row relative to ``ours``: with several processes, the median and the range in brackets."""
    if 'ratios' not in report:
        return f'{report["rows"][name]["median_ms"] / report["rows"][ours]["median_ms"]:.2f}'
    ratios = report['ratios'][name]
    return f'{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})'


def sweep_table(report: dict[str, Any]) -> str:
    lines = ['| model | size | batch | window | median ms | ns per pixel |', '|' + ' --- |' * 6]
    for row in report['sweep']:
        height, width = row['size']
        per_pixel = 1e6 * row['median_ms'] / (height * width * row['batch'])
        lines.append(
            f'| {row["model"]} | {height} x {width} | {row["batch"]} | {row["window"]} '
            f'| {row["median_ms"]:.1f} | {per_pixel:.0f} |'
        )
    return '\n'.join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout='constrained')
    axes = figure.subplots()
    if 'sweep' in report:
        areas = [row for row in report['sweep'] if row['batch'] == 1 and row['window'] == 7]
        for model in dict.fromkeys(row['model'] for row in areas):
            points = sorted(
                (row['size'][0] * row['size'][1] / 1e6, row['median_ms']) for row in areas if row['model'] == model
            )
            axes.plot(*zip(*points, strict=True), marker='o', label=model)
        axes.set(xlabel='image area (megapixels)', ylabel='median time (ms)', xlim=(0, None), ylim=(0, None))
        axes.legend()
    else:
        rows = report['rows']
        names = list(rows)[::-1]
        axes.barh(names, [rows[name]['median_ms'] for name in names])
        axes.axvline(1e3 * report['roofline']['seconds'], color='black', linestyle=':', label='roofline')
        axes.set(xlabel='median time (ms)')
        axes.legend()
    figure.savefig(path)


if __name__ == '__main__':
    main()
