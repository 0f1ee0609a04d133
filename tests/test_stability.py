"""Public names, arguments, options of commands and defaults stay as recorded, unless the changelog names the change.

``python -m tests.test_stability`` writes the record anew, at a release, after which the changelog begins anew too.
"""

import argparse
import functools
import importlib
import inspect
import json
import re

import pytest

from swin_dense.commands._main import command_names
from swin_dense.workbench.runtime.model import RECORD_FORMAT
from swin_dense.workbench.runtime.sessions import FORMAT
from tests.conftest import ROOT, needs

RECORD = ROOT / 'tests' / 'stability.json'


def named_in(changelog, name):
    """Return whether the newest part of a changelog names something in backticks."""
    newest = re.split(r'^## ', changelog, flags=re.M)[1]
    code = ' '.join(re.findall(r'`([^`]+)`', newest))
    return re.search(rf'(?<![\w-]){re.escape(name)}(?![\w-])', code) is not None


def public_names():
    names = re.findall(
        r'^::: (\S+)$',
        (ROOT / 'docs' / 'reference.md').read_text(),
        re.M,
    )
    return {name: arguments(found(name)) for name in names}


def found(name):
    module, _, attribute = name.rpartition('.')
    return getattr(importlib.import_module(module), attribute)


def arguments(value):
    given = inspect.signature(value).parameters.values()
    return {one.name: 'required' if one.default is one.empty else default(one.default) for one in given}


def default(value):
    return getattr(value, '__name__', repr(value))


def options():
    """Return the default of each option of each command, and its positional arguments."""
    result = {}
    for name in command_names():
        parser = argparse.ArgumentParser()
        importlib.import_module(f'swin_dense.commands.{name}').add_arguments(parser)
        result[name] = {
            option: default(action.default)
            for action in parser._actions
            for option in action.option_strings or [action.dest]
        }
    return result


@functools.cache
def current():
    formats = {'metadata of ONNX files': FORMAT, 'records of predictions': RECORD_FORMAT}
    return {'names': public_names(), 'options': options(), 'formats': formats}


def changes(recorded, now):
    """Return a line for each recorded name, argument or option that is gone or has another default."""
    for kind in ('names', 'options'):
        for owner, parts in recorded[kind].items():
            if owner not in now[kind]:
                yield owner.rpartition('.')[2], f'{owner} is gone'
                continue
            for name, value in parts.items():
                there = now[kind][owner].get(name, 'gone')
                if there != value:
                    yield name, f'{name} of {owner} was {value}, is {there}'
    for name, version in recorded['formats'].items():
        if now['formats'].get(name) != version:
            yield name, f'the format of {name} was {version}, is {now["formats"].get(name)}'


@needs('mmengine')
def test_changes_are_in_the_changelog():
    recorded, changelog = json.loads(RECORD.read_text()), (ROOT / 'CHANGELOG.md').read_text()
    silent = [line for name, line in changes(recorded, current()) if not named_in(changelog, name)]
    assert not silent, f'name in the changelog, in backticks, or undo: {silent}'


OF_LOADING = 'swin_dense.load_checkpoint'


@needs('mmengine')
@pytest.mark.parametrize(
    ('kind', 'owner', 'recorded', 'message'),
    [
        ('names', 'swin_dense.former', {}, 'swin_dense.former is gone'),
        ('names', OF_LOADING, {'former': 'None'}, f'former of {OF_LOADING} was None, is gone'),
        ('names', OF_LOADING, {'ema': 'True'}, 'was True, is False'),
        ('options', 'features', {'--former': 'None'}, '--former of features was None, is gone'),
        ('formats', 'metadata of ONNX files', FORMAT + 1, f'was {FORMAT + 1}, is {FORMAT}'),
    ],
)
def test_a_change_is_noticed(kind, owner, recorded, message):
    record = {
        'names': {},
        'options': {},
        'formats': {},
        kind: {owner: recorded},
    }
    (line,) = (line for _, line in changes(record, current()))
    assert message in line


@pytest.mark.parametrize(
    ('name', 'named'),
    [
        ('--force', True),
        ('window_size', True),
        ('window', False),
        ('the', False),
        ('--former', False),
    ],
)
def test_names_are_in_backticks_in_the_newest_part(name, named):
    changelog = '# Changelog\n\n## 0.3.0\n\n- the `--force` of `convert`, `window_size=`\n\n## 0.2.0\n\n- `--former`\n'
    assert named_in(changelog, name) is named


if __name__ == '__main__':
    RECORD.write_text(json.dumps(current(), indent=1, sort_keys=True) + '\n')
