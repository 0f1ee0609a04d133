"""What was public in 0.3.0 exists, or an error says what to use."""

import importlib
import json

import pytest

import swin_dense.export
from swin_dense.commands._main import command_names, main
from swin_dense.utils.deprecation import GONE, why_gone
from tests.conftest import ROOT, needs
from tests.test_stability import current

RECORD = json.loads((ROOT / 'tests' / 'released' / '0.3' / 'stability.json').read_text())
OBJECTS = sorted(name for name in GONE if not name.startswith('swin-dense'))
COMMANDS = sorted(set(GONE) - set(OBJECTS))


def test_other_names_are_unknown():
    with pytest.raises(AttributeError, match=r"'swin_dense\.export' has no attribute 'other'"):
        _ = swin_dense.export.other
    with pytest.raises(AttributeError, match=r"'swin_dense\.runtime' has no attribute 'other'"):
        _ = swin_dense.runtime.other


@needs('mmengine')
def test_each_recorded_name_exists_or_is_in_the_table():
    """An object with the module that it was in; an option with its command."""
    now = current()
    gone = [name for name in RECORD['names'] if name not in now['names']]
    assert [name for name in gone if not (why_gone(name) or why_gone(name.rpartition('.')[0]))] == []
    gone = []
    for command, options in RECORD['options'].items():
        there = now['options'].get(command, {})
        gone += [f'{command} {option}' for option in options if option not in there]
    commands = [f'swin-dense {line}' for line in gone]
    assert [line for line in commands if not (why_gone(line) or why_gone(' '.join(line.split()[:2])))] == []


@needs('mmengine')
@pytest.mark.parametrize('name', OBJECTS)
def test_the_import_of_what_is_gone_says_what_to_use(name):
    owner, _, attribute = name.rpartition('.')
    with pytest.raises(ImportError) as raised:
        exec(f'from {owner} import {attribute}', {})
    assert GONE[name] in str(raised.value)


@pytest.mark.parametrize('name', [name for name in OBJECTS if name.startswith('swin_dense.integrations.')])
def test_a_module_that_is_gone_says_what_to_use(name):
    with pytest.raises(ImportError) as raised:
        importlib.import_module(name)
    assert GONE[name] in str(raised.value)


@pytest.mark.parametrize(
    'name', ['swin_dense.SimMIM', 'swin_dense.features.unlabelled', 'swin_dense.export.export_detector']
)
def test_an_attribute_that_is_gone_is_none(name):
    owner, _, attribute = name.rpartition('.')
    module = importlib.import_module(owner)
    assert not hasattr(module, attribute)
    with pytest.raises(AttributeError, match=r'was removed in 0\.4\.0'):
        getattr(module, attribute)


@pytest.mark.parametrize('line', COMMANDS)
def test_a_command_that_is_gone_says_what_to_use(line, capsys):
    assert main([*line.split()[1:], 'photo.jpg']) == 2
    assert GONE[line] in capsys.readouterr().err
    command, *option = line.split()[1:]
    assert (command in command_names()) == bool(option)


@needs('mmengine')
def test_a_config_of_0_3_finds_its_hook():
    from mmengine.hooks import CheckpointHook
    from mmengine.registry import HOOKS

    assert HOOKS.get('swin_dense.mm.WholeCheckpointHook') is CheckpointHook
