"""What is installed here, what of it works, and how to cure what does not.

Every check runs in a process of its own: a broken installation may raise anything, hang, or end the process.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch.torch_version import TorchVersion

TIMEOUT = 120  # seconds for one check; importing everything from a slow disk takes long
# Package, oldest version and first version that is too new, both None where any will do. mmdet and mmseg say which mmcv
# they accept; mmcv and mmengine import pkg_resources, which setuptools 81 left out.
VERSIONS = {
    'torch': ('2.1', '2.16'),
    'numpy': ('1.26', '3'),
    'setuptools': (None, '81'),
    'mmengine': ('0.10.7', '0.11'),
    'mmcv': ('2.1.0', '2.2'),
    'mmdet': ('3.3.0', '3.4'),
    'mmsegmentation': ('1.2.2', '1.3'),
    'triton': ('3.6', None),
}
# The maintained forks, which install under the same import names.
FORKS = {'mmengine': 'onedl-mmengine', 'mmcv': 'onedl-mmcv', 'mmdet': 'onedl-mmdetection'}
FORKS['mmsegmentation'] = 'onedl-mmsegmentation'

_COMPILE_MMCV = 'pip uninstall mmcv mmcv-lite; pip cache remove mmcv; pip install --no-build-isolation mmcv==2.1.0'
# What an error says, and what helps. The first that fits counts.
CURES = {
    r'pkg_resources': "pip install 'setuptools<81'",
    r'torchvision': 'install the torchvision made for this torch, or uninstall torchvision',
    r'MMCV==|mmcv.*incompatible': 'the framework refuses this mmcv: pip install --no-build-isolation mmcv==2.1.0',
    r"No module named 'mmcv._ext'": f'this mmcv has no compiled operators: {_COMPILE_MMCV}',
    r'undefined symbol|_ext': f'mmcv was compiled for another torch: {_COMPILE_MMCV}',
    r'Numpy is not available|_ARRAY_API': "this torch was built for NumPy 1: pip install 'numpy<2'",
    r'Weights only|weights_only': 'import swin_dense before loading; in a config, custom_imports does',
    r'shadowed': "write type='swin_dense.SwinDense' in the config, or rename the other class",
    r"No module named '(\w+)": r'pip install \1',
}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        topic: 'version', 'trap', 'backend' or 'check'.
        name: of the package, trap, backend or framework.
        status: 'ok', 'note' for what is unusual or cannot be used here, 'broken'.
        text: what was found.
        cure: what to do, '' where there is nothing to do.
    """

    topic: str
    name: str
    status: str
    text: str
    cure: str = ''


def examine() -> list[Finding]:
    """Look at everything; raises nothing."""
    with ThreadPoolExecutor(4) as pool:
        traps = pool.map(lambda name: probe('trap', name), _TRAPS)
        checks = pool.map(lambda name: probe('check', name), _CHECKS)
        return [*versions(), *traps, *backends(), *checks]


def versions() -> list[Finding]:
    """Compare what is installed with the versions that were tried together."""
    is_tried = (3, 10) <= sys.version_info[:2] <= (3, 13)
    python = Finding('version', 'python', 'ok' if is_tried else 'note', platform.python_version())
    return [python, *(_version(package) for package in VERSIONS)]


def _version(package: str) -> Finding:
    version, fork = _version_of(package), _version_of(FORKS.get(package, ''))
    if version and fork:
        text = f'{version}, and {FORKS[package]} {fork} under the same import name'
        return Finding('version', package, 'broken', text, f'keep one: pip uninstall {package} {FORKS[package]}')
    if fork:
        return Finding(
            'version', package, 'note', f'{FORKS[package]} {fork}', 'recipes: write them with swin-dense config'
        )
    if version is None:
        return Finding('version', package, 'note', 'not installed')
    oldest, too_new = VERSIONS[package]
    short = TorchVersion(version.partition('+')[0])
    if (oldest is None or short >= oldest) and (too_new is None or short < too_new):
        return Finding('version', package, 'ok', version)
    tried = ', '.join(filter(None, (oldest and f'>= {oldest}', too_new and f'< {too_new}')))
    return Finding('version', package, 'note', version, f'tried: {tried}')


def probe(topic: str, name: str) -> Finding:
    """Run one check in a process of its own."""
    command = [sys.executable, '-W', 'ignore', '-m', 'swin_dense.doctor', name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, errors='replace')
    except subprocess.TimeoutExpired:
        return Finding(topic, name, 'broken', f'gave no answer within {TIMEOUT} seconds')
    if done.returncode == 0:
        answer = done.stdout.strip().splitlines()
        text = answer[-1] if answer else ''
        return Finding(topic, name, 'note' if text.startswith('not ') else 'ok', text)
    complaint = done.stderr.strip().splitlines()
    text = complaint[-1] if complaint else f'ended with status {done.returncode}'
    return Finding(topic, name, 'broken', text, cure_for(done.stderr if complaint else text))


def cure_for(error: str) -> str:
    """Return what helps against an error, '' where that is not known."""
    last = error.strip().splitlines()[-1]
    for pattern, cure in CURES.items():
        match = re.search(pattern, last)
        if match:
            return match.expand(cure) if '\\' in cure else cure
    return ''


