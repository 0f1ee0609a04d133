"""No output replaces or deletes anything but regular files, and a symbolic link is written through to its file."""

import ast
import os
import socket
import stat
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from swin_dense import export_model, extract_pyramid
from swin_dense.commands._main import main
from swin_dense.utils.atomic import atomic_path, exclusive_lock, remove, write_json, write_tensors, write_text
from tests.conftest import ROOT, needs, photograph, tiny

pytestmark = pytest.mark.skipif(sys.platform == 'win32', reason='needs pipes and links')


def make_device(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip('making a device is not permitted here')


def make_socket(path):
    """Make a socket from its folder, because its path may have at most 108 characters."""
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(before)


NODES = {
    'device': make_device,
    'pipe': os.mkfifo,
    'socket': make_socket,
    'folder': os.mkdir,
}


def write_block(path):
    with atomic_path(path) as unfinished:
        unfinished.write_text('new')


def write_text_file(path):
    write_text(path, 'new')


def write_json_file(path):
    write_json(path, {})


def write_safetensors(path):
    write_tensors(path, {'x': torch.zeros(1)})


WRITERS = [
    write_block,
    write_text_file,
    write_json_file,
    pytest.param(write_safetensors, marks=needs('safetensors')),
]


def at(path):
    """Return the content of a path, without following a link there, to compare before and after."""
    status = path.lstat()
    return stat.S_IFMT(status.st_mode), status.st_ino, status.st_rdev


@pytest.mark.parametrize('is_linked', [False, True])
@pytest.mark.parametrize('kind', NODES)
@pytest.mark.parametrize('write', [*WRITERS, remove])
def test_a_node_stays(tmp_path, write, kind, is_linked):
    node = path = tmp_path / 'node'
    NODES[kind](node)
    if is_linked:
        path = tmp_path / 'link'
        path.symlink_to(node)
    before = at(node), at(path)
    with pytest.raises(FileExistsError, match=f'is a {kind}, which no output replaces; choose another path'):
        write(path)
    assert (at(node), at(path)) == before
    assert {one.name for one in tmp_path.iterdir()} == {node.name, path.name}


@pytest.mark.parametrize('there', [True, False])
@pytest.mark.parametrize('write', WRITERS)
def test_a_link_is_written_through(tmp_path, write, there):
    (tmp_path / 'far').mkdir()
    target, link = tmp_path / 'far' / 'of another name', tmp_path / 'link.x'
    if there:
        target.write_text('old')
    link.symlink_to('far/of another name')
    write(link)
    assert link.is_symlink()
    assert target.read_bytes() not in (b'', b'old')
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    remove(link)
    assert link.is_symlink()
    assert not target.exists()


def test_links_in_a_circle_stay(tmp_path):
    (tmp_path / 'a').symlink_to('b')
    (tmp_path / 'b').symlink_to('a')
    with pytest.raises(OSError, match='symbolic links'):
        write_text(tmp_path / 'a', 'new')
    assert (tmp_path / 'a').is_symlink()


def test_a_node_that_comes_while_a_file_is_written_stays(tmp_path):
    def write():
        with atomic_path(tmp_path / 'x') as unfinished:
            unfinished.write_text('new')
            os.mkfifo(tmp_path / 'x')

    with pytest.raises(FileExistsError, match='is a pipe'):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ['x']


def test_a_lock_is_no_pipe(tmp_path):
    os.mkfifo(tmp_path / 'lock')
    with pytest.raises(FileExistsError, match='is a pipe'):
        exclusive_lock(tmp_path / 'lock')


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a checkpoint and an image, in which a command runs."""
    monkeypatch.chdir(tmp_path)
    torch.save({'model': tiny().state_dict()}, 'tiny.pth')
    Image.fromarray(photograph(64, 64)).save('image.png')
    return tmp_path


TO_FILES = [
    pytest.param('convert tiny.pth', 'new.pth'),
    pytest.param('convert tiny.pth', 'new.safetensors', marks=needs('safetensors')),
    pytest.param('explore image.png --checkpoint tiny.pth', 'new.html'),
    pytest.param('export tiny.pth --size 32', 'new.ts'),
    pytest.param('config upernet_swin-demo', 'new.py', marks=needs('mmengine')),
]


@pytest.mark.parametrize('kind', NODES)
@pytest.mark.parametrize(
    ('arguments', 'out'), [*TO_FILES, pytest.param('test none image.png', 'new.pkl', marks=needs('mmengine'))]
)
def test_a_command_refuses_a_node_with_force_too(place, capsys, arguments, out, kind):
    if (arguments.split()[0], kind) == ('test', 'folder'):
        pytest.skip('a folder is an output of `test` for mmseg')
    NODES[kind](place / out)
    before = at(place / out)
    for force in ([], ['--force']):
        assert main([*arguments.split(), '--out', out, *force]) == 2
        assert f'{out} is a {kind}, which no output replaces' in capsys.readouterr().err
    assert at(place / out) == before


@pytest.mark.parametrize(('arguments', 'out'), TO_FILES)
def test_a_command_writes_through_a_link(place, arguments, out):
    (place / 'far').mkdir()
    (place / out).symlink_to('far/new')
    assert main([*arguments.split(), '--out', out]) == 0
    assert (place / out).is_symlink()
    assert (place / 'far' / 'new').stat().st_size > 0


@needs('onnxruntime')
@pytest.mark.parametrize('ending', ['json', 'labels.png', 'painted.jpg', 'panoptic.png'])
def test_the_results_of_predict(place, capsys, ending):
    from tests.commands.files import write_file

    model = write_file('model.onnx')
    (place / 'out').mkdir()
    os.mkfifo(place / 'out' / f'image.{ending}')
    for option in ([], ['--force'], ['--resume']):
        assert main(['predict', *model, 'image.png', '--out', 'out', *option]) == 2
        assert f'image.{ending} is a pipe, which no output replaces' in capsys.readouterr().err
    assert [path.name for path in (place / 'out').iterdir()] == [f'image.{ending}']


@needs('onnxruntime')
def test_a_result_that_became_a_pipe_is_not_deleted(place):
    from tests.commands.files import write_file

    model = write_file('model.onnx')
    assert main(['predict', *model, 'image.png', '--out', 'out']) == 0
    path = place / 'out' / 'image.labels.png'
    path.unlink()
    os.mkfifo(path)
    assert main(['predict', *model, 'image.png', '--out', 'out', '--force']) == 2
    assert stat.S_ISFIFO(path.stat().st_mode)


@needs('pyarrow')
@pytest.mark.parametrize('name', ['_settings.json', 'part-000000.parquet', '.lock'])
def test_the_folder_of_features(place, capsys, name):
    (place / 'out').mkdir()
    os.mkfifo(place / 'out' / name)
    assert main(['features', 'image.png', '--checkpoint', 'tiny.pth', '--pool', 'avg', '--out', 'out']) == 2
    assert f'{name} is a pipe, which no output replaces' in capsys.readouterr().err
    assert stat.S_ISFIFO((place / 'out' / name).stat().st_mode)


@pytest.mark.parametrize('stride', [4, 64])
def test_the_maps_of_a_pyramid(tmp_path, stride):
    """The stride is one of the new maps, or one of an earlier image that another model left there."""
    os.mkfifo(tmp_path / f'stride_{stride}.npy')
    (tmp_path / 'stride_8.npy').write_text('old')
    with pytest.raises(FileExistsError, match='is a pipe'):
        extract_pyramid(tiny(), np.zeros((64, 64, 3), np.uint8), tile=224, out=tmp_path)
    assert (tmp_path / 'stride_8.npy').read_text() == 'old'
    assert len(list(tmp_path.iterdir())) == 2


def test_an_exported_model(tmp_path):
    os.mkfifo(tmp_path / 'x.ts')
    with pytest.raises(FileExistsError, match='is a pipe'):
        export_model(tiny(), tmp_path / 'x.ts', size=32)
    assert stat.S_ISFIFO((tmp_path / 'x.ts').stat().st_mode)


@needs('mmdet')
def test_the_parts_of_a_split(tmp_path, capsys):
    from tests.workbench.configs.data import CLASSES, DETECTOR, make_coco

    root = make_coco(tmp_path / 'fruit')
    os.mkfifo(tmp_path / 'mine.val.json')
    arguments = ['config', DETECTOR, '--out', tmp_path / 'mine.py', '--data-root', root, '--val-share', 0.5]
    places = ['--train-ann', 'annotations/instances_train2017.json', '--train-images', 'train2017']
    names = ['--classes', ','.join(CLASSES), '--force']
    assert main(list(map(str, [*arguments, *places, *names]))) == 2
    assert 'mine.val.json is a pipe, which no output replaces' in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ['fruit', 'mine.val.json']


@pytest.mark.parametrize('path', sorted((ROOT / 'swin_dense').rglob('*.py'), key=str), ids=lambda path: path.name)
def test_one_module_replaces_and_deletes_files(path):
    """Of `replace`, that of os: strings, lists of options and dates have one, too."""
    calls = [node.func for node in ast.walk(ast.parse(path.read_text('utf-8'))) if isinstance(node, ast.Call)]
    names = {ast.unparse(function) for function in calls if isinstance(function, ast.Attribute)}
    ends = ('.unlink', '.rename', '.rmtree', '.rmdir')
    harmful = {name for name in names if name.endswith(ends) or name in ('os.replace', 'os.remove', 'shutil.move')}
    assert not harmful or path.name == 'atomic.py', harmful
