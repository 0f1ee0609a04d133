"""Measure everything that needs a GPU, in two parts of five minutes.

    make gpu                        # both parts; writes benchmarks/results/gpu_session_1.json and gpu_session_2.json
    make gpu PART=2                 # one of them
    python benchmarks/gpu_session.py --json session.json --steps machine eager
    python benchmarks/gpu_session.py --rehearse --json /tmp/session.json          # on a CPU, with tiny inputs

Part 1 measures what docs/speed.md shows: whole models beside other libraries. Part 2 answers what is open: training
steps of whole detectors and segmentors, larger models, more images, the norm, use_graphs, torch.compile.

Each step is a run in the file and has a process of its own with a time limit. It writes a row as soon as it is
measured: a step that fails, breaks the GPU's context or is cut loses its next row only. The models of a table run in
one process and take turns in a random order.

Host time is the time until a call returns, wall time until the GPU has finished, both medians; the time in a loop is
that of a pass among others without a wait between them; GPU time is the sum of all kernels, launches are their number.
``absent`` names models that cannot be imported here, ``failed`` what ended with an error.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from bench_models import build_ours, build_peer
from harness import in_turns, kernels_of, median_ms, peak_mib, seconds_of
from measurements import Run, runs_in, write
from torch import Tensor, nn

from swin_dense import use_graphs
from swin_dense.models.layers import build_norm
from swin_dense.ops import norm as norm_operation
from swin_dense.ops import window_attention
from swin_dense.ops.windows import WindowSpec

# Seconds that each step may take, in the order of their value. The last step of a part has what is left.
PARTS = {
    1: {'machine': 30, 'eager': 100, 'graphs': 60, 'memory': 50, 'sizes': 80, 'tests': 150, 'kernel': 60},
    2: {'whole': 70, 'large': 70, 'crops': 50, 'norm': 40, 'use_graphs': 60, 'compiled': 200},
}
STEPS = PARTS[1] | PARTS[2]
TOTAL = 285  # of a part
LEAST = 15  # a step is not begun with fewer seconds left
OURS = ('auto', 'sdpa')
PEERS = ('mmdet', 'timm', 'torchvision')
SIZE = (800, 1344)
CROP = (512, 512)
ROUNDS = 15
LOOP = 5  # passes
REHEARSAL = 20  # times as long, on a CPU that others use too


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
UPERNET = 'swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512'
TINY_CASE = Case(20, 30, 96, 3, 7, torch.float32)
WHAT = {False: 'inference', True: 'training step'}


class Step:
    """A step of a session, whose measurements are written to a file as soon as they are taken.

    Args:
        path: the file.
        name: of the step.
        is_rehearsal: whether the step runs on a CPU.
        is_cut: whether the process shall be killed after its first measurement.
    """

    def __init__(self, path: Path, name: str, is_rehearsal: bool, is_cut: bool) -> None:
        self.name = name
        self.is_rehearsal = is_rehearsal
        self.is_cut = is_cut
        self.device = 'cpu' if is_rehearsal else 'cuda'
        self.run = Run(path, self.device, step=name)

    def note_one(self, remark: str, key: str, value: Any) -> None:
        """Add a remark of several parts to the run."""
        self.run.note(**{remark: {**self.run.content.get(remark, {}), key: value}})

    @contextlib.contextmanager
    def measuring(self, **names: str) -> Iterator[Callable[..., None]]:
        """Yield a function that adds a measurement of these names, or note the error of the block."""
        names = {'way': self.name, **names}
        try:
            yield functools.partial(self.run.add, **names)
        except Exception as error:
            self.note_one('failed', ', '.join(names.values()), f'{type(error).__name__}: {str(error)[:300]}')
        print('  ', *names.values(), flush=True)
        if self.is_cut and self.run.content['rows']:
            os.kill(os.getpid(), signal.SIGKILL)

    def add_kernels(self, add: Callable[..., None], function: Callable[[], object]) -> None:
        """Add the time and number of the kernels of a call; a CPU has none."""
        if not self.is_rehearsal:
            milliseconds, launches = kernels_of(function, self.device)
            add(milliseconds, 'GPU time', 'ms')
            add(launches, 'launches', 'kernels')

    def add_passes(self, runs: dict[str, Callable[[], object]], **names: str) -> None:
        """Add the times of functions that take turns; their names replace the braces in ``names``.

        Each turn begins with a pass that is not timed, because a model in use runs after itself, not after another one.
        """

        def turn(run: Callable[[], object]) -> tuple[float, float]:
            run()
            return seconds_of(run, self.device)

        timed = {name: functools.partial(turn, run) for name, run in runs.items()}
        for name, pairs in in_turns(timed, 2 if self.is_rehearsal else ROUNDS).items():
            with self.measuring(**{key: value.format(name) for key, value in names.items()}) as add:
                for quantity, seconds in zip(('host time', 'wall time'), zip(*pairs, strict=True), strict=True):
                    add([1e3 * one for one in seconds], quantity, 'ms')
                self.add_kernels(add, runs[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, default=Path('benchmarks/results/gpu_session.json'))
    parser.add_argument('--part', type=int, choices=PARTS, help='1 or 2; both if neither a part nor steps are given')
    parser.add_argument('--steps', nargs='+', choices=STEPS, metavar='STEP', help=' '.join(STEPS))
    parser.add_argument('--rehearse', action='store_true', help='run on a CPU, with tiny inputs')
    parser.add_argument('--cut', action='store_true', help='in a rehearsal, kill each step after its first measurement')
    parser.add_argument('--step', choices=STEPS, help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    options = [f'--{name}' for name in ('rehearse', 'cut') if getattr(args, name)]
    if args.step:
        step = Step(args.json, args.step, args.rehearse, args.cut)
        step.run.note(cores=os.cpu_count())
        globals()[f'step_{args.step}'](step)
    elif args.steps:
        run_steps(args.json, args.steps, options)
    else:
        for part in [args.part] if args.part else PARTS:
            path = args.json.with_name(f'{args.json.stem}_{part}.json')
            run_steps(path, list(PARTS[part]), options)


def run_steps(path: Path, steps: Sequence[str], options: Sequence[str]) -> None:
    """Run steps one after the other into a new file."""
    factor = REHEARSAL if '--rehearse' in options else 1
    end = time.monotonic() + factor * TOTAL
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the step too
    path.unlink(missing_ok=True)
    for name in steps:
        left = end - time.monotonic()
        if left < LEAST:
            print(f'== {name}: no time left', flush=True)
        else:
            run_step(path, name, min(factor * STEPS[name], left), options)


def run_step(path: Path, name: str, limit: float, options: Sequence[str]) -> str:
    """Run a step in a process of its own; add to its run how it ended and the seconds that it took."""
    known = len(runs_in(path))
    command = [sys.executable, '-W', 'ignore', __file__, '--step', name, '--json', str(path), *options]
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
    last_words = errors.splitlines()[-6:] if status != 'done' else []
    runs = runs_in(path)
    if len(runs) > known:
        rows = runs[-1].pop('rows')
        runs[-1] |= {'status': status, 'seconds': seconds, 'stderr': last_words, 'rows': rows}
        write(runs, path)
    print(f'== {name}: {status}, {seconds} s', *last_words, sep='\n   ', flush=True)
    return status


# Steps


def step_machine(step: Step) -> None:
    step.run.note(compiler=shutil.which('cc'))
    if not step.is_rehearsal:
        source = torch.ones(2**28, device='cuda')
        target = torch.empty_like(source)
        a, b = torch.randn(2, 8192, 8192, device='cuda', dtype=torch.bfloat16)
        copied, product = (median_ms(run, 'cuda')[1] for run in (lambda: target.copy_(source), lambda: a @ b))
        step.run.note(capability=torch.cuda.get_device_capability())
        step.run.note(gb_per_s=2 * source.nbytes / copied / 1e6, tflops_bfloat16=2 * 8192**3 / product / 1e9)
    x = torch.zeros(1, device=step.device)

    def launch_a_thousand() -> None:
        for _ in range(1000):
            x.add_(1)

    with step.measuring(what='x.add_(1)', model='', size='1') as add:
        for quantity, milliseconds in zip(
            ('host time', 'wall time'), median_ms(launch_a_thousand, step.device), strict=True
        ):
            add(milliseconds, quantity, 'us')  # of one of a thousand


def step_kernel(step: Step) -> None:
    """Time the kernel, torch's attention and plain operations; the tests compare them with float64."""
    for case in [TINY_CASE] if step.is_rehearsal else CASES:
        size = f'{case.height} x {case.width}, {case.channels} channels, {case.window}'
        for backend in ('sdpa', 'reference') if step.is_rehearsal else ('triton', 'sdpa', 'reference'):
            names = {'model': backend, 'size': size, 'way': name_of(case.dtype)}
            inputs = make_inputs(case, step.device)
            infer = torch.no_grad()(functools.partial(attend, case, inputs, backend))
            train = functools.partial(gradients, case, inputs, backend)
            with step.measuring(what='attention: inference', **names) as add:
                step.add_kernels(add, infer)
                add(1e3 * median_ms(infer, step.device)[0], 'host time', 'us')
            with step.measuring(what='attention: training step', **names) as add:
                step.add_kernels(add, train)
                add(peak_mib(train, step.device), 'peak memory', 'MiB')


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix('torch.')


