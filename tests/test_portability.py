"""What Windows and macOS lack, or do otherwise, is not needed: no system but Linux runs most of the tests."""

import ast
import os
import pickle

import pytest

from swin_dense.utils import atomic
from tests.conftest import ROOT, needs

TREES = {path.relative_to(ROOT): ast.parse(path.read_text('utf-8')) for path in (ROOT / 'swin_dense').rglob('*.py')}
NOT_ON_WINDOWS = {'fcntl', 'grp', 'posix', 'pwd', 'resource', 'termios'}
# Functions and constants of os and signal; atomic.py guards those that it uses, which a test below checks.
GUARDED = {'posix_fallocate', 'O_DIRECTORY'}
PROCESSES = 'fork killpg register_at_fork sched_getaffinity setsid SIGALRM SIGHUP SIGKILL SIGUSR1'
FILES = 'geteuid getuid posix_fadvise statvfs sync'
NOT_EVERYWHERE = {*GUARDED, *PROCESSES.split(), *FILES.split()}


def imported(node):
    names = [one.name for one in node.names] if isinstance(node, ast.Import) else [node.module or '']
    return {name.partition('.')[0] for name in names}


@pytest.mark.parametrize('path', sorted(TREES, key=str), ids=str)
def test_text_files_have_an_encoding_and_modules_exist_everywhere(path):
    """Without an encoding, Windows uses that of its language, in which the text of another machine is wrong."""
    for node in ast.walk(TREES[path]):
        text = ast.unparse(node) if isinstance(node, (ast.Call, ast.Attribute)) else ''
        if isinstance(node, ast.Call) and getattr(node.func, 'attr', None) in ('read_text', 'write_text'):
            assert 'encoding' in {keyword.arg for keyword in node.keywords}, text
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert not NOT_ON_WINDOWS & imported(node)
        of_system, _, name = text.partition('.')
        if of_system in ('os', 'signal') and name in NOT_EVERYWHERE:
            assert path.name == 'atomic.py', text
            assert name in GUARDED


def test_files_are_written_without_what_only_some_systems_have(tmp_path, monkeypatch):
    for name in GUARDED:
        monkeypatch.delattr(os, name, raising=False)
    with atomic.atomic_path(tmp_path / 'file') as unfinished:
        unfinished.write_bytes(b'1')
        atomic.reserve(unfinished, 9)
    assert [path.name for path in tmp_path.iterdir()] == ['file']


@needs('mmengine')
def test_the_transform_of_bands_reaches_a_spawned_worker():
    from swin_dense.mm import LoadBands

    loader = LoadBands({'mean': [0] * 4, 'std': [1] * 4})
    again = pickle.loads(pickle.dumps(loader))
    assert vars(again).keys() == vars(loader).keys()
    assert repr(again) == repr(loader)
