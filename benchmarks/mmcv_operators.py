"""Time operators and training steps with the compiled mmcv and with the operators in PyTorch; one thread, on a CPU.

    .nox/compiled/bin/python benchmarks/mmcv_operators.py --out benchmarks/mmcv_operators.json

This needs an environment with a compiled mmcv: make test-compiled creates it. Each row is measured in a process of its
own, in turn with either operators. Times are processor time, the smallest of the repetitions; memory is the largest
that the process held, less what it held before the measurement.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BOTH = ('compiled', 'in PyTorch')
OPERATORS = ('nms 1000', 'nms 10000', 'batched nms', 'soft nms', 'roi align', 'mask targets', 'deformable convolution')
MODELS = {
    'training step of Mask R-CNN': 'mask_rcnn/mask-rcnn_r50_fpn_1x_coco',
    'training step of DINO': 'dino/dino-4scale_r50_8xb2-12e_coco',
    'training step of Mask2Former': 'mask2former/mask2former_r50_8xb2-lsj-50e_coco',
}
SIZE = 320, 416


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, help='JSON file of the results')
    parser.add_argument('--rounds', type=int, default=3, help='processes per row (default: %(default)s)')
    rows_help = 'rows to measure; the file keeps its others (default: all)'
    parser.add_argument(
        '--rows', nargs='+', choices=[*OPERATORS, *MODELS], default=[*OPERATORS, *MODELS], help=rows_help
    )
    parser.add_argument('--row', nargs=2, help=argparse.SUPPRESS)  # for the separate process
    args = parser.parse_args()
    if args.row:
        print(json.dumps(measure(*args.row)))
        return
    rows = json.loads(args.out.read_text())['rows'] if args.out and args.out.exists() else {}
    for name in args.rows:
        rounds: dict[str, list[dict[str, float]]] = {operators: [] for operators in BOTH}
        for _ in range(args.rounds):
            for operators in BOTH:
                rounds[operators].append(in_a_process(name, operators))
        rows[name] = {
            operators: {key: min(each[key] for each in found) for key in found[0]}
            for operators, found in rounds.items()
        }
        print(name, rows[name], flush=True)
        if args.out:
            report = {'processor': processor(), 'versions': versions(), 'rows': rows}
            args.out.write_text(json.dumps(report, indent=2) + '\n')


def processor() -> str:
    lines = Path('/proc/cpuinfo').read_text().splitlines() if Path('/proc/cpuinfo').exists() else []
    names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return names[0] if names else platform.processor()


def versions() -> dict[str, str]:
    import mmcv
    import torch

    return {'python': platform.python_version(), 'torch': torch.__version__, 'mmcv': mmcv.__version__}


def in_a_process(name: str, operators: str) -> dict[str, float]:
    command = [sys.executable, '-W', 'ignore', __file__, '--row', name, operators]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str, operators: str) -> dict[str, float]:
    """Return the processor time in ms and the memory in MiB of a row."""
    import torch

    torch.set_num_threads(1)
    use(operators)
    torch.manual_seed(0)
    call = training_step(MODELS[name]) if name in MODELS else operator(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for _ in range(2 if name in MODELS else 5):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {'ms': round(1000 * min(times), 2), 'MiB': round((after - before) / 1024)}


def use(operators: str) -> None:
    """Make ``mmcv.ops`` use the compiled operators, or those of this clone."""
    import mmcv._ext
    import mmcv.ops

    if mmcv._ext.__file__.endswith('.py'):
        sys.exit('this needs a compiled mmcv: make test-compiled creates .nox/compiled, which has one')
    if operators == 'compiled':
        return
    spec = importlib.util.spec_from_file_location('mmcv_lite_ops', ROOT / 'mmcv_lite_ops/mmcv/_ext.py')
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    for name, module in list(sys.modules.items()):
        if name.startswith('mmcv.ops.') and hasattr(module, 'ext_module'):
            module.ext_module = plain


def operator(name: str) -> Callable[[], object]:
    """Return a call of an operator, with a backward pass where models have one."""
    import torch
    from mmcv import ops

    def boxes(number: int, largest: float) -> torch.Tensor:
        corner = torch.rand(number, 2) * (1000 - largest)
        return torch.cat([corner, corner + 4 + torch.rand(number, 2) * (largest - 4)], 1)

    if name.startswith('nms'):
        number = int(name.split()[1])
        some, scores = boxes(number, 200), torch.rand(number)
        return lambda: ops.nms(some, scores, 0.7)
    if name == 'batched nms':
        some, scores, classes = boxes(10_000, 200), torch.rand(10_000), torch.randint(80, (10_000,))
        return lambda: ops.batched_nms(
            some, scores, classes, {'type': 'nms', 'iou_threshold': 0.5, 'split_thr': 20_000}
        )
    if name == 'soft nms':
        some, scores = boxes(1000, 200), torch.rand(1000)
        return lambda: ops.soft_nms(some, scores, 0.5, min_score=0.05)
    if name == 'mask targets':
        masks, rois = (torch.rand(100, 1, 800, 1333) > 0.5).float(), boxes(100, 500)
        rois = torch.cat([torch.arange(100.0)[:, None], rois], 1)
        return lambda: ops.roi_align(masks, rois, 28, 1.0, 0, 'avg', True)
    if name == 'roi align':
        return roi_align_of_a_pyramid()
    convolution = ops.ModulatedDeformConv2dPack(256, 256, 3, padding=1)
    torch.nn.init.normal_(convolution.conv_offset.weight, std=0.05)
    input = torch.randn(2, 256, 50, 84, requires_grad=True)
    return lambda: convolution(input).sum().backward()


def roi_align_of_a_pyramid() -> Callable[[], object]:
    """Return a forward and backward pass of 512 RoIs on four levels of two images of 800 x 1344 pixels."""
    import torch
    from mmcv import ops

    parts = []
    for level, (smallest, largest, number) in enumerate(
        [(4, 112, 300), (112, 224, 120), (224, 448, 60), (448, 800, 32)]
    ):
        stride = 4 * 2**level
        map_ = torch.randn(2, 256, 800 // stride, 1344 // stride, requires_grad=True)
        sides = smallest + torch.rand(number, 2) * (largest - smallest)
        corner = torch.rand(number, 2) * (torch.tensor([1344.0, 800.0]) - sides)
        rois = torch.cat([torch.randint(2, (number, 1)), corner, corner + sides], 1)
        parts.append((map_, rois, 1 / stride))
    gradients = [torch.randn(len(rois), 256, 7, 7) for _, rois, _ in parts]

    def step() -> None:
        outputs = [ops.roi_align(map_, rois, 7, scale, 0, 'avg', True) for map_, rois, scale in parts]
        torch.autograd.grad(outputs, [map_ for map_, _, _ in parts], gradients)

    return step


def training_step(name: str) -> Callable[[], object]:
    """Return a forward and backward pass of a published model with random weights on two images of ``SIZE``."""
    import mmdet
    from mmdet.testing import demo_mm_inputs
    from mmengine.config import Config
    from mmengine.registry import MODELS as REGISTRY
    from mmengine.registry import init_default_scope

    init_default_scope('mmdet')
    config = Config.fromfile(Path(mmdet.__file__).parent / '.mim/configs' / f'{name}.py').model
    config.backbone.init_cfg = None
    config.data_preprocessor.pop('batch_augments', None)  # which pad images to 1024 x 1024 for Mask2Former
    model = REGISTRY.build(config).train()
    images = demo_mm_inputs(2, [(3, *SIZE)] * 2, num_items=[10, 10], num_classes=80, with_mask='mask' in name)
    batch = model.data_preprocessor(images, training=True)

    def step() -> None:
        total, _ = model.parse_losses(model(**batch, mode='loss'))
        total.backward()

    return step


if __name__ == '__main__':
    main()