def step_eager(step: Step) -> None:
    """Time whole models: inference and training by autocast, and inference in bfloat16."""
    compare(step, SIZE, 2, is_training=False)
    compare(step, SIZE, 2, is_training=True)
    compare(step, SIZE, 2, is_training=False, is_pure=True)


def step_sizes(step: Step) -> None:
    for size, batch in (((224, 224), 1), ((224, 224), 32), (CROP, 1), (SIZE, 8)):
        compare(step, size, batch, is_training=False)


def step_graphs(step: Step) -> None:
    """Time replays of captured graphs, which launch nothing from the host."""
    for size, batch in ((SIZE, 2), (SIZE, 1), ((224, 224), 1)):
        img = image(step, size, batch)
        for name, model in build_models(step, img, is_training=False).items():
            with step.measuring(what='inference', model=name, size=size_of(batch, size)) as add:
                run = pass_of(model, img, is_training=False, caches_casts=False)
                replay, outs = captured(run, step)
                replay()
                replayed = [out.clone() for out in outs]
                same_bits = all(torch.equal(a, b) for a, b in zip(replayed, run(), strict=True))
                add(int(same_bits), 'equality with eager outputs', '1 if equal')
                add(median_ms(replay, step.device, ROUNDS)[1], 'wall time', 'ms')


