"""Check this environment: versions, and faults of the installed packages; suggest fixes.

The exit status is 1 if something is broken. A package that is not installed does not count as broken, nor one that is
slow: the first import after an installation can take minutes. Without torch, only exported models run (`swin-dense
predict model.onnx`); that is right if ONNX Runtime or OpenVINO is installed.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

from swin_dense.utils.choices import RUNTIMES
from swin_dense.utils.packages import FORKS, cure_for, versions_of

GROUP = 'installation'
TIMEOUT = 300  # seconds per process; imports from a slow disk take long
SLOW = 20  # seconds from which the time of a process is printed
# Package: oldest tested version, first version that is too new; None for no limit.
VERSIONS = {
    'torch': ('2.1', '2.16'),
    'numpy': ('1.26', '3'),
    'pillow': (None, None),
    'onnxruntime': (None, None),
    'setuptools': (None, '81'),
    'mmengine': ('0.10.7', '0.11'),
    'mmcv': ('2.1.0', '2.2'),
    'mmdet': ('3.3.0', '3.4'),
    'mmsegmentation': ('1.2.2', '1.3'),
    'triton': ('3.6', None),
}
# Packages that exported models need besides one of RUNTIMES.
OF_EXPORTED = ('cv2', 'pycocotools')
# For each probe, the package without which it is skipped, and its code, which runs in a process of its own.
PROBES = {
    'backbone': ('torch', 'import torch, swin_dense; b = swin_dense.SwinBackbone(embed_dims=16, depths=(1, 1, 1, 1), '
                 'num_heads=(1, 2, 4, 8)); b(torch.rand(1, 3, 70, 90))[-1].sum().backward()'),
    'bfloat16 in OpenVINO': ('openvino', 'from swin_dense.workbench.runtime import sessions; '
                             'print("in hardware" if sessions.has_bfloat16() else "not in hardware")'),
    'numpy with torch': ('torch', 'import numpy, torch; torch.from_numpy(numpy.ones(1)).numpy()'),
    'exported models': ('pycocotools', 'from swin_dense import runtime; import cv2, pycocotools.mask'),
    'Pillow': ('PIL', 'import io; from PIL import Image; Image.new("RGB", (8, 8)).save(io.BytesIO(), "png")'),
    'torchvision': ('torchvision', 'import torchvision'),
    'pkg_resources': ('mmengine', 'import pkg_resources'),
    'operators of mmcv': ('mmcv', 'import torch; from mmcv.ops import get_compiler_version as compiler, '
                         'nms; nms(torch.rand(1, 4), torch.ones(1), 0.5); print("compiler", compiler())'),
    'SwinDense in mmdet': ('mmdet', 'import swin_dense; from mmdet.registry import MODELS; '
                           'assert MODELS.get("SwinDense") is swin_dense.SwinDense, "SwinDense is shadowed"'),
    'SwinDense in mmseg': ('mmseg', 'import swin_dense, mmseg.models; from mmseg.registry import MODELS; '
                           'assert MODELS.get("SwinDense") is swin_dense.SwinDense, "SwinDense is shadowed"'),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no options."""


def run(args: argparse.Namespace) -> int:
    for package in VERSIONS:
        print(f'  {package:24} {version_line(package)}')
    cures = {}
    unknown = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # more at once would be slower
        for name, (is_right, text) in zip(PROBES, pool.map(tried, PROBES.values()), strict=True):
            print(f'  {name:24} {text}', flush=True)
            if is_right is None:
                unknown.append(name)
            elif not is_right:
                cures[name] = cure_for(text)
    if cures:
        print(f'\n{len(cures)} broken. Suggested fixes:')
        for name, cure in cures.items():
            print(f'  {name}: {cure or "none is known"}')
    else:
        print('\nNothing was found broken.' if unknown else '\nNothing is broken.')
    if unknown:
        print(
            f'Not known, because it did not end within {TIMEOUT} seconds: {", ".join(unknown)}. On a slow machine, the '
            'first import of a package takes minutes, and the next ones less: run `swin-dense doctor` again. A check '
            'that does not end then either hangs.'
        )
    return int(bool(cures))


def version_line(package: str) -> str:
    """Return the installed version, with those that were tested if it is another."""
    found = versions_of(package)
    if len(found) != 1:
        return f'{" and ".join(map(" ".join, found.items()))} install the same files' if found else 'not installed'
    ((name, version),) = found.items()
    number = tuple(map(int, re.findall(r'\d+', version.partition('+')[0])))
    oldest, too_new = (tuple(map(int, limit.split('.'))) if limit else None for limit in VERSIONS[package])
    is_tested = (oldest is None or number >= oldest) and (too_new is None or number < too_new)
    return f'{name} {version}' + ('' if is_tested or name in FORKS.values() else f' (tested: {VERSIONS[package]})')


def tried(probe: tuple[str, str]) -> tuple[bool | None, str]:
    """Run a probe in a separate process, because a broken package can crash or hang.

    Return whether it succeeded, None if it did not end in time, and its output.
    """
    package, code = probe
    if find_spec(package) is None:
        return package not in required(), f'{package} is not installed'
    command = [sys.executable, '-W', 'ignore', '-c', f'import sys; sys.path[:] = {sys.path!r}; {code}']
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, errors='replace')
    except subprocess.TimeoutExpired:
        return None, f'did not end within {TIMEOUT} seconds'
    seconds = time.monotonic() - start
    after = f' (after {seconds:.0f} seconds)' if seconds >= SLOW else ''
    if done.returncode == 0:
        return True, (done.stdout.strip().rpartition('\n')[2] or 'ok') + after
    ended = f'{signal.Signals(-done.returncode).name}. ' if done.returncode < 0 else ''
    return False, ended + done.stderr.strip().rpartition('\n')[2][:300] + after


def required() -> tuple[str, ...]:
    """Return the packages without which this environment serves nothing."""
    if find_spec('torch') is None and any(find_spec(runtime) for runtime in RUNTIMES):
        return OF_EXPORTED
    return ('torch',)
