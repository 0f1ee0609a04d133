"""Options mean the same in all commands, and errors name them before weights are loaded."""

import argparse
import importlib
import subprocess
import sys

import pytest
from PIL import Image

from swin_dense.__main__ import command_names, in_options, main
from swin_dense.commands import convert, explore, features
from tests.conftest import ROOT, needs

HELP_OF_ALL = """
import sys
sys.argv[0] = 'swin-dense'
from swin_dense.__main__ import command_names, main
for arguments in [['--help'], ['zoo'], *([name, '--help'] for name in command_names())]:
    try:
        main(arguments)
    except SystemExit as stopped:
        assert stopped.code == 0, arguments
assert 'torch' not in sys.modules and 'numpy' not in sys.modules
"""


def parsers(name):
    parser = argparse.ArgumentParser()
    importlib.import_module(f'swin_dense.commands.{name}').add_arguments(parser)
    found = [parser]
    for one in found:
        found += [p for a in one._actions if isinstance(a, argparse._SubParsersAction) for p in a.choices.values()]
    return found


@pytest.mark.parametrize('command', [['-c', HELP_OF_ALL], ['-m', 'swin_dense', 'zoo']], ids=['all', 'as a module'])
def test_help_and_zoo_import_no_torch(command):
    done = subprocess.run([sys.executable, '-X', 'importtime', *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {line.rpartition('|')[2].strip() for line in done.stderr.splitlines()}
    assert 'swin_dense.recipes.zoo' in imported
    assert 'torch' not in imported


def test_a_prediction_with_a_file_imports_no_torch(tmp_path):
    """Whether or not torch and mmengine are installed."""
    pytest.importorskip('onnx')
    pytest.importorskip('onnxruntime')
    from tests.commands.files import write_file

    Image.new('RGB', (40, 30)).save(tmp_path / 'a.png')
    command = ['-X', 'importtime', '-m', 'swin_dense', 'predict', *write_file(tmp_path / 'model.onnx')]
    arguments = [str(tmp_path / 'a.png'), '--out', str(tmp_path / 'out')]
    done = subprocess.run([sys.executable, *command, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    imported = {line.rpartition('|')[2].strip() for line in done.stderr.splitlines()}
    assert 'onnxruntime.capi' in imported
    assert not {'torch', 'mmengine', 'mmcv'} & imported


def test_an_option_means_the_same_in_all_commands():
    kinds = {}
    for name in command_names():
        for action in (action for parser in parsers(name) for action in parser._actions):
            for option in action.option_strings:
                kind = (action.dest, action.nargs, action.type, type(action))
                # --classes takes names in `config`, but a file in `eval`; --resume takes a checkpoint in `train`.
                if option not in ('--classes', '--resume', '--set', '--cfg-options'):
                    assert kinds.setdefault(option, (name, kind))[1] == kind, (option, name, kinds[option][0])
    assert not {'--shape', '--window', '--plot', '--map', '--destination'} & kinds.keys()


def test_commands_that_write_have_out_and_force():
    for name in set(command_names()) - {'doctor', 'eval', 'train', 'zoo'}:
        options = {option for parser in parsers(name) for action in parser._actions for option in action.option_strings}
        assert '--out' in options, name
        assert '--force' in options or name == 'features', name  # which continues an existing output


def test_commands_with_a_checkpoint_of_a_backbone_have_prefix():
    for name in command_names():
        for parser in parsers(name):
            options = {option for action in parser._actions for option in action.option_strings}
            assert ('--prefix' in options) == ('--checkpoint' in options or name == 'convert'), name


def test_choices_equal_the_constants_of_the_packages():
    from swin_dense.checkpoint.families import EXPORTED
    from swin_dense.checkpoint.fit import CHANNEL_POLICIES, TABLE_METHODS
    from swin_dense.explore.page import LANGUAGES, LARGEST_PAGE
    from swin_dense.features.folder import ROWS_PER_PART
    from swin_dense.features.inference import POOLINGS
    from swin_dense.features.sinks import FORMATS

    def actions(command):
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        return {action.dest: action for action in parser._actions}

    assert sorted(actions(convert)['to'].choices) == sorted(EXPORTED)
    assert actions(convert)['table_resize'].choices == TABLE_METHODS
    assert actions(convert)['channel_policy'].choices == CHANNEL_POLICIES
    assert actions(explore)['lang'].choices == LANGUAGES
    assert actions(explore)['max_size'].default * 1e6 == LARGEST_PAGE
    assert actions(features)['pool'].choices == ('none', *POOLINGS)
    assert actions(features)['format'].choices == FORMATS
    assert actions(features)['part_rows'].default == ROWS_PER_PART


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with an image, and no weights."""
    monkeypatch.chdir(tmp_path)
    Image.new('RGB', (40, 30)).save('image.png')
    return tmp_path


@pytest.mark.parametrize(
    ('arguments', 'out'),
    [
        ('convert none.pth --out {}', 'new.pth'),
        ('explore image.png --checkpoint none.pth --out {}', 'new.html'),
        ('export --checkpoint none.pth --out {}', 'new.onnx'),
        ('export --checkpoint none.pth --out {}', 'new.ts'),
        ('flops --arch t --out {}', 'new.png'),
        ('visualize pyramid image.png --checkpoint none.pth --out {}', 'new.png'),
        ('visualize masks --grid 20 20 --out {}', 'new.pdf'),
        ('config none --out {}', 'new.py'),
        ('test none image.png --out {}', 'new.pkl'),
        ('predict none image.png image.png --out .', 'image.json'),
        ('predict none image.png image.png --out .', 'image.painted.jpg'),
    ],
)
def test_existing_files_are_replaced_only_with_force(place, capsys, arguments, out):
    (place / out).write_text('mine')
    assert main(arguments.format(out).split()) == 2
    assert f'{out} exists already; --force replaces it' in capsys.readouterr().err
    assert (place / out).read_text() == 'mine'


@needs('matplotlib')
@pytest.mark.parametrize('arguments', ['flops --arch t', 'visualize masks --grid 20 20'])
def test_force_replaces(place, arguments):
    (place / 'new.png').write_text('mine')
    assert main([*arguments.split(), '--out', 'new.png', '--force']) == 0
    assert (place / 'new.png').read_bytes().startswith(b'\x89PNG')


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ('features image.png --arch swin_x', '--arch must be one of'),
        ('features image.png --window-size 0', '--window-size must be at least 1, got 0'),
        ('features image.png --device nowhere', '--device'),
        ('features image.png --levels 0', 'every entry of --levels must be at least 1'),
        ('features image.png --max-side 0', '--max-side must be at least 1'),
        ('features image.png --tile 64 --max-side 64', 'leave --tile out'),
        ('features image.png --page -1', '--page must be at least 0'),
        ('explore image.png --arch swin_tiny_patch4_window7_224', "'swin_t' with --window-size 7, and --checkpoint"),
        ('explore . --arch swin_t', '. is a folder; give a file in it'),
        ('export --clamp-window', '--clamp-window lets a map choose its windows'),
        ('export --out-indices -1', 'every entry of --out-indices must be at least 0'),
        ('export --size 0', '--size must be at least 1'),
        ('visualize pyramid none.png', 'there is no file none.png'),
        ('convert --arch swin_x', '--arch must be one of'),
        ('convert --in-channels 0', '--in-channels must be at least 1'),
        ('eval none', 'there is no folder none'),
        ('eval . --size 224 256', '--size must be a square'),
        ('eval . --batch-size 0', '--batch-size must be at least 1'),
    ],
)
def test_options_are_refused_before_weights_are_read(place, capsys, monkeypatch, arguments, message):
    name, *more = arguments.split()
    out = {'export': 'a.ts', 'explore': 'a.html', 'visualize': 'a.png', 'convert': 'a.pth', 'features': 'out'}
    weights = ['weights.pth'] if name == 'convert' else ['--checkpoint', 'weights.pth']
    (place / 'weights.pth').write_bytes(b'no weights')
    more += [*weights, *(['--out', out[name]] if name in out else [])]
    assert main([name, *more]) == 2
    printed_error = capsys.readouterr().err
    assert message in printed_error
    assert 'weights.pth' not in printed_error


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        ("build the model with arch='t'.", 'build the model with --arch t.'),
        ('made with window_size=(7, 7), not', 'made with --window-size 7 7, not'),
        ('with clamp_window=True; or clamp_window=False', 'with --clamp-window; or --no-clamp-window'),
        ('choose one with prefix=...', 'choose one with --prefix ...'),
        ('give tile=', 'give --tile'),
        ('every entry of tile must be', 'every entry of --tile must be'),
        ('of a small tile must be', 'of a small tile must be'),
        ('arch must be one of', '--arch must be one of'),
        ('every arch_must --arch must be', 'every arch_must --arch must be'),
        ("arch='a-b.c' and tile=-1.5; prefix=None.", '--arch a-b.c and --tile -1.5; --prefix None.'),
        ('there is no file tile=cam1/a.jpg', 'there is no file tile=cam1/a.jpg'),
        ('there is no file tile=3.jpg', 'there is no file tile=3.jpg'),
        ('there is no file tile=3/a.jpg', 'there is no file tile=3/a.jpg'),
        ("image 'photos/tile=cam1.jpg': use tile= (--tile)", "image 'photos/tile=cam1.jpg': use --tile (--tile)"),
        ("image 'tile=1': use tile=64", "image 'tile=1': use --tile 64"),
        ('model.prefix=1, any_prefix=2, depths=(2, 2)', 'model.prefix=1, any_prefix=2, depths=(2, 2)'),
    ],
)
def test_messages_name_command_line_options(text, expected):
    parser = argparse.ArgumentParser()
    for option in ('--arch', '--window-size', '--prefix', '--tile'):
        parser.add_argument(option)
    parser.add_argument('--clamp-window', action=argparse.BooleanOptionalAction)
    assert in_options(text, parser) == expected
