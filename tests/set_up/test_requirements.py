"""What the set-up installs resolves, for every Python, against the package index alone, without local wheels.

Resolved by uv, which unlike pip evaluates requirements as another Python than the running one would.
"""

import ast
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import requires

import pytest
from kinds import KINDS, pinned
from machine import Unfit
from mmcv_build import fetch_source
from packages import Pip, is_triton

PLATFORM = 'x86_64-manylinux_2_28'
CASES = [
    pytest.param(kind, f'3.{minor}', id=f'{name}-3.{minor}')
    for name, kind in KINDS.items()
    for minor in range(kind.pythons[0][1], kind.pythons[1][1] + 1)
]
NO_INDEX = 'Failed to fetch|error sending request|dns error|client error'


class Unresolvable(Exception):
    pass


@pytest.fixture
def plain_index(monkeypatch):
    """Switch off whatever the environment says of local wheels and further indexes."""
    mirror = os.environ.get('PIP_INDEX_URL')
    for name in [name for name in os.environ if name.startswith('UV_')]:
        monkeypatch.delenv(name)
    if mirror:
        monkeypatch.setenv('UV_DEFAULT_INDEX', mirror)
    monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)
    monkeypatch.setenv('PIP_FIND_LINKS', '')
    monkeypatch.setenv('PIP_EXTRA_INDEX_URL', '')


def resolve(python, requirements, *options):
    """Return the version of each package that an environment would hold, wheels alone."""
    # mmcv has no wheel; mmcv-lite is the same without the compiled operators, and requires the same.
    wanted = '\n'.join(line.replace('mmcv==', 'mmcv-lite==') for line in requirements)
    done = subprocess.run(
        [
            *(sys.executable, '-m', 'uv', 'pip', 'compile', '--no-config', '--quiet', '--no-header', '--no-annotate'),
            *('--python', sys.executable, '--python-version', python, '--python-platform', PLATFORM),
            *('--only-binary', ':all:', *options, '-'),
        ],
        input=wanted,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        if re.search(NO_INDEX, done.stderr):
            pytest.skip(f'the package index cannot be reached: {done.stderr.splitlines()[0]}')
        raise Unresolvable(done.stderr)
    return dict(line.split('==') for line in done.stdout.split() if '==' in line)


@pytest.fixture
def cpu_build(tmp_path):
    """Return options that offer a torch for CPUs: with the metadata of the one that runs, but for what is for GPUs."""

    def offer(version):
        kept = [line for line in requires('torch') if not re.match('nvidia|cuda', line) and not is_triton(line)]
        metadata = f'Metadata-Version: 2.1\nName: torch\nVersion: {version}\n'
        metadata += ''.join(f'Requires-Dist: {line}\n' for line in kept)
        with zipfile.ZipFile(tmp_path / f'torch-{version}-py3-none-any.whl', 'w') as wheel:
            wheel.writestr(f'torch-{version}.dist-info/METADATA', metadata)
            wheel.writestr(f'torch-{version}.dist-info/WHEEL', 'Wheel-Version: 1.0\nTag: py3-none-any\n')
            wheel.writestr(f'torch-{version}.dist-info/RECORD', '')
        return '--find-links', str(tmp_path)

    return offer


@pytest.mark.parametrize(('kind', 'python'), CASES)
def test_resolves_with_the_cuda_build_of_torch(kind, python, plain_index):
    found = resolve(python, kind.requirements())
    assert '+' not in found['torch']
    assert any(name.startswith('nvidia-cudnn') for name in found)
    assert 'triton' in found
    without_deps = kind.requirements_without_deps()
    assert len(resolve(python, without_deps, '--no-deps')) == len(without_deps)


@pytest.mark.parametrize(('kind', 'python'), CASES)
def test_resolves_with_a_cpu_build_of_torch(kind, python, plain_index, cpu_build):
    published = resolve(python, [pinned(kind.requirements(), 'torch')])
    cpu = f'{published["torch"]}+cpu'
    wanted = [f'torch=={cpu}' if line.startswith('torch==') else line for line in kind.requirements()]
    wanted += [f'triton=={published["triton"]}'] if kind.triton else []
    found = resolve(python, wanted, *cpu_build(cpu))
    assert found['torch'] == cpu
    assert not [name for name in found if name.startswith('nvidia-')]
    assert found.get('triton') == (published['triton'] if kind.triton else None)


def test_another_triton_than_torch_requires_is_found_out(plain_index):
    with pytest.raises(Unresolvable, match='triton'):
        resolve('3.12', [*KINDS['main'].requirements(), 'triton==3.9.0'])


def test_the_triton_for_a_cpu_build_is_the_one_of_the_published_build(plain_index):
    published = resolve('.'.join(map(str, sys.version_info[:2])), ['torch==2.13.0'])
    found = Pip(sys.executable).triton_for('2.13.0+cpu')
    assert found.split(';')[0] == f'triton=={published["triton"]}'


def test_source_of_mmcv_can_be_built_by_every_python(plain_index, tmp_path, monkeypatch):
    mmcv = next(line for line in KINDS['main'].requirements() if line.startswith('mmcv=='))
    try:
        source = fetch_source(Pip(sys.executable), mmcv, tmp_path / 'src')
    except Unfit as error:
        pytest.skip(f'the package index cannot be reached: {error}')
    # Python 3.13 no longer lets exec() fill the locals of a function.
    functions = [
        node for node in ast.walk(ast.parse((source / 'setup.py').read_text())) if isinstance(node, ast.FunctionDef)
    ]
    get_version = next(ast.unparse(node) for node in functions if node.name == 'get_version')
    assert 'locals' not in get_version
    monkeypatch.chdir(source)
    names = {}
    exec(get_version, names)
    assert f'mmcv=={names["get_version"]()}' == mmcv