def step_tests(step: Step) -> None:
    """Run the tests marked gpu, without those that compile models for minutes."""
    command = [sys.executable, '-m', 'pytest', '-m', 'gpu', '-v', '--tb=line', '-p', 'no:cacheprovider']
    command += ['tests/ops', 'tests/models', '-k', 'not compile', '--maxfail', '20']
    if step.is_rehearsal:
        command.append('--collect-only')
    passed, lines = 0, []
    root = Path(__file__).parent.parent
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            lines = [*lines[-24:], line.rstrip()]
            passed += ' PASSED' in line
            step.run.note(passed=passed, last_lines=lines)
            if ' FAILED' in line or ' ERROR' in line:
                step.note_one('failed', line.split(' ')[0], 'failed')


def step_memory(step: Step) -> None:
    img = image(step, SIZE, 2)
    for is_training in (False, True):
        for name, model in build_models(step, img, is_training).items():
            with step.measuring(what=WHAT[is_training], model=name, size=size_of(2, SIZE)) as add:
                run = pass_of(model, img, is_training)
                run()
                model.zero_grad(set_to_none=True)
                add(peak_mib(run, step.device), 'peak memory', 'MiB')


# Steps of part 2


def step_large(step: Step) -> None:
    """Time Swin-B, whose kernels take longer than the host needs to launch them."""
    for is_training in (False, True):
        compare(step, SIZE, 4, is_training, arch='swin_b')


