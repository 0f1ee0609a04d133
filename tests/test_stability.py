"""Public names, arguments, commands, options and defaults stay as released, unless the changelog names the change.

``python -m tests.test_stability`` records those of today, at a release, and before the first one whenever they change.
"""

import argparse
import importlib
import inspect
import re

from swin_dense.commands._main import command_names
from swin_dense.workbench.runtime.model import RECORD_FORMAT
from swin_dense.workbench.runtime.sessions import FORMAT
from tests.conftest import ROOT, needs

RECORD = ROOT / 'tests' / 'stability.txt'


def promises():
    """Return a line for each public name and command, and for each argument and option with its default."""
    lines = [f'format of ONNX files={FORMAT}', f'format of predictions={RECORD_FORMAT}']
    for name in re.findall(r'^- \[`(swin_dense\..+)`\]', (ROOT / 'docs' / 'reference.md').read_text(), re.M):
        module, _, attribute = name.rpartition('.')
        lines.append(name)
        public = getattr(importlib.import_module(module), attribute)
        if not (isinstance(public, type) and issubclass(public, Exception)):
            parameters = inspect.signature(public).parameters.values()
            lines += [f'{name} {one.name}={shown(one.default)}' for one in parameters]
    for name in command_names():
        parser = argparse.ArgumentParser(add_help=False)
        importlib.import_module(f'swin_dense.commands.{name}').add_arguments(parser)
        lines.append(f'swin-dense {name}')
        for action in parser._actions:
            options = action.option_strings or [action.dest]
            lines += [f'swin-dense {name} {option}={shown(action.default)}' for option in options]
    return sorted(lines)


def shown(default):
    return 'required' if default is inspect.Parameter.empty else getattr(default, '__name__', repr(default))


def broken(recorded, now, changelog):
    """Return the recorded lines that are gone, and whose last word the newest part of the changelog does not name."""
    newest = re.split(r'^## ', changelog, flags=re.M)[1]
    named = set(re.findall(r'[\w-]+', ' '.join(re.findall(r'`([^`]+)`', newest))))
    gone = [line for line in recorded if line not in now]
    return [line for line in gone if re.findall(r'[\w-]+', line.partition('=')[0])[-1] not in named]


@needs('mmengine')
def test_what_was_released_is_there():
    silent = broken(RECORD.read_text().splitlines(), promises(), (ROOT / 'CHANGELOG.md').read_text())
    assert not silent, f'undo these changes, or name them in the changelog, in backticks: {silent}'


def test_a_change_that_the_changelog_does_not_name_is_noticed():
    recorded = ['a.f', 'a.f x=1', 'a.f y=1', 'a.g', 'swin-dense c --z-w=None', 'swin-dense c --z=None']
    now = ['a.f', 'a.f x=2', 'a.f y=2', 'a.f new=3', 'swin-dense c --z=1']
    changelog = '# Changelog\n\n## 2\n\n- x, z, the `y=2` of `f`, `--z-w`\n\n## 1\n\n- `g`\n'
    assert broken(recorded, now, changelog) == ['a.f x=1', 'a.g', 'swin-dense c --z=None']
    assert broken(now, now, changelog) == []


if __name__ == '__main__':
    RECORD.write_text('\n'.join(promises()) + '\n')
