"""The requirement files match pyproject.toml, leave out torch, and contain no addresses."""

import re

import pytest
import set_up
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import ROOT

FILES = {name: (ROOT / f'requirements/{name}.txt').read_text() for name in ('core', 'dev', 'peers', 'mmcv')}
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())
EXTRAS, GROUPS = PROJECT['project']['optional-dependencies'], PROJECT['dependency-groups']
CHOSEN = {
    'core': ([], ['core']),
    'dev': (['features', 'zarr', 'visualize', 'export', 'mm-lite'], ['core', 'dev', 'mm']),
    'peers': (['checkpoints'], ['core', 'peers']),
    'mmcv': ([], ['compiled-mmcv']),
}


def locked(name):
    return dict(re.findall(r'^([\w.-]+)==(\S+)', FILES[name], re.M))


@pytest.mark.parametrize('name', FILES)
def test_the_files_have_the_requirements_of_pyproject(name):
    """If this fails: make requirements."""
    extras, groups = CHOSEN[name]
    lines = [] if name == 'mmcv' else [*PROJECT['project']['dependencies']]
    lines += [line for extra in extras for line in EXTRAS[extra]]
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
    assert ('triton' in versions) == (name == 'dev')
    assert ('mmcv' in versions) == (name == 'mmcv')
    without = len(set_up.MMCV.sub('', FILES[name]).replace('\\\n', '').splitlines())
    assert without == len(entries) - (name == 'mmcv')


def test_the_extras_of_both_mmcvs_have_the_same_frameworks():
    """Except that one has mmcv and the other mmcv-lite, whose version is that of its operators."""
    assert [line.replace('mmcv==', 'mmcv-lite==') for line in EXTRAS['mm']] == EXTRAS['mm-lite']
    operators = tomllib.loads((ROOT / 'mmcv_lite_ops/pyproject.toml').read_text())
    assert f'mmcv-lite=={operators["project"]["version"]}' in EXTRAS['mm-lite']


@pytest.fixture
def changes(monkeypatch):
    """Record what would be changed: the name of each step, and what it is given."""
    calls = []

    def install(python, *arguments, give=''):
        calls.append(('packages' if give else 'torch', (arguments, give)))

    monkeypatch.setattr(set_up, 'install', install)
    monkeypatch.setattr(set_up, 'make_environment', lambda folder: 'true')
    monkeypatch.setattr(set_up, 'check_compiler', lambda: calls.append(('check', ())))
    monkeypatch.setattr(set_up, 'uninstall', lambda python, *packages: calls.append(('remove', packages)))
    monkeypatch.setattr(set_up, 'install_mmcv', lambda python: calls.append(('compile', ())))
    return calls


def test_an_installed_torch_is_kept_and_a_partial_one_is_not(tmp_path, changes):
    metadata = tmp_path / 'lib/python3/site-packages/torch-2.12.1+cu126.dist-info'
    metadata.mkdir(parents=True)
    set_up.set_up(tmp_path, 'numpy==1\n')
    arguments, _ = dict(changes)['torch']
    assert arguments == ('--reinstall-package', 'torch', '--requirements', set_up.TORCH)
    (metadata / 'INSTALLER').touch()
    set_up.set_up(tmp_path, 'numpy==1\n')
    arguments, _ = dict(changes)['torch']
    assert arguments == ('torch',)  # any version is the right one; what it requires is installed


MMCV_LITE = 'mmcv-lite==2.1.0 \\\n    --hash=sha256:3\n'
MMDET = 'mmdet==3.3.0 \\\n    --hash=sha256:4\n'


@pytest.mark.parametrize(
    ('choice', 'there', 'steps'),
    [
        # Nothing is compiled unless asked for.
        ('lite', '', 'packages torch'),
        ('lite', 'mmcv_lite mmcv_lite_ops', 'packages torch'),
        ('kept', '', 'packages torch'),
        ('kept', 'mmcv_lite mmcv_lite_ops', 'packages torch'),
        # A compiled mmcv is installed after torch, and kept.
        ('compiled', '', 'check packages torch compile'),
        ('compiled', 'mmcv', 'check packages torch compile'),
        ('kept', 'mmcv', 'check packages torch compile'),
        # The other mmcv is removed, because it has the same files.
        ('lite', 'mmcv', 'remove packages torch'),
        ('compiled', 'mmcv_lite', 'check remove packages torch compile'),
        ('kept', 'mmcv mmcv_lite', 'check remove packages torch compile'),
    ],
)
def test_the_chosen_mmcv_is_installed(tmp_path, changes, choice, there, steps):
    for package in there.split():
        (tmp_path / f'lib/python3/site-packages/{package}-2.1.0.dist-info').mkdir(parents=True)
    set_up.set_up(tmp_path, MMCV_LITE + MMDET, choice)
    assert [name for name, _ in changes] == steps.split()
    done = dict(changes)
    if 'remove' in done:
        assert done['remove'] == ('mmcv', 'mmcv-lite', 'mmcv-lite-ops')
    arguments, given = done['packages']
    is_lite = 'compile' not in done
    assert (set_up.LITE_OPS in arguments) == is_lite
    assert given == (MMCV_LITE + MMDET if is_lite else MMDET)
    changes.clear()
    set_up.set_up(tmp_path, MMCV_LITE)  # an environment without mmdet has no operators
    arguments, given = dict(changes)['packages']
    assert set_up.LITE_OPS not in arguments
    assert given == MMCV_LITE
