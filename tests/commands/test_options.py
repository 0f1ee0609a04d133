"""Options mean the same in all commands, and errors name them before weights are loaded."""

import pytest
from PIL import Image

from swin_dense.commands._main import command_names, main, parser_of
from tests.conftest import OPTIONAL_PACKAGES
from tests.processes import python, without


def options_of(name):
    actions = parser_of(name)._actions
    return {option: action for action in actions for option in action.option_strings}


def imported_by(*arguments):
    """Run `python -m swin_dense` with the arguments, and return the names of the modules that it imports."""
    done = python('-X', 'importtime', '-m', 'swin_dense', *arguments)
    return {line.rpartition('|')[2].strip() for line in done.stderr.splitlines()}


def test_a_prediction_with_a_file_imports_no_torch(tmp_path):
    """Whether or not torch and mmengine are installed."""
    pytest.importorskip('onnx')
    pytest.importorskip('onnxruntime')
    from tests.commands.files import write_file

    Image.new('RGB', (40, 30)).save(tmp_path / 'a.png')
    model = write_file(tmp_path / 'model.onnx')
    imported = imported_by('predict', *model, tmp_path / 'a.png', '--out', tmp_path / 'out')
    assert 'onnxruntime.capi' in imported
    assert not {'torch', 'mmengine', 'mmcv'} & imported


def test_an_option_means_the_same_in_all_commands_and_is_where_it_belongs():
    kinds = {}
    for name in command_names():
        options = options_of(name)
        for option in options.keys() - {'--resume', '--set', '--cfg-options'}:  # --resume takes a checkpoint in `train`
            action = options[option]
            kind = (action.dest, action.nargs, action.type, type(action))
            assert kinds.setdefault(option, kind) == kind, (option, name)
        assert ('--prefix' in options) == ('--checkpoint' in options or name in ('convert', 'export')), name
        if name not in ('doctor', 'flops', 'train', 'weights', 'zoo'):  # which write no file
            assert '--out' in options, name
            assert '--force' in options or name == 'features', name  # which continue an existing output


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new('RGB', (40, 30)).save('image.png')
    return tmp_path


@pytest.mark.parametrize(
    ('arguments', 'out'),
    [
        ('convert none.pth --out {}', 'new.pth'),
        ('explore image.png --checkpoint none.pth --out {}', 'new.html'),
        ('export none.pth --out {}', 'new.onnx'),
        ('config none --out {}', 'new.py'),
        ('test none image.png --out {}', 'new.pkl'),
        ('predict none image.png image.png --out .', 'image.json'),
    ],
)
def test_existing_files_are_replaced_only_with_force(place, capsys, arguments, out):
    (place / out).write_text('mine')
    assert main(arguments.format(out).split()) == 2
    assert f'{out} exists already; force=True (--force) replaces it' in capsys.readouterr().err
    assert (place / out).read_text() == 'mine'


TO_FOLDERS = [
    'features image.png --out {}',
    'predict none image.png image.png --out {}',
    'test none image.png --show-dir {}',
    'test none image.png --out {}/a.pkl',
]


@pytest.mark.parametrize('arguments', TO_FOLDERS)
def test_a_file_in_the_place_of_a_folder(place, capsys, arguments):
    (place / 'mine').write_text('mine')
    assert main(arguments.format('mine').split()) == 2
    assert 'mine must be a folder, but mine is a file' in capsys.readouterr().err


