"""Run the core's tests, without the slow ones, and ten training steps of each framework in this environment, and note what came of it.

    .venv-oldest/bin/python benchmarks/stacks.py 'oldest'

The row of that name in stacks.json is written anew; tools/update_readme.py makes the README's table of all rows.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / 'benchmarks' / 'stacks.json'
CORE = [
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / 'tests').glob('test_*.py'))),
    'tests/ops',
    'tests/checkpoint',
    'tests/features',
]
MM = ('mmengine', 'mmcv', 'mmdet', 'mmsegmentation')
FORKS = ('onedl-mmengine', 'onedl-mmcv', 'onedl-mmdetection', 'onedl-mmsegmentation')
PACKAGES = ('torch', 'numpy', *MM, *FORKS)
STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('name', help='of the row')
    parser.add_argument('--tests', nargs='+', default=CORE, help='of the core, where there is no time for all')
    parser.add_argument('--train', choices=('mmdet', 'mmseg'), help=argparse.SUPPRESS)  # in a process of its own
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.train:
        print(json.dumps({'bases': bases(args.train), **train(args.train)}))
        return
    row = {
        'python': platform.python_version(),
        'packages': packages(),
        'core': core_tests(args.tests),
        'numbers': numbers(),
    }
    row['training'] = {framework: in_a_process(framework) for framework in ('mmdet', 'mmseg')}
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**rows, args.name: row}, indent=2) + '\n')
    print(json.dumps(row, indent=2))


def packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def core_tests(tests: list[str]) -> dict[str, object]:
    """Return how many tests passed, failed and were skipped, which failed, and why others were skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, 'report.xml')
        options = ['-q', '-p', 'no:cacheprovider', '-m', 'not slow', '--junitxml', str(report)]
        command = [sys.executable, '-m', 'pytest', *options, *tests]
        subprocess.run(command, cwd=ROOT, env=environment(), stdout=sys.stderr)
        cases = list(ElementTree.parse(report).iter('testcase'))
    skips = [skip.attrib['message'] for case in cases if (skip := case.find('skipped')) is not None]
    failures = [
        f'{case.attrib["classname"]}.{case.attrib["name"]}'
        for case in cases
        if case.find('failure') is not None or case.find('error') is not None
    ]
    counts = {
        'passed': len(cases) - len(failures) - len(skips),
        'failed': len(failures),
        'skipped': len(skips),
        'failures': failures,
        'skips': dict(sorted(collections.Counter(skips).items())),
    }
    return counts if tests == CORE else {**counts, 'of': ' '.join(tests)}


def numbers() -> list[tuple[float, float]]:
    """Return what every output and every gradient of a small float64 backbone is, the same everywhere.

    Returns:
        of each, the norm and the product with random numbers, which sees signs and order.
    """
    import numpy as np
    import torch

    from swin_dense import SwinBackbone

    generator = np.random.default_rng(0)
    backbone = SwinBackbone(embed_dims=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8), drop_path_rate=0.0).double()
    parameters = dict(sorted(backbone.named_parameters()))
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.copy_(torch.from_numpy(generator.normal(0.5, 0.5, tuple(parameter.shape))))
    levels = backbone(torch.from_numpy(generator.normal(size=(2, 3, 70, 93))))
    torch.stack([level.square().mean() for level in levels]).sum().backward()
    gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
    arrays = [tensor.detach().numpy() for tensor in [*levels, *gradients]]
    return [(float(np.linalg.norm(a)), float((a * generator.normal(size=a.shape)).sum())) for a in arrays]


def in_a_process(framework: str) -> dict[str, object]:
    """Return what :func:`bases` and :func:`train` do, whatever they do to the process."""
    if importlib.util.find_spec(framework) is None:
        return {'error': f'{framework} is not installed'}
    command = [sys.executable, '-W', 'ignore', __file__, 'unused', '--train', framework]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        return {'error': (done.stderr.strip() or f'status {done.returncode}').splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def train(framework: str) -> dict[str, object]:
    """Train a demo model on rectangles for ten steps; return the first and the last loss, or why there are none."""
    try:
        losses = losses_of(framework)
    except Exception as error:
        return {'error': f'{type(error).__name__}: {error}'.splitlines()[0]}
    if len(losses) != STEPS or not all(map(math.isfinite, losses)):
        return {'error': f'{len(losses)} steps, losses {losses}'}
    return {'steps': STEPS, 'first_loss': round(losses[0], 3), 'last_loss': round(losses[-1], 3)}


def losses_of(framework: str) -> list[float]:
    from mmengine.config import Config
    from mmengine.runner import Runner

    from swin_dense.__main__ import main as swin_dense
    from tests.recipes.data import CLASSES, make_coco, make_masks

    with tempfile.TemporaryDirectory() as folder:
        data, config = Path(folder, 'data'), Path(folder, 'mine.py')
        if framework == 'mmdet':
            name, settings = 'mask-rcnn_swin-demo_fpn', ['train_cfg.max_epochs=10', 'param_scheduler.1.end=10']
            make_coco(data)
        else:
            name, settings = 'upernet_swin-demo', ['train_cfg.max_iters=10', 'param_scheduler.1.end=40']
            settings += ['train_dataloader.dataset.pipeline.2.crop_size=(64,64)']
            make_masks(data)
        arguments = ['--out', str(config), '--data-root', str(data), '--classes', ','.join(CLASSES), '--set', *settings]
        if swin_dense(['config', name, *arguments]):
            raise RuntimeError('swin-dense config failed')
        cfg = Config.fromfile(config)
        cfg.update(work_dir=folder, val_dataloader=None, val_cfg=None, val_evaluator=None)
        cfg.default_hooks.logger.interval = 1
        runner = Runner.from_cfg(cfg)
        runner.train()
        return [float(value) for value in runner.message_hub.get_scalar('train/loss').data[0]]


def bases(framework: str) -> str:
    """Tell what becomes of a config that starts from one of the framework's own."""
    try:
        from mmengine.config import Config

        Config.fromstring(f"_base_ = '{framework}::_base_/default_runtime.py'\n", '.py')
    except Exception as error:
        return f'do not resolve: {error}'.splitlines()[0]
    return 'resolve'


def environment() -> dict[str, str]:
    return {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}


if __name__ == '__main__':
    main()
