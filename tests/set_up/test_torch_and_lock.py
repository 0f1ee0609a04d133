"""The lock matches pyproject.toml and names no index, and installing from it keeps an installed torch."""

import contextlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import set_up
import tomllib

from tests.conftest import ROOT

PYTHON = Path(sys.executable)
UV = PYTHON.parent / 'uv'
GROUPS = (['dev', 'mm'], ['peers'], ['core'])
pytestmark = pytest.mark.skipif(not UV.exists(), reason='needs uv, which the set-up installs')


def test_the_lock_has_the_requirements_of_pyproject():
    """Every group can be exported, and a version that pyproject.toml pins is the one that is locked."""
    groups = tomllib.loads((ROOT / 'pyproject.toml').read_text())['dependency-groups']
    for names in GROUPS:
        locked = set_up.Uv(PYTHON, names).export('--no-hashes')
        for name in names:
            pinned = [line for line in groups[name] if isinstance(line, str) and '==' in line and ';' not in line]
            assert all(re.search(rf'^{re.escape(line)}( |$)', locked, re.M) for line in pinned), name


def test_the_lock_names_no_index():
    assert set(re.findall(r'\w+://[^/"]*', (ROOT / 'uv.lock').read_text())) == {'https://index.invalid'}


@pytest.mark.parametrize('groups', GROUPS, ids='-'.join)
def test_packages_installed_besides_torch_exclude_torch_and_its_dependencies(groups):
    uv = set_up.Uv(PYTHON, groups)
    everything, others = (
        set(re.findall(r'^([\w-]+)==', text, re.M)) for text in (uv.export(), uv.export(*set_up.BESIDE_TORCH))
    )
    assert 'torch' in everything
    assert any(name.startswith('nvidia-') for name in everything)
    assert not [name for name in others if name == 'torch' or name.startswith(('nvidia-', 'cuda-'))]
    assert {'numpy', 'pytest', 'hypothesis'} <= others
    assert ('mmcv' in others) == ('mm' in groups)
    assert not {'mmcv', 'mmcv-lite'} <= others
    assert ('triton' in others) == ('dev' in groups)


class Recorder(set_up.Uv):
    """Records the requirements instead of installing them."""

    def install(self, requirements, *options, env={}):
        self.installed.append(requirements)


def put_torch(folder, version):
    metadata = folder / f'lib/python3/site-packages/torch-{version}.dist-info'
    metadata.mkdir(parents=True)
    (metadata / 'INSTALLER').touch()


@pytest.mark.parametrize('version', ['2.13.0+cpu', '2.12.1+cu126'])
def test_an_installed_torch_is_kept(version, tmp_path, monkeypatch):
    put_torch(tmp_path, version)
    monkeypatch.setattr(set_up, 'make_environment', lambda folder: None)
    monkeypatch.setattr(set_up, 'Uv', lambda python, groups: Recorder(PYTHON, groups))
    monkeypatch.setattr(Recorder, 'installed', [], raising=False)
    set_up.set_up(tmp_path, ['dev'])
    torch, requirements = Recorder.installed
    assert torch == f'torch=={version}'  # with its dependencies
    assert not re.search('^(torch|nvidia.*)==', requirements, re.M)
    assert ('\ntriton==' in requirements) == (version == '2.13.0+cpu')


def test_a_torch_that_is_too_old_is_refused(tmp_path):
    put_torch(tmp_path, '1.13.1')
    with pytest.raises(SystemExit, match=r'torch 1\.13\.1 in .* is older than 2\.1: .*pip uninstall torch'):
        set_up.installed_torch(tmp_path)


@pytest.mark.parametrize(
    ('text', 'online'),
    [
        (None, False),
        ("Network connectivity is disabled, but the requested data wasn't found in the cache", True),
        ('No solution found when resolving dependencies', True),
        ('Failed to build `mmcv==2.1.0`\n  cause: The build backend returned an error', False),
    ],
)
def test_uncached_packages_are_downloaded_and_failed_builds_are_not_repeated(text, online, monkeypatch):
    commands = []

    def run(self, *command, **options):
        commands.append(command)
        return subprocess.CompletedProcess(command, int(text is not None and '--offline' in command), stderr=text or '')

    monkeypatch.setattr(set_up.Uv, 'run', run)
    with pytest.raises(subprocess.CalledProcessError) if text and not online else contextlib.nullcontext():
        set_up.Uv(PYTHON, ['core']).install('mmcv==2.1.0')
    assert [('--offline' in command) for command in commands] == ([True, False] if online else [True])