@pytest.mark.parametrize(
    'arguments',
    [
        *TO_FOLDERS,
        'convert none.pth --out {}/a.pth',
        'explore image.png --checkpoint none.pth --out {}/a.html',
        'export none.pth --out {}/a.ts',
        'config none --out {}/a.py',
    ],
)
def test_a_folder_that_is_not_writable(place, capsys, monkeypatch, arguments):
    (place / 'kept').mkdir()
    # Tests may run as root, which may write everywhere.
    monkeypatch.setattr('os.access', lambda path, mode: str(path) != 'kept')
    assert main(arguments.format('kept').split()) == 2
    assert 'the folder kept is not writable; choose another' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ('features image.png --arch swin_x', 'arch must be one of'),
        ('features image.png --device nowhere', "device='nowhere' cannot be used"),
        ('features image.png --tile 64 --max-side 64', 'leave --tile out'),
        ('explore image.png --arch swin_tiny_patch4_window7_224', "'swin_t' with window_size=7, and checkpoint="),
        ('explore . --arch swin_t', '. is a folder; give a file in it'),
        ('export --clamp-window', '--clamp-window lets a map choose its windows'),
        ('export --size 0', '--size must be at least 1'),
    ],
)
def test_options_are_refused_before_weights_are_read(place, capsys, monkeypatch, arguments, message):
    name, *more = arguments.split()
    out = {'export': 'a.ts', 'explore': 'a.html', 'convert': 'a.pth', 'features': 'out'}
    weights = ['weights.pth'] if name in ('convert', 'export') else ['--checkpoint', 'weights.pth']
    (place / 'weights.pth').write_bytes(b'no weights')
    more += ['--out', out[name]] if name in out else []
    assert main([name, *weights, *more]) == 2
    printed_error = capsys.readouterr().err
    assert message in printed_error
    assert 'weights.pth' not in printed_error


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        ('convert none.pth --out a.pth', "there is no checkpoint file 'none.pth'"),
        ('explore none.png --out a.html', 'there is no file none.png'),
        ('export mine.py none.pth --image none.png --out a.onnx', "there is no checkpoint file 'none.pth'"),
        ('export image.png --out a.onnx', 'needs onnx, onnxscript, onnxruntime, which are not installed'),
        ('features image.png --checkpoint none.pth --out a', "there is no checkpoint file 'none.pth'"),
        ('features image.png --out a', 'this command needs tqdm, pyarrow, safetensors, which are not installed'),
        ('flops mine.py', 'this command needs mmengine, mmcv, which are not installed'),
        ('train mine.py --resume none.pth', "there is no checkpoint file 'none.pth'"),
        ('train mine.py', 'this command needs mmengine, mmcv, which are not installed'),
        ('test mine.py none.pth', "there is no checkpoint file 'none.pth'"),
        ('predict mine.py none.pth image.png', 'there is no file none.pth'),
        ('config none --out a.py', 'this command needs mmengine, which is not installed'),
    ],
)
def test_what_is_missing_is_found_before_torch_is_imported(place, arguments, message):
    check_without_torch(place, arguments, message, OPTIONAL_PACKAGES)


@pytest.mark.parametrize(
    ('arguments', 'message', 'packages'),
    [
        ('features none.png --out a', "'none.png' does not exist", 'tqdm pyarrow safetensors'),
        ('config none.py --out a.py', "no config file 'none.py'", 'mmengine'),
        ('export none.py image.png --out a.onnx', "no config file 'none.py'", 'mmengine mmcv onnxscript onnxruntime'),
        ('flops none.py', "no config file 'none.py'", 'mmengine mmcv'),
        ('predict none.onnx image.png', 'there is no file none.onnx', 'onnxruntime'),
        ('predict none.py image.png image.png', "no config file 'none.py'", 'mmengine mmcv'),
        ('test none.py image.png', "no config file 'none.py'", 'mmengine mmcv'),
        ('train none.py', "no config file 'none.py'", 'mmengine mmcv'),
    ],
)
def test_a_missing_file_is_found_before_torch_is_imported(place, arguments, message, packages):
    for package in packages.split():
        pytest.importorskip(package)
    check_without_torch(place, arguments, message, [])


def check_without_torch(place, arguments, message, missing):
    done = without(
        ['torch', *missing],
        *arguments.split(),
        status=2,
        cwd=place,
    )
    assert message in done.stderr
    assert 'torch' not in done.stderr
