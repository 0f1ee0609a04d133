"""Time Swins on this processor, each in a process of its own, as a user runs it: ours and those of other libraries.

    python benchmarks/alone.py --packages .venv-peers/lib/python3.11/site-packages \\
        --json benchmarks/results/zen5_alone.json
    python benchmarks/alone.py --form compiled --packages ... --json benchmarks/results/zen5_alone_compiled.json
    python benchmarks/alone.py --models auto --beside ../release --threads 1 --clock processor --json /tmp/releases.json

All models get the same weights and image, and their outputs must agree. The processes take turns in a random order.
Forms other than eager take turns with our backbone in eager mode. A training step is a forward and a backward pass,
without the optimizer step, which is the same for all models. The peak memory is that of the first steps above the
memory after a pass over a small image.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_host import held_mib, reset_peak
from bench_models import PEERS, build_ours, build_peer, must_agree
from harness import Worker, in_turns, largest_error, serve
from measurements import Run
from torch import Tensor, nn

OURS = 'auto'
OURS_EAGER = 'auto, eager'
FORMS = ('eager', 'compiled', 'bfloat16')
CLOCKS = {'wall': ('time', time.perf_counter), 'processor': ('processor time', time.process_time)}
CASES = (
    'inference, 1 x 224 x 224',
    'inference, 8 x 224 x 224',
    'inference, 1 x 512 x 512',
    'inference, 1 x 800 x 1344',
    'training step, 2 x 512 x 512',
)
WARM_UP = 3  # steps
SMALL_SIDE = 64
# Relative to the largest output, for another order of summation in float32, or for 8 bits of mantissa.
TOLERANCE = {'eager': 1e-3, 'compiled': 1e-3, 'bfloat16': 1e-1}


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_args(arguments)
    if args.of:
        with contextlib.redirect_stdout(sys.stderr):  # other libraries print
            answer_as(args.of, args)
        return
    run = Run(args.json, arch=args.arch, window=args.window, threads=args.threads or torch.get_num_threads())
    run.content |= {'processes': args.processes, 'turns': args.turns}
    if args.form == 'eager':
        count(args, run)
    for case in args.cases:
        compare(case, args, run)


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, help='replace only what is measured again in the file')
    parser.add_argument('--arch', default='swin_t', help='swin_t to swin_l or swinv2_t to swinv2_l')
    parser.add_argument('--window', type=int, default=7, help='side of a window in tokens')
    parser.add_argument(
        '--models', nargs='+', default=PEERS, help='beside ours: backends, "+cp" enables with_cp; or peers'
    )
    parser.add_argument('--cases', nargs='+', default=CASES, help='such as "inference, 1 x 512 x 512"')
    parser.add_argument('--form', choices=FORMS, default='eager', help='compiled by torch.compile, or with autocast')
    parser.add_argument('--processes', type=int, default=2, help='of each model, in sequence (default: %(default)s)')
    parser.add_argument('--turns', type=int, default=10, help='of each process (default: %(default)s)')
    parser.add_argument('--threads', type=int, help="default: torch's own choice")
    parser.add_argument('--clock', choices=CLOCKS, default='wall', help='"processor" counts the time of all threads')
    parser.add_argument('--beside', type=Path, help='also time our backbone of another clone, such as a release')
    parser.add_argument('--packages', type=Path, help='site-packages with the same torch, for peers not installed here')
    parser.add_argument('--of', help=argparse.SUPPRESS)  # the model of a process
    return parser.parse_args(arguments)


def compare(case: str, args: argparse.Namespace, run: Run) -> None:
    """Add the measurements of all models in a case."""
    what, _, size = case.partition(', ')
    time_of = CLOCKS[args.clock][0]
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.processes):
        with contextlib.ExitStack() as stack:
            workers = {}
            for name, worker in started(case, args).items():
                stack.callback(worker.close)
                if worker.greeting is None:
                    workers[name] = worker
                else:
                    run.note(absent={**run.content.get('absent', {}), name: worker.greeting})
            for key, value in measured(workers, case, args).items():
                found.setdefault(key, []).append(value)
    units = {time_of: 'ms', 'first call': 'ms', 'peak memory': 'MiB', 'difference from ours': 'of the largest value'}
    for (name, quantity), values in found.items():
        run.add(values, quantity, units.get(quantity, 'ratio'), what=what, model=name, size=size, way=args.form)
        if quantity == time_of:
            print(f'{case}, {name}: {statistics.median(values):.1f} ms', flush=True)


def started(case: str, args: argparse.Namespace) -> dict[str, Worker]:
    """Start a process of each model."""
    form, eager = ['--form', args.form], ['--form', 'eager']
    options = {name: ['--of', name, *form] for name in dict.fromkeys([OURS, *args.models])}
    if args.form != 'eager':
        options[OURS_EAGER] = ['--of', OURS, *eager]
    trees = {}
    if args.beside:
        commit = subprocess.check_output(['git', '-C', args.beside, 'rev-parse', '--short=8', 'HEAD'], text=True)
        name = f'{OURS} of {commit.strip()}'
        options[name], trees[name] = options[OURS], args.beside.resolve()
    shared = ['--cases', case, '--arch', args.arch, '--window', str(args.window), '--clock', args.clock]
    for option in ('threads', 'packages'):
        shared += [f'--{option}', str(getattr(args, option))] if getattr(args, option) else []
    return {name: Worker(__file__, *own, *shared, tree=trees.get(name)) for name, own in options.items()}


def measured(workers: dict[str, Worker], case: str, args: argparse.Namespace) -> dict[tuple[str, str], float]:
    """Return the measurements of processes: name of the model and quantity -> value."""
    _, batch, size = parsed(case)
    time_of = CLOCKS[args.clock][0]
    found: dict[tuple[str, str], float] = {}
    for name, worker in workers.items():
        found[name, 'first call'] = 1e3 * worker.ask(WARM_UP)[0]
        found[name, 'peak memory'] = worker.ask('peak')
    steps = max(1, 250_000 // (batch * size[0] * size[1]))
    asked = {name: partial(worker.ask, steps) for name, worker in workers.items()}
    turns = {name: [statistics.median(times) for times in of] for name, of in in_turns(asked, args.turns).items()}
    for name, seconds in turns.items():
        found[name, time_of] = 1e3 * statistics.median(seconds)
        relative = [one / ours for one, ours in zip(seconds, turns[OURS], strict=True)]
        found[name, f'{time_of} relative to ours'] = statistics.median(relative)
    if args.form != 'compiled':  # which would be compiled again
        with tempfile.TemporaryDirectory() as folder:
            paths = {name: Path(folder) / f'{number}.pt' for number, name in enumerate(workers)}
            for name, path in paths.items():
                workers[name].ask(str(path))
            outputs = {name: torch.load(path) for name, path in paths.items()}
        for name, difference in differences(outputs, size, args.window, args.form).items():
            found[name, 'difference from ours'] = difference
    return found


def parsed(case: str) -> tuple[str, int, tuple[int, int]]:
    """Return what a case runs, the number of images, and their height and width.

    Raises:
        SystemExit: it has another form.
    """
    match = re.fullmatch(r'(inference|training step), (\d+) x (\d+) x (\d+)', case)
    if match is None:
        raise SystemExit(f'{case!r} is no case; write one such as {CASES[0]!r} or {CASES[-1]!r}')
    batch, height, width = map(int, match.groups()[1:])
    return match[1], batch, (height, width)


def differences(
    outputs: dict[str, Sequence[Tensor]], size: tuple[int, int], window: int, form: str
) -> dict[str, float]:
    """Return the largest difference of each model from the first, relative to the largest output.

    Raises:
        RuntimeError: a model differs although it should compute the same function at this size.
    """
    first, expected = next(iter(outputs.items()))
    found = {}
    for name, outs in outputs.items():
        found[name] = max(largest_error(a, b) for a, b in zip(outs, expected, strict=True))
        if (name not in PEERS or must_agree(name, size, window)) and not found[name] < TOLERANCE[form]:
            raise RuntimeError(f'{name} differs from {first} by {found[name]:.2g}, so their times cannot be compared')
    return found


def count(args: argparse.Namespace, run: Run) -> None:
    """Add the parameters and FLOPs of our backbone, for each size of images in inference."""
    from swin_dense.analysis.flop_counter import count

    for case in args.cases:
        what, batch, size = parsed(case)
        if (what, batch) == ('inference', 1):
            with torch.device('meta'):
                counted = count(build_ours(args.arch, args.window, OURS), *size)
            names = {'what': what, 'model': OURS, 'size': case.partition(', ')[2]}
            run.add(counted.parameters[''], 'parameters', 'numbers', **names)
            run.add(counted.flops[''], 'FLOPs', 'multiply-adds', **names)


# The process of a model


def answer_as(name: str, args: argparse.Namespace) -> None:
    """Run so many steps of a model for each number that is asked for; write its outputs, or tell its peak memory."""
    what, batch, size = parsed(args.cases[0])
    if args.packages:
        sys.path.append(str(args.packages.resolve()))
        # mmdet imports mmpretrain if it is installed, which may not be compatible with the other packages.
        sys.modules['mmpretrain'] = None  # type: ignore[assignment]
    if args.threads:
        torch.set_num_threads(args.threads)
    is_training = what == 'training step'
    try:
        model = built(name, args, size)
        model.train(is_training)  # mmdet's and mmseg's train() return None
        if name != 'timm' and args.form != 'compiled':  # timm accepts only the size that it was built for
            step(model, image(batch, (SMALL_SIDE, SMALL_SIDE)), is_training, args.form)
            model.zero_grad(set_to_none=True)
    except (ImportError, RuntimeError, AssertionError) as error:
        serve(f'{type(error).__name__}: {str(error).splitlines()[0]}', str, sys.__stdout__)
        return
    run = torch.compile(model) if args.form == 'compiled' else model
    clock = CLOCKS[args.clock][1]
    img = image(batch, size)
    before = reset_peak()

    def answer(question: Any) -> Any:
        if question == 'peak':
            return held_mib('VmHWM') - before
        if isinstance(question, str):
            model.eval()
            torch.save([out.float() for out in step(run, img, False, args.form)], question)
            return None
        return [timed(lambda: step(run, img, is_training, args.form), clock) for _ in range(question)]

    serve(None, answer, sys.__stdout__)


def built(name: str, args: argparse.Namespace, size: tuple[int, int]) -> nn.Module:
    ours = build_ours(args.arch, args.window, OURS if name in PEERS else name)
    return build_peer(name, ours, size) if name in PEERS else ours


def image(batch: int, size: tuple[int, int]) -> Tensor:
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(0))


def step(model: Any, img: Tensor, is_training: bool, form: str) -> tuple[Tensor, ...]:
    """Run one inference or one training step, without the update."""
    with torch.set_grad_enabled(is_training):
        with torch.autocast('cpu', torch.bfloat16, enabled=form == 'bfloat16'):
            outs = model(img)
        if is_training:
            model.zero_grad(set_to_none=True)
            torch.stack([out.float().square().mean() for out in outs]).sum().backward()
    return outs


def timed(function: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    function()
    return clock() - start


if __name__ == '__main__':
    main()
