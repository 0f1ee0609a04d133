"""Measure everything that needs a GPU, in two parts of five minutes.

    make gpu                        # both parts; writes benchmarks/results/gpu_session_1.json and gpu_session_2.json
    make gpu PART=2                 # one of them
    python benchmarks/gpu_session.py --json session.json --steps machine eager
    python benchmarks/gpu_session.py --rehearse --json /tmp/session.json          # on a CPU, with tiny inputs

Part 1 measures what docs/speed.md shows: whole models beside other libraries. Part 2 answers what is open: training
steps of whole detectors and segmentors, larger models, more images, the norm, use_graphs, torch.compile.

Each step runs in a process of its own with a time limit, and writes a row as soon as it is measured: a step that fails,
breaks the GPU's context or is cut loses its next row only. While a step runs, its rows are in NAME.STEP.json. The
models of a table run in one process and take turns in a random order.

``host_ms`` is the time until a call returns, ``wall_ms`` until the GPU has finished, both medians; ``loop_ms`` is the
time of a pass among others without a wait between them; ``device_ms`` is the sum of all kernels, ``launches`` their
number. ``error`` is the largest absolute difference from plain operations in float64, relative to the largest value.
``absent`` names models that cannot be imported here.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
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

import swin_dense
from swin_dense import SwinBackbone, use_graphs
from swin_dense.models.layers import build_norm
from swin_dense.ops import norm as norm_operation
from swin_dense.ops import window_attention
from swin_dense.ops.windows import WindowSpec
from swin_dense.utils.atomic import write_json

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


class Report:
    """The rows and notes of a step, written to a file whenever one is added.

    Args:
        path: the file.
        is_rehearsal: whether the step runs on a CPU.
        is_cut: whether the process shall be killed after its first row.
    """

    def __init__(self, path: Path, is_rehearsal: bool, is_cut: bool) -> None:
        self.path = path
        self.is_rehearsal = is_rehearsal
        self.is_cut = is_cut
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
        if self.is_cut:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, default=Path('benchmarks/results/gpu_session.json'))
    parser.add_argument('--part', type=int, choices=PARTS, help='1 or 2; both if neither a part nor steps are given')
    parser.add_argument('--steps', nargs='+', choices=STEPS, metavar='STEP', help=' '.join(STEPS))
    parser.add_argument('--rehearse', action='store_true', help='run on a CPU, with tiny inputs')
    parser.add_argument('--cut', action='store_true', help='in a rehearsal, kill each step after its first row')
    parser.add_argument('--step', choices=STEPS, help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    options = [f'--{name}' for name in ('rehearse', 'cut') if getattr(args, name)]
    if args.step:
        report = Report(args.json, args.rehearse, args.cut)
        report.note()
        globals()[f'step_{args.step}'](report)
    elif args.steps:
        run_steps(args.json, args.steps, options)
    else:
        for part in [args.part] if args.part else PARTS:
            path = args.json.with_name(f'{args.json.stem}_{part}.json')
            run_steps(path, list(PARTS[part]), options)


def run_steps(path: Path, steps: Sequence[str], options: Sequence[str]) -> None:
    """Run steps one after the other, and write what is known after each."""
    factor = REHEARSAL if '--rehearse' in options else 1
    end = time.monotonic() + factor * TOTAL
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the step too
    report: dict[str, Any] = {'command': ' '.join(sys.argv), 'machine': describe_machine(), 'steps': {}}
    for name in steps:
        left = end - time.monotonic()
        if left < LEAST:
            report['steps'][name] = {'status': 'no time left'}
        else:
            report['steps'][name] = run_step(path, name, min(factor * STEPS[name], left), options)
        write_json(path, report)


def describe_machine() -> dict[str, Any]:
    """Return the versions and the device, as tables of the pages name them."""
    found: dict[str, Any] = {'release': swin_dense.__version__, 'torch': torch.__version__, 'cores': os.cpu_count()}
    found['date'] = time.strftime('%Y-%m-%d')
    with contextlib.suppress(ImportError):
        import triton

        found['triton'] = triton.__version__
    if torch.cuda.is_available():
        found['device'] = torch.cuda.get_device_name()
    return found


def run_step(path: Path, name: str, limit: float, options: Sequence[str]) -> dict[str, Any]:
    """Run a step in a process of its own; return its rows, its status and the seconds that it took."""
    rows = path.with_name(f'{path.stem}.{name}.json')
    rows.unlink(missing_ok=True)
    command = [sys.executable, '-W', 'ignore', __file__, '--step', name, '--json', str(rows), *options]
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
    report.note(compiler=shutil.which('cc'))
    if not report.is_rehearsal:
        report.note(capability=torch.cuda.get_device_capability())
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
                row['training_mib'] = memory_of(train, report)


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
    for size, batch in ((SIZE, 2), (SIZE, 1), ((224, 224), 1)):
        img = image(report, size, batch)
        for name, model in build_models(report, img, is_training=False, is_pure=False).items():
            with report.row(model=name, size=size, batch=batch) as row:
                run = pass_of(model, img, is_training=False, is_pure=False, caches_casts=False)
                replay, outs = captured(run, report)
                replay()
                replayed = [out.clone() for out in outs]
                row['same_bits'] = all(torch.equal(a, b) for a, b in zip(replayed, run(), strict=True))
                row['wall_ms'] = 1e3 * statistics.median(seconds_of(replay, report.device)[1] for _ in range(ROUNDS))


def step_tests(report: Report) -> None:
    """Run the tests marked gpu, without those that compile models for minutes."""
    command = [sys.executable, '-m', 'pytest', '-m', 'gpu', '-v', '--tb=line', '-p', 'no:cacheprovider']
    command += ['tests/ops', 'tests/models', '-k', 'not compile', '--maxfail', '20']
    if report.is_rehearsal:
        command.append('--collect-only')
    passed, lines = 0, []
    root = Path(__file__).parent.parent
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            lines = [*lines[-24:], line.rstrip()]
            passed += ' PASSED' in line
            report.note(passed=passed, last_lines=lines)
            if ' FAILED' in line or ' ERROR' in line:
                with report.row(test=line.split(' ')[0]):
                    pass


def step_memory(report: Report) -> None:
    img = image(report, SIZE, 2)
    for is_training in (False, True):
        for name, model in build_models(report, img, is_training, is_pure=False).items():
            with report.row(model=name, training=is_training) as row:
                run = pass_of(model, img, is_training, is_pure=False)
                run()
                model.zero_grad(set_to_none=True)
                row['peak_mib'] = memory_of(run, report)


# Steps of part 2


def step_large(report: Report) -> None:
    """Time Swin-B, whose kernels take longer than the host needs to launch them."""
    for is_training in (False, True):
        compare(report, SIZE, 4, is_training, is_pure=False, arch='swin_b')


def step_crops(report: Report) -> None:
    """Time the crops of a batch of mmsegmentation on one GPU."""
    for is_training in (False, True):
        compare(report, (512, 512), 16, is_training, is_pure=False)


def step_whole(report: Report) -> None:
    """Time training steps of Mask R-CNN and UPerNet, with mmdet's or mmseg's Swin and with ours."""
    for framework in ('mmdet', 'mmseg'):
        runs = {}
        for backbone in ('SwinTransformer', 'SwinDense', 'SwinDense with use_graphs'):
            try:
                run = training_step_of(framework, backbone, report)
                for _ in range(1 if report.is_rehearsal else 5):
                    run()
                runs[backbone] = run
            except Exception as error:
                with report.row(framework=framework, backbone=backbone):
                    raise error
        for backbone, times in median_times(runs, report).items():
            with report.row(framework=framework, backbone=backbone, **times) as row:
                row['device_ms'], row['launches'] = device_time(runs[backbone], report.device)


def step_norm(report: Report) -> None:
    """Compare the kernel of LayerNorm and torch's with float64 on the maps of a Swin-T, and time them, by size."""
    norm_operation.LEAST_IN_TRAINING = 0
    maps = [(134_400, 96), (33_600, 192), (33_600, 384), (8_400, 384), (2_100, 768), (3_136, 96), (196, 384)]
    maps = maps[-1:] if report.is_rehearsal else maps
    for (tokens, channels), dtype in itertools.product(maps, (torch.float32, torch.bfloat16)):
        x = torch.randn(tokens, channels, device=report.device, dtype=dtype, requires_grad=True)
        grad = torch.randn(tokens, channels, device=report.device)
        exact = normed(nn.LayerNorm(channels, device=report.device).double(), x.detach().double(), grad.double())
        norms = {'ours': build_norm({'type': 'LN'}, channels, feeds_linear=True).to(report.device)}
        norms['torch'] = nn.LayerNorm(channels, device=report.device)
        for name, norm in norms.items():
            with report.row(tokens=tokens, channels=channels, dtype=str(dtype), norm=name) as row:
                run = autocast(report, functools.partial(normed, norm, x, grad))
                row['errors'] = [largest_error(a, b) for a, b in zip(run(), exact, strict=True)]
                infer = autocast(report, torch.no_grad()(functools.partial(norm, x)))
                for what, function in (('inference', infer), ('training', run)):
                    row[f'{what}_ms'], row[f'{what}_launches'] = device_time(function, report.device)
                    host = statistics.median(seconds_of(function, report.device)[0] for _ in range(ROUNDS))
                    row[f'{what}_host_us'] = 1e6 * host


