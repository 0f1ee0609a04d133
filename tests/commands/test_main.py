"""`swin-dense` itself: its commands, its exit statuses, and the help for every argument."""

import importlib
import os
import re
import shlex
import subprocess
import sys

import pytest
import torch
from PIL import Image

import swin_dense
from swin_dense.commands._main import GROUPS, command_names, main, parser_of
from swin_dense.utils.packages import EXTRAS
from tests.conftest import OPTIONAL_PACKAGES, ROOT, needs
from tests.processes import python, without


@pytest.fixture
def command(monkeypatch):
    module = importlib.import_module('swin_dense.commands.flops')

    def replace(run):
        monkeypatch.setattr(module, 'run', run)
        return main(['flops', 'mine.py'])

    return replace


def raising(error):
    def run(args):
        raise error

    return run


def test_the_overview_lists_every_command_with_its_summary(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(['--help'])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 100
    groups = dict(re.findall(r'^([^\n]+):\n((?:  .+\n)+)', printed, re.M))
    assert len(command_names()) >= 6
    for name in command_names():
        module = importlib.import_module(f'swin_dense.commands.{name}')
        extra = f' [{module.EXTRA}]' if hasattr(module, 'EXTRA') else ''
        listed = ' '.join(groups[GROUPS[module.GROUP]].split())
        assert f'{name} {module.__doc__.splitlines()[0]}{extra}' in listed
        assert getattr(module, 'EXTRA', 'mm') in {*EXTRAS, 'mm'}


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ([], 'error: give a command'),
        (['exploer'], "there is no command 'exploer'; did you mean 'explore'? (`swin-dense --help` lists them)"),
        (['flops', '--no-such-option'], 'error: '),
    ],
)
def test_wrong_usage_of_the_command_line_itself(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize('name', command_names())
def test_every_argument_has_a_help_text(name):
    for action in parser_of(name)._actions:
        assert action.help, action.dest


def test_help_and_usage_errors_need_neither_torch_nor_optional_packages():
    code = f"""
import sys
sys.modules.update(dict.fromkeys({[*OPTIONAL_PACKAGES, 'yaml', 'filelock']}))
from swin_dense.commands._main import command_names, main
of_each = ([name, option] for name in command_names() for option in ('--help', '--no-such-option'))
for arguments in (['--help'], *of_each):
    try:
        print(*arguments, 'returned', main(arguments))
    except SystemExit as stopped:
        print(*arguments, 'ended with', stopped.code)
sys.modules.pop('yaml')  # which the metafiles need
assert main(['zoo']) == 0
assert not {{'torch', 'numpy'}} & sys.modules.keys()
"""
    done = python('-c', code)
    for name in command_names():
        assert f'usage: swin-dense {name} ' in done.stdout
        assert f'{name} --help ended with 0' in done.stdout
        assert f'{name} --no-such-option ended with 2' in done.stdout


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['train', 'mine.py', '--epochs', '3'], 'unrecognized argument --epochs; `swin-dense config` has it'),
        (['config', 'mine.py', '--dataroot=x'], "unrecognized argument --dataroot=x; did you mean '--data-root'?"),
        (['doctor', 'two'], 'unrecognized argument two'),
    ],
)
def test_an_option_that_another_command_has(words, message, capsys):
    with pytest.raises(SystemExit, match='2'):
        main(words)
    assert message in capsys.readouterr().err


