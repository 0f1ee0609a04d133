"""The build of mmcv: for the GPU if possible, with a header precompiled once, in Python 3.13 too."""

import os
import re
import subprocess
import sys

import pytest
import set_up

from tests.conftest import ROOT

BUILD = ROOT / 'tools/mmcv_build'


def test_names_defined_by_exec_are_in_locals_in_every_python(tmp_path):
    script = tmp_path / 'setup.py'
    script.write_text('def version():\n    exec("number = 7")\n    return locals()["number"]\n\nprint(version())\n')
    environment = {**os.environ, 'PYTHONPATH': str(BUILD)}
    assert subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True).stdout == '7\n'


@pytest.mark.parametrize(
    ('cuda', 'sees_gpu', 'cuda_home', 'forced', 'fails', 'tried'),
    [
        (None, False, '/cuda', 1, False, ['cpu 0']),
        ('13.0', False, '/cuda', 0, False, ['cpu 0']),
        ('13.0', True, None, 0, False, ['cpu 0']),
        ('13.0', True, '/cuda', 0, False, ['13.0 1']),
        ('13.0', False, '/cuda', 1, False, ['13.0 1']),
        ('13.0', True, '/cuda', 0, True, ['13.0 1', 'cpu 0']),
    ],
)
def test_gpu_operators_are_compiled_if_possible(cuda, sees_gpu, cuda_home, forced, fails, tried, tmp_path, monkeypatch):
    files = {
        'torch/__init__.py': "from . import cuda, version\n__version__ = '2.13.0'\n",
        'torch/cuda.py': f'def is_available(): return {sees_gpu}\n',
        'torch/version.py': f'cuda = {cuda!r}\n',
        'torch/utils/cpp_extension.py': f'CUDA_HOME = {cuda_home!r}\n',
        'mmcv/__init__.py': "raise ImportError('undefined symbol')\n",
        'bin/python': f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
        'bin/uv': f'#!/bin/sh\necho "$@ $FORCE_CUDA" >> "{tmp_path}/log"\nexit $((FAILS * FORCE_CUDA))\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    monkeypatch.setenv('FORCE_CUDA', str(forced))
    monkeypatch.setenv('FAILS', str(int(fails)))
    set_up.install_mmcv(tmp_path / 'bin/python')
    removal, tools, *builds = (tmp_path / 'log').read_text().splitlines()
    assert removal.startswith('pip uninstall')  # the mmcv that is there was built for another torch
    assert '--no-build-isolation' not in tools
    assert [re.sub(r'.* made-for=2\.13\.0-(\S+) .* ', r'\1 ', line) for line in builds] == tried