def backends() -> list[Finding]:
    """Say which ways to compute attention and blocks there are here, and why not the others."""
    import torch

    from swin_dense import ops
    from swin_dense.ops import fused

    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    qkv = torch.zeros(1, 7, 7, 3 * 32, device=device)
    found = []
    for name in ops.BACKENDS[1:]:
        module = importlib.import_module(f'swin_dense.ops.{name}')
        reason = module.reason_not_to_run(qkv, (7, 7), 1, 0.0)
        found.append(_backend(f'attention: {name}', device, reason))
    return [*found, _backend('block: fused', device, fused.reason_not_to_run(qkv))]


def _backend(name: str, device: str, reason: str | None) -> Finding:
    return Finding('backend', name, 'note' if reason else 'ok', reason or f'runs on {device}')


def _version_of(distribution: str) -> str | None:
    if not distribution:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# --- what runs in processes of its own: each returns one line, or raises ---------------------------------------------


def _pkg_resources() -> str:
    if importlib.util.find_spec('mmengine') is None:
        return 'not needed without mmengine'
    import pkg_resources

    return f'there, from {Path(pkg_resources.__file__).parent.parent}'


def _numpy_bridge() -> str:
    import numpy as np
    import torch

    torch.from_numpy(np.ones(1)).numpy()
    return 'torch and numpy exchange arrays'


def _torchvision() -> str:
    if importlib.util.find_spec('torchvision') is None:
        return 'not installed, and not needed'
    import torchvision

    return f'torchvision {torchvision.__version__} imports'


def _mmcv_operators() -> str:
    if importlib.util.find_spec('mmcv') is None:
        return 'not installed'
    import torch
    from mmcv.ops import nms

    nms(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.ones(1), 0.5)
    return 'compiled for this torch'


def _resume() -> str:
    if importlib.util.find_spec('mmengine') is None:
        return 'not needed without mmengine'
    import io

    import torch
    from mmengine.logging import HistoryBuffer

    import swin_dense

    history = HistoryBuffer()
    history.update(1.0)
    file = io.BytesIO()
    torch.save({'message_hub': {'log_scalars': {'loss': history}}}, file)
    file.seek(0)
    torch.load(file)
    return f'torch loads what mmengine saves, with swin_dense {swin_dense.__version__} imported'


def _registry() -> str:
    names = [name for name in ('mmdet', 'mmseg') if importlib.util.find_spec(name)]
    if not names:
        return 'not needed without mmdet and mmseg'
    from swin_dense.mm import SwinDense

    for name in names:
        found = importlib.import_module(f'{name}.registry').MODELS.get('SwinDense')
        if found is not SwinDense:
            raise RuntimeError(f'SwinDense is shadowed in {name} by {found}')
    return f'SwinDense is found from {" and ".join(names)}'


def _core() -> str:
    import torch

    from swin_dense.model import SwinBackbone

    backbone = SwinBackbone({'embed_dims': 16, 'depths': (1, 2, 1, 1), 'num_heads': (1, 2, 4, 8)})
    torch.stack([level.square().mean() for level in backbone(torch.randn(1, 3, 70, 90))]).sum().backward()
    idle = [name for name, parameter in backbone.named_parameters() if parameter.grad is None]
    if idle:
        raise RuntimeError(f'no gradient for {idle[0]}')
    return f'forward and backward with torch {torch.__version__}'


def _mmdet() -> str:
    if importlib.util.find_spec('mmdet') is None:
        return 'not installed'
    import torch
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData

    instances = InstanceData(bboxes=torch.tensor([[8.0, 8.0, 40.0, 40.0]]), labels=torch.tensor([0]))
    sample = DetDataSample(metainfo={'img_shape': (64, 64), 'pad_shape': (64, 64), 'batch_input_shape': (64, 64)})
    sample.gt_instances = instances
    return _train_once('retinanet_swin-t-p4-w7_fpn_1x_coco', 'mmdet', [sample])


def _mmseg() -> str:
    if importlib.util.find_spec('mmseg') is None:
        return 'not installed'
    import torch
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    sample = SegDataSample(metainfo={'img_shape': (64, 64)})
    sample.gt_sem_seg = PixelData(data=torch.zeros(1, 64, 64, dtype=torch.long))
    return _train_once('upernet_swin-demo', 'mmseg', [sample] * 2)


def _train_once(recipe: str, framework: str, samples: list) -> str:
    """Compute the gradients of a model with a small SwinDense once."""
    import torch
    from mmengine.registry import MODELS, init_default_scope

    import swin_dense  # noqa: F401  registers SwinDense
    from swin_dense.recipes.files import load_recipe

    config = load_recipe(recipe)
    config.model.backbone.depths, config.model.backbone.init_cfg = (1, 1, 1, 1), None
    init_default_scope(framework)
    model = MODELS.build(config.model).train()
    losses = model.loss(torch.randn(len(samples), 3, 64, 64), samples)
    total, _ = model.parse_losses(losses)
    total.backward()
    if model.backbone.patch_embed.proj.weight.grad is None:
        raise RuntimeError('no gradient reaches the backbone')
    return f'forward and backward of {type(model).__name__}'


_TRAPS: dict[str, Callable[[], str]] = {
    'pkg_resources': _pkg_resources,
    'numpy with torch': _numpy_bridge,
    'torchvision': _torchvision,
    'operators of mmcv': _mmcv_operators,
    'checkpoints of mmengine': _resume,
    'name in the registries': _registry,
}
_CHECKS: dict[str, Callable[[], str]] = {'torch alone': _core, 'mmdet': _mmdet, 'mmsegmentation': _mmseg}

if __name__ == '__main__':
    logging.disable()
    print({**_TRAPS, **_CHECKS}[sys.argv[1]]())