def step_crops(step: Step) -> None:
    """Time the crops of a batch of mmsegmentation on one GPU."""
    for is_training in (False, True):
        compare(step, CROP, 16, is_training)


def step_whole(step: Step) -> None:
    """Time training steps of Mask R-CNN and UPerNet, with mmdet's or mmseg's Swin and with ours."""
    for framework, model in (('mmdet', 'Mask R-CNN'), ('mmseg', 'UPerNet')):
        names = {'what': 'training step', 'model': '{}', 'size': f'2 images of {framework}', 'way': model}
        runs = {}
        for backbone in ('SwinTransformer', 'SwinDense', 'SwinDense with use_graphs'):
            with step.measuring(**{**names, 'model': backbone}):
                run = training_step_of(framework, backbone, step)
                repeat(run, 1 if step.is_rehearsal else 5)
                runs[backbone] = run
        step.add_passes(runs, **names)


def step_norm(step: Step) -> None:
    """Time the kernel of LayerNorm and torch's on the maps of a Swin-T; the tests compare them with float64."""
    norm_operation.LEAST_IN_TRAINING = 0
    maps = [(134_400, 96), (33_600, 192), (33_600, 384), (8_400, 384), (2_100, 768), (3_136, 96), (196, 384)]
    maps = maps[-1:] if step.is_rehearsal else maps
    for (tokens, channels), dtype in itertools.product(maps, (torch.float32, torch.bfloat16)):
        x = torch.randn(tokens, channels, device=step.device, dtype=dtype, requires_grad=True)
        norms = {'ours': build_norm({'type': 'LN'}, channels, feeds_linear=True).to(step.device)}
        norms['torch'] = nn.LayerNorm(channels, device=step.device)
        for name, norm in norms.items():
            names = {'model': name, 'size': f'{tokens} x {channels}', 'way': name_of(dtype)}
            infer = autocast(step, torch.no_grad()(functools.partial(norm, x)))
            train = autocast(step, functools.partial(trained, norm, x))
            for what, function in (('norm: inference', infer), ('norm: training step', train)):
                with step.measuring(what=what, **names) as add:
                    step.add_kernels(add, function)
                    add(1e3 * median_ms(function, step.device, ROUNDS)[0], 'host time', 'us')