def normed(norm: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Return the output of a norm and its gradients of the input, the weight and the bias."""
    x = x.detach().requires_grad_()
    out = norm(x)
    return out.detach(), *torch.autograd.grad(out, [x, *norm.parameters()], grad.to(out.dtype))


def autocast(report: Report, function: Callable[[], Any]) -> Callable[[], Any]:
    return torch.autocast(report.device, torch.bfloat16)(function)


def step_use_graphs(report: Report) -> None:
    """Time use_graphs and make_graphed_callables beside eager passes, and compare gradients."""
    for size, is_training in ((SIZE, True), ((512, 512), True), (SIZE, False)):
        img = image(report, size, 2)
        runs = {}
        for name in ('eager', 'use_graphs', 'make_graphed_callables'):
            if name == 'make_graphed_callables' and (report.is_rehearsal or not is_training):
                continue
            with report.row(model=name, size=size, training=is_training, what='first passes') as row:
                (model,) = build_models(report, img, is_training, is_pure=False, names=['auto']).values()
                if name == 'use_graphs':
                    use_graphs(model)
                if name == 'make_graphed_callables':
                    with torch.autocast('cuda', torch.bfloat16, cache_enabled=False):
                        torch.cuda.make_graphed_callables(model, (img.clone(),), allow_unused_input=True)
                run = pass_of(model, img, is_training, is_pure=False, caches_casts=name == 'use_graphs')
                row['seconds'] = seconds_of(lambda run=run: [run() for _ in range(5)], report.device)[1]
                runs[name] = run
        for name, times in median_times(runs, report).items():
            with report.row(model=name, size=size, batch=2, training=is_training, **times) as row:
                row['device_ms'], row['launches'] = device_time(runs[name], report.device)
                # As in a training loop, where the host prepares the next pass while the GPU computes
                loop = functools.partial(repeat, runs[name], LOOP)
                row['loop_ms'] = min(1e3 * seconds_of(loop, report.device)[1] for _ in range(3)) / LOOP
    # By default, eager passes compute small norms with torch's operator, and graphs with the kernel.
    for least in (norm_operation.LEAST_IN_TRAINING, 0):
        norm_operation.LEAST_IN_TRAINING = least
        what = 'gradients of replays and of eager passes, largest difference'
        with report.row(what=what, least_norm_by_kernel=least) as row:
            row['difference'] = difference_by_graphs(report)


def repeat(run: Callable[[], object], times: int) -> None:
    for _ in range(times):
        run()


def difference_by_graphs(report: Report) -> float:
    """Return the largest difference of gradients in training steps that accumulate gradients and change weights."""
    plain = SwinBackbone('t', drop_path_rate=0.0).to(report.device)
    model = use_graphs(copy.deepcopy(plain))
    worst = 0.0
    for _ in range(8):
        img = image(report, (512, 512), 2)
        for one in (plain, model):
            one.zero_grad(set_to_none=True)
            for part in (img, img.flip(-1)):
                outs = autocast(report, functools.partial(one, part))()
                torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            worst = max(worst, largest_error(ours.grad, theirs.grad))
            ours.data -= 1e-3 * theirs.grad.sign()
            theirs.data -= 1e-3 * theirs.grad.sign()
    return worst


def step_compiled(report: Report) -> None:
    """Time compiled models; inference first."""
    img = image(report, SIZE, 2)
    for is_training in (False, True):
        for name in ('auto',) if report.is_rehearsal else ('auto', 'timm', 'reference', 'torchvision'):
            torch._dynamo.reset()
            with report.row(model=name, size=SIZE, batch=2, training=is_training) as row:
                (model,) = build_models(report, img, is_training, is_pure=False, names=[name]).values()
                backend = 'eager' if report.is_rehearsal else 'inductor'
                run = pass_of(torch.compile(model, dynamic=False, backend=backend), img, is_training, is_pure=False)
                row['compile_s'] = seconds_of(run, report.device)[1]
                run()
                row.update(median_times({name: run}, report)[name])
                row['device_ms'], row['launches'] = device_time(run, report.device)


# Training steps of whole models


def training_step_of(framework: str, backbone: str, report: Report) -> Callable[[], object]:
    """Return a function that runs a training step of a recipe on two images, with AdamW and autocast."""
    from mmengine.optim import AmpOptimWrapper, OptimWrapper
    from mmengine.registry import MODELS, init_default_scope

    from swin_dense.workbench.recipes.files import load_recipe

    recipe = {'mmdet': 'mask-rcnn_swin-t-p4-w7_fpn_1x_coco', 'mmseg': UPERNET}[framework]
    if report.is_rehearsal:
        recipe = {'mmdet': 'mask-rcnn_swin-demo_fpn', 'mmseg': 'upernet_swin-demo'}[framework]
    config = load_recipe(recipe)
    init_default_scope(framework)
    config.model.backbone.update(type=backbone.partition(' ')[0], init_cfg=None)
    torch.manual_seed(0)
    model = MODELS.build(config.model).to(report.device).train()
    if 'use_graphs' in backbone:
        use_graphs(model.backbone)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    # mmengine's autocast needs a GPU.
    kind: Any = OptimWrapper if report.is_rehearsal else functools.partial(AmpOptimWrapper, dtype='bfloat16')
    wrapper = kind(optimizer=optimizer)
    samples = samples_of(framework, config, report)
    return lambda: model.train_step(samples, wrapper)


def samples_of(framework: str, config: Any, report: Report) -> dict[str, Any]:
    """Return two images with five boxes and masks each, or with classes of pixels."""
    side = (64, 96) if report.is_rehearsal else SIZE if framework == 'mmdet' else (512, 512)
    inputs = [torch.randint(256, (3, *side), dtype=torch.uint8) for _ in range(2)]
    meta = {'img_shape': side, 'ori_shape': side, 'pad_shape': side, 'batch_input_shape': side}
    samples: list[Any] = []
    for _ in inputs:
        if framework == 'mmseg':
            from mmengine.structures import PixelData
            from mmseg.structures import SegDataSample

            classes = config.model.decode_head.num_classes
            sample = SegDataSample(metainfo=meta)
            sample.gt_sem_seg = PixelData(data=torch.randint(classes, (1, *side)))
        else:
            import numpy as np
            from mmdet.structures import DetDataSample
            from mmdet.structures.mask import BitmapMasks
            from mmengine.structures import InstanceData

            height, width = side
            corners = torch.rand(5, 2) * torch.tensor([width / 2, height / 2])
            boxes = torch.cat([corners, corners + torch.tensor([width / 3, height / 3])], 1)
            masks = np.zeros((5, *side), np.uint8)
            for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
                mask[y1:y2, x1:x2] = 1
            sample = DetDataSample(metainfo=meta)
            labels = torch.arange(5)
            sample.gt_instances = InstanceData(bboxes=boxes, labels=labels, masks=BitmapMasks(masks, *side))
        samples.append(sample)
    return {'inputs': inputs, 'data_samples': samples}


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
    return {name: largest_error(found[name], truth) for name, truth in exact.items()}


# Whole models


def image(report: Report, size: tuple[int, int], batch: int) -> Tensor:
    """Return random images, in a rehearsal one tiny one."""
    size, batch = ((64, 96), 1) if report.is_rehearsal else (size, batch)
    return torch.randn(batch, 3, *size, device=report.device)


def compare(
    report: Report, size: tuple[int, int], batch: int, is_training: bool, is_pure: bool, arch: str = 'swin_t'
) -> None:
    """Time all models in turns."""
    img = image(report, size, batch)
    settings = {'arch': arch, 'size': size, 'batch': batch, 'training': is_training, 'pure_bfloat16': is_pure}
    runs = {}
    for name, model in build_models(report, img, is_training, is_pure, arch=arch).items():
        run = pass_of(model, img, is_training, is_pure)
        try:
            run()
            runs[name] = run
        except Exception as error:
            with report.row(model=name, **settings):
                raise error
    if not report.is_rehearsal:
        from swin_dense.ops.triton import choice

        report.note(trials={str(kind(*settings)): reason for (kind, *settings), reason in choice.reasons.items()})
    measured = median_times(runs, report)
    for name, run in runs.items():
        with report.row(model=name, **settings, **measured[name]) as row:
            row['device_ms'], row['launches'] = device_time(run, report.device)


def build_models(
    report: Report,
    img: Tensor,
    is_training: bool,
    is_pure: bool,
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


def captured(run: Callable[[], Sequence[Tensor]], report: Report) -> tuple[Callable[[], object], Sequence[Tensor]]:
    """Return a function that replays a graph of a pass, and the outputs that it writes; on a CPU, the pass itself."""
    if report.is_rehearsal:
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


# Times


def memory_of(function: Callable[[], object], report: Report) -> float:
    """Return the peak MiB of a call; 0 in a rehearsal, because torch counts the memory of a GPU alone."""
    return 0.0 if report.is_rehearsal else peak_mib(function)


def largest_error(found: Tensor, truth: Tensor) -> float:
    """Return the largest absolute difference, relative to the largest value."""
    return ((found.double() - truth.double()).abs().max() / truth.abs().max()).item()


def median_times(runs: dict[str, Callable[[], object]], report: Report) -> dict[str, dict[str, float]]:
    """Return medians of host and wall time in milliseconds; the models take turns in a random order.

    Each turn begins with a pass that is not timed, because a model in use runs after itself, not after another one.
    """
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(2 if report.is_rehearsal else ROUNDS):
        for name in random.sample(list(runs), len(runs)):
            runs[name]()
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
