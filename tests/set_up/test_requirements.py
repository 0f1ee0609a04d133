"""The requirement files match pyproject.toml, leave out torch, and contain no addresses."""

import re

import pytest
import set_up
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

FILES = {name: (ROOT / f'requirements/{name}.txt').read_text() for name in ('core', 'dev', 'peers')}
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())
EXTRAS, GROUPS = PROJECT['project']['optional-dependencies'], PROJECT['dependency-groups']
CHOSEN = {
    'core': ([], ['core']),
    'dev': (['features', 'zarr', 'visualize', 'export', 'mm'], ['core', 'dev', 'mm']),
    'peers': (['checkpoints'], ['core', 'peers']),
}


def locked(name):
    return dict(re.findall(r'^([\w.-]+)==(\S+)', FILES[name], re.M))


@pytest.mark.parametrize('name', FILES)
def test_the_files_have_the_requirements_of_pyproject(name):
    """If this fails: make requirements."""
    extras, groups = CHOSEN[name]
    lines = [*PROJECT['project']['dependencies'], *(line for extra in extras for line in EXTRAS[extra])]
    lines += [line for group in groups for line in GROUPS[group] if isinstance(line, str)]
    versions = locked(name)
    for requirement in map(Requirement, lines):
        if requirement.name != 'torch':
            assert versions[canonicalize_name(requirement.name)] in requirement.specifier, requirement


@pytest.mark.parametrize('name', FILES)
def test_each_entry_is_a_pinned_package_with_hashes_and_none_is_for_torch_alone(name):
    entries = FILES[name].replace('\\\n', '').splitlines()
    assert all(re.fullmatch(r'[\w.-]+==\S+( ; [^#]+?)?( +--hash=sha256:[0-9a-f]{64})+', line) for line in entries)
    versions = locked(name)
    # Ultralytics, not torch, needs nvidia-ml-py.
    assert not [package for package in versions if re.match('torch$|nvidia-(?!ml-py$)|cuda-', package)]
    assert ('triton' in versions) == ('mmcv' in versions) == (name == 'dev')
    assert len(set_up.MMCV.sub('', FILES[name]).replace('\\\n', '').splitlines()) == len(entries) - (name == 'dev')


@pytest.fixture
def installed(monkeypatch):
    """Record the arguments of each installation instead of installing."""
    calls = []
    monkeypatch.setattr(set_up, 'install', lambda python, *arguments, give='': calls.append((arguments, give)))
    monkeypatch.setattr(set_up, 'make_environment', lambda folder: 'true')
    return calls


def test_an_installed_torch_is_kept_and_a_partial_one_is_not(tmp_path, installed):
    metadata = tmp_path / 'lib/python3/site-packages/torch-2.12.1+cu126.dist-info'
    metadata.mkdir(parents=True)
    set_up.set_up(tmp_path, 'numpy==1\n')
    (metadata / 'INSTALLER').touch()
    set_up.set_up(tmp_path, 'numpy==1\n')
    new, kept = installed[1], installed[3]
    assert new == (('--reinstall-package', 'torch', '--requirements', set_up.TORCH), '')
    assert kept == (('torch',), '')  # any version is the right one; what it requires is installed


def test_mmcv_is_installed_after_torch(tmp_path, installed, monkeypatch):
    monkeypatch.setattr(set_up, 'install_mmcv', lambda python, requirement: installed.append(requirement))
    mmcv = 'mmcv==2.1.0 \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\n'
    others = 'mmcv-lite==2.1.0 \\\n    --hash=sha256:3\n', 'mmdet==3.3.0 \\\n    --hash=sha256:4\n'
    set_up.set_up(tmp_path, others[0] + mmcv + others[1])
    assert installed[0][1] == ''.join(others)
    assert installed[2] == mmcv