def trained(norm: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of the input, the weight and the bias of a norm."""
    out = norm(x)
    return torch.autograd.grad(out, [x, *norm.parameters()], torch.ones_like(out))


def autocast(step: Step, function: Callable[[], Any]) -> Callable[[], Any]:
    return torch.autocast(step.device, torch.bfloat16)(function)


def step_use_graphs(step: Step) -> None:
    """Time use_graphs and make_graphed_callables beside eager passes; the tests compare their gradients."""
    for size, is_training in ((SIZE, True), (CROP, True), (SIZE, False)):
        img = image(step, size, 2)
        names = {'what': WHAT[is_training], 'model': 'auto', 'size': size_of(2, size)}
        runs = {}
        for way in ('eager, later', 'use_graphs', 'make_graphed_callables'):
            if way == 'make_graphed_callables' and (step.is_rehearsal or not is_training):
                continue
            with step.measuring(**names, way=way) as add:
                (model,) = build_models(step, img, is_training, names=['auto']).values()
                if way == 'use_graphs':
                    use_graphs(model)
                if way == 'make_graphed_callables':
                    with torch.autocast('cuda', torch.bfloat16, cache_enabled=False):
                        torch.cuda.make_graphed_callables(model, (img.clone(),), allow_unused_input=True)
                run = pass_of(model, img, is_training, caches_casts=way == 'use_graphs')
                seconds = seconds_of(functools.partial(repeat, run, LOOP), step.device)[1]
                add(seconds, 'time of the first passes', 's')
                runs[way] = run
        step.add_passes(runs, **names, way='{}')
        for way, run in runs.items():
            with step.measuring(**names, way=way) as add:
                # As in a training loop, where the host prepares the next pass while the GPU computes
                loop = functools.partial(repeat, run, LOOP)
                add(min(1e3 * seconds_of(loop, step.device)[1] for _ in range(3)) / LOOP, 'time in a loop', 'ms')


def repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def step_compiled(step: Step) -> None:
    """Time compiled models; inference first."""
    img = image(step, SIZE, 2)
    for is_training in (False, True):
        for name in ('auto',) if step.is_rehearsal else ('auto', 'timm', 'reference', 'torchvision'):
            torch._dynamo.reset()
            names = {'what': WHAT[is_training], 'model': name, 'size': size_of(2, SIZE)}
            with step.measuring(**names) as add:
                (model,) = build_models(step, img, is_training, names=[name]).values()
                backend = 'eager' if step.is_rehearsal else 'inductor'
                run = pass_of(torch.compile(model, dynamic=False, backend=backend), img, is_training)
                add(seconds_of(run, step.device)[1], 'time to compile', 's')
                step.add_passes({name: run}, **names)


# Training steps of whole models


def training_step_of(framework: str, backbone: str, step: Step) -> Callable[[], object]:
    """Return a function that runs a training step of a recipe on two images, with AdamW and autocast."""
    from mmengine.optim import AmpOptimWrapper, OptimWrapper
    from mmengine.registry import MODELS, init_default_scope

    from swin_dense.workbench.recipes.files import load_recipe

    recipe = {'mmdet': 'mask-rcnn_swin-t-p4-w7_fpn_1x_coco', 'mmseg': UPERNET}[framework]
    if step.is_rehearsal:
        recipe = {'mmdet': 'mask-rcnn_swin-demo_fpn', 'mmseg': 'upernet_swin-demo'}[framework]
    config = load_recipe(recipe)
    init_default_scope(framework)
    config.model.backbone.update(type=backbone.partition(' ')[0], init_cfg=None)
    torch.manual_seed(0)
    model = MODELS.build(config.model).to(step.device).train()
    if 'use_graphs' in backbone:
        use_graphs(model.backbone)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    # mmengine's autocast needs a GPU.
    kind: Any = OptimWrapper if step.is_rehearsal else functools.partial(AmpOptimWrapper, dtype='bfloat16')
    wrapper = kind(optimizer=optimizer)
    samples = samples_of(framework, config, step)
    return lambda: model.train_step(samples, wrapper)


def samples_of(framework: str, config: Any, step: Step) -> dict[str, Any]:
    """Return two images with five boxes and masks each, or with classes of pixels."""
    size = (64, 96) if step.is_rehearsal else SIZE if framework == 'mmdet' else CROP
    if framework == 'mmdet':
        from mmdet.testing import demo_mm_inputs

        classes = config.model.roi_head.bbox_head.num_classes
        return demo_mm_inputs(2, (3, *size), num_items=[5, 5], num_classes=classes, with_mask=True)
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    classes = config.model.decode_head.num_classes
    truth = [PixelData(data=torch.randint(classes, (1, *size))) for _ in range(2)]
    samples = [SegDataSample(metainfo={'img_shape': size, 'ori_shape': size}, gt_sem_seg=one) for one in truth]
    return {'inputs': [torch.randint(256, (3, *size), dtype=torch.uint8) for _ in truth], 'data_samples': samples}


# Attention alone


def make_inputs(case: Case, device: str) -> tuple[Tensor, ...]:
    """Return a map, weight and bias of its projection, and a position table."""
    shapes = (
        (1, case.height, case.width, case.channels),
        (3 * case.channels, case.channels),
        (3 * case.channels,),
        ((2 * case.window - 1) ** 2, case.heads),
    )
    return tuple(torch.randn(shape, device=device, dtype=case.dtype, requires_grad=True) for shape in shapes)


def attend(case: Case, inputs: tuple[Tensor, ...], backend: str) -> Tensor:
    x, weight, bias, position = inputs
    window = case.window, case.window
    shift = case.window // 2, case.window // 2
    spec = WindowSpec(case.heads, window, shift, (case.channels // case.heads) ** -0.5)
    return window_attention(x, lambda tokens: F.linear(tokens, weight, bias), position, spec, nn.Dropout(0.0), backend)


def gradients(case: Case, inputs: tuple[Tensor, ...], backend: str) -> tuple[Tensor, ...]:
    """Return the gradients of all inputs."""
    out = attend(case, inputs, backend)
    return torch.autograd.grad(out, inputs, torch.ones_like(out))


# Whole models


def image(step: Step, size: tuple[int, int], batch: int) -> Tensor:
    """Return random images, in a rehearsal one tiny one."""
    size, batch = ((64, 96), 1) if step.is_rehearsal else (size, batch)
    return torch.randn(batch, 3, *size, device=step.device)


def size_of(batch: int, size: tuple[int, int]) -> str:
    return ' x '.join(map(str, (batch, *size)))


def compare(
    step: Step, size: tuple[int, int], batch: int, is_training: bool, is_pure: bool = False, arch: str = 'swin_t'
) -> None:
    """Time all models in turns."""
    img = image(step, size, batch)
    way = ', '.join([step.name, *(['bfloat16'] if is_pure else [])])
    names = {'what': WHAT[is_training], 'model': '{}', 'size': size_of(batch, size), 'way': way}
    runs = {}
    for name, model in build_models(step, img, is_training, is_pure, arch=arch).items():
        with step.measuring(**{**names, 'model': name}):
            run = pass_of(model, img, is_training, is_pure)
            run()
            runs[name] = run
    step.run.note(arch=arch)
    if not step.is_rehearsal:
        from swin_dense.ops.triton import choice

        step.run.note(trials={str(kind(*values)): reason for (kind, *values), reason in choice.reasons.items()})
    step.add_passes(runs, **names)


def build_models(
    step: Step,
    img: Tensor,
    is_training: bool,
    is_pure: bool = False,
    names: Sequence[str] = (*OURS, *PEERS),
    arch: str = 'swin_t',
) -> dict[str, nn.Module]:
    """Return the models that can be built here, with the same weights."""
    built: dict[str, nn.Module] = {}
    for name in names:
        try:
            model: nn.Module = build_ours(arch, 7, 'auto' if name in PEERS else name)
            if name in PEERS:
                model = build_peer(name, model, img.shape[2:])  # type: ignore[arg-type]
        except Exception as error:  # a package that is not installed, or is broken
            step.note_one('absent', name, f'{type(error).__name__}: {str(error)[:200]}')
            continue
        model = model.to(step.device, torch.bfloat16 if is_pure else torch.float32)
        model.train(is_training)  # mmdet's returns None
        built[name] = model
    return built


def pass_of(
    model: Any,
    img: Tensor,
    is_training: bool,
    is_pure: bool = False,
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


def captured(run: Callable[[], Sequence[Tensor]], step: Step) -> tuple[Callable[[], object], Sequence[Tensor]]:
    """Return a function that replays a graph of a pass, and the outputs that it writes; on a CPU, the pass itself."""
    if step.is_rehearsal:
        return run, run()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    return graph.replay, outs


if __name__ == '__main__':
    main()