def test_exit_status_of_every_outcome(command, capsys, monkeypatch):
    assert command(lambda args: 0) == 0
    assert command(lambda args: 1) == 1
    assert command(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == 'swin-dense flops: interrupted\n'
    for error in (ValueError('a b'), TypeError('a b'), FileNotFoundError('a b'), ImportError('a b')):
        assert command(raising(error)) == 2
        assert capsys.readouterr().err == 'swin-dense flops: error: a b\n'
    assert command(lambda args: torch.empty(2**50)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert 'error: there is not enough memory for these sizes' in line
    with pytest.raises(KeyError):  # a bug
        command(raising(KeyError('a')))
    monkeypatch.setenv('SWIN_DENSE_TRACEBACK', '1')
    with pytest.raises(ValueError, match='a b'):
        command(raising(ValueError('a b')))


@pytest.mark.parametrize(
    ('name', 'module', 'advice'),
    [
        ('flops', 'rich.console', 'needs rich, which is not installed: pip install rich'),
        ('flops', 'yaml', 'pip install PyYAML'),
        ('flops', 'pkg_resources', "pip install 'setuptools<81'"),
        ('flops', 'mmengine.config', './mmcv_lite_ops (in the clone of swin_dense); see docs/install.md'),
        ('features', 'safetensors', "not installed: pip install '.[checkpoints]' (in the clone"),
    ],
)
def test_a_missing_package_is_named(monkeypatch, capsys, name, module, advice):
    error = ModuleNotFoundError(f'No module named {module!r}', name=module)
    monkeypatch.setattr('swin_dense.commands._main.find_spec', lambda name: None)
    monkeypatch.setattr(importlib, 'import_module', raising(error))
    assert main([name]) == 2
    assert advice in capsys.readouterr().err


def test_a_part_that_an_installed_package_lacks_is_named(monkeypatch, capsys):
    """The package itself is not called absent, nor is it to be installed again as it is."""
    error = ModuleNotFoundError("No module named 'numpy.of_tomorrow'", name='numpy.of_tomorrow')
    monkeypatch.setattr(importlib, 'import_module', raising(error))
    assert main(['train']) == 2
    message = capsys.readouterr().err
    assert 'needs numpy.of_tomorrow, which the installed numpy lacks: install another version of numpy' in message
    assert 'not installed' not in message


@pytest.mark.parametrize(
    ('torch_is', 'arguments', 'message'),
    [
        ('missing', 'features photos --out out', 'error: swin_dense needs torch, which cannot be imported (Module'),
        ('broken', 'features photos --out out', 'needs torch, which cannot be imported (RuntimeError: no GPU here'),
        ('missing', 'features photos --out out --tile 0', 'error: --tile must be at least 1'),
        ('missing', 'predict model.onnx photos/a.png --runtime openvino', 'error: the runtime needs openvino'),
        ('broken', 'predict model.onnx photos/a.png --runtime openvino', 'error: the runtime needs openvino'),
        ('missing', 'predict model.onnx photos/a.png --out model.onnx/a', 'model.onnx/a must be a folder'),
        pytest.param('missing', 'predict swin.py swin.pth photos/a.png', 'needs torch', marks=needs('mmcv')),
    ],
)
def test_without_torch_each_error_says_its_own_reason(tmp_path, torch_is, arguments, message):
    pytest.importorskip('onnx')
    pytest.importorskip('onnxruntime')
    from tests.commands.files import write_file

    write_file(tmp_path / 'model.onnx')
    for folder in ('photos', 'torch'):
        (tmp_path / folder).mkdir()
    Image.new('RGB', (40, 30)).save(tmp_path / 'photos' / 'a.png')
    for name in ('swin.py', 'swin.pth'):
        (tmp_path / name).write_text('default_scope = "mmdet"')
    (tmp_path / 'torch' / '__init__.py').write_text("raise RuntimeError('no GPU here')")
    absent = ['openvino', 'tifffile', *(['torch'] if torch_is == 'missing' else [])]
    paths = f'{tmp_path}{os.pathsep}{ROOT}'
    done = without(
        absent,
        *arguments.split(),
        status=2,
        cwd=tmp_path,
        PYTHONPATH=paths,
    )
    assert message in done.stderr
    assert done.stderr.count('\n') == 1


def test_as_a_program_whose_pipe_is_closed():
    assert python('-m', 'swin_dense', '--version').stdout == f'swin-dense {swin_dense.__version__}\n'
    command = f'set -o pipefail; {shlex.quote(sys.executable)} -m swin_dense zoo --weights | head -c 10'
    done = subprocess.run(['bash', '-c', command], capture_output=True, text=True)
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 10, '')
