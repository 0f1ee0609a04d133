"""Run the core tests, except slow ones, and ten training steps of each framework in this environment.

    make test-oldest
    .venv-nox/bin/nox --session oldest -- --parts numbers training

The results replace the row with the given name in stacks.json, or the selected parts of it. The exit status is 1 if
anything failed.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / 'benchmarks' / 'results' / 'stacks.json'
CORE = [
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / 'tests').glob('test_*.py'))),
    'tests/models',
    'tests/ops',
    'tests/utils',
    'tests/checkpoint',
    'tests/images',
    'tests/features',
]
STEPS = 10
FRAMEWORKS = ('mmdet', 'mmseg')
PARTS = ('core', 'numbers', 'training')
LOG_HELP = 'output of pytest from an earlier run of the core tests, and optionally of a second run of the failed tests'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('name', help='name of the row')
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=PARTS, help='parts to run (default: all)')
    parser.add_argument('--log', type=Path, nargs='+', help=LOG_HELP)
    parser.add_argument('--train', choices=FRAMEWORKS, help=argparse.SUPPRESS)  # for the separate process
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.train:
        print(json.dumps({'bases': bases(args.train), **train(args.train)}))
        return
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    row = rows[args.name] = {**rows.get(args.name, {}), 'python': platform.python_version(), 'packages': packages()}
    if 'core' in args.parts:
        logs = [log.read_text() for log in args.log] if args.log else [core_tests()]
        row['core'] = outcome(logs[0])
        if len(logs) > 1:
            row['core']['again'] = outcome(logs[1])
    if 'numbers' in args.parts:
        row['numbers'] = numbers()
    if 'training' in args.parts:
        row['training'] = {framework: in_a_process(framework) for framework in FRAMEWORKS}
    RESULTS.write_text(json.dumps(rows, indent=2) + '\n')
    print(json.dumps(row, indent=2))
    if failed := failures(row):
        sys.exit(f'stacks: {args.name} failed: {", ".join(failed)}')


def failures(row: dict[str, Any]) -> list[str]:
    """Return what failed in a row: tests, also in their second run if there was one, and the training of frameworks."""
    core = row.get('core', {})
    tests = core.get('again', core).get('failures', [])
    return [*tests, *(name for name, result in row.get('training', {}).items() if 'error' in result)]


def packages() -> dict[str, str]:
    from swin_dense.utils.packages import FORKS, versions_of

    found: dict[str, str] = {}
    for name in ('torch', 'numpy', *FORKS):
        found.update(versions_of(name))
    return found


def core_tests() -> str:
    """Run the core tests, and return the output of pytest."""
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '-m', 'not slow', *CORE]
    done = subprocess.run(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    print(done.stdout, file=sys.stderr)
    if done.returncode not in (0, 1):  # all passed, or some failed
        sys.exit(f'stacks: pytest ended with status {done.returncode}')
    return done.stdout


def outcome(log: str) -> dict[str, object]:
    """Parse the output of pytest: numbers of tests by outcome, names of failed tests, and reasons of skipped ones."""
    counts = {what: int(n) for n, what in re.findall(r'(\d+) (passed|failed|error|skipped)', log.splitlines()[-1])}
    skips: collections.Counter[str] = collections.Counter()
    for number, reason in re.findall(r'^SKIPPED \[(\d+)\] \S+: (.*)', log, re.MULTILINE):
        skips[reason] += int(number)
    return {
        'passed': counts.get('passed', 0),
        'failed': counts.get('failed', 0) + counts.get('error', 0),
        'skipped': counts.get('skipped', 0),
        'failures': re.findall(r'^(?:FAILED|ERROR) (\S+)', log, re.MULTILINE),
        'skips': dict(sorted(skips.items())),
    }


def numbers() -> list[tuple[float, float]]:
    """Return checksums of all outputs and gradients of a small float64 backbone, to compare environments.

    Returns:
        For each tensor, its norm and its dot product with random numbers, which is sensitive to signs and order.
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
    """Return the results of :func:`bases` and :func:`train`, run in a separate process because it may crash."""
    if importlib.util.find_spec(framework) is None:
        return {'error': f'{framework} is not installed'}
    command = [sys.executable, '-W', 'ignore', __file__, 'unused', '--train', framework]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        return {'error': (done.stderr.strip() or f'status {done.returncode}').splitlines()[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def train(framework: str) -> dict[str, object]:
    """Train a demo model on rectangles for ten steps; return the first and the last loss, or an error."""
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

    from swin_dense.commands._main import main as swin_dense
    from tests.workbench.configs.data import CLASSES, make_coco, make_masks

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
    """Return whether a config can inherit from a config of the framework: 'resolve' or an error."""
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
