"""The folder of `swin-dense predict`: names, one process at a time, and files of the user that are left alone."""

import json
import os
import re

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image

from swin_dense.commands._main import main
from swin_dense.workbench.runtime import Prediction
from swin_dense.workbench.runtime.folder import LOCK, RECORD, ResultFolder
from tests.commands.files import write_file
from tests.commands.test_predict import names_in


@pytest.fixture
def predict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = write_file(tmp_path / 'model.onnx')
    return lambda *arguments: main(['predict', *model, *map(str, arguments), '--out', 'out'])


def make(*paths, colour=(255, 0, 0)):
    for path in paths:
        os.makedirs(os.path.dirname(path) or '.', exist_ok=True)
        Image.new('RGB', (40, 30), colour).save(path)


def results(name):
    return [f'{name}.json', f'{name}.labels.png', f'{name}.painted.jpg']


def image_of(name):
    with open(f'out/{name}.json') as file:
        return json.load(file)['image']


def test_no_pictures_are_drawn_on_request(predict, tmp_path):
    make('a.jpg')
    assert predict('a.jpg', '--no-pictures') == 0
    assert names_in(tmp_path / 'out') == ['a.json', 'a.labels.png']


def test_images_that_differ_in_the_suffix_keep_it(predict, tmp_path):
    make('p/a.jpg', 'p/a.png', 'p/a.jpg.png', 'p/A.bmp', 'p/b.png', 'p/sub/a.png')
    assert predict('p') == 0
    names = ('A.bmp', 'a.jpg', 'a.jpg.png', 'a.png', 'b', 'sub/a')
    assert names_in(tmp_path / 'out') == sorted(file for name in names for file in results(name))
    assert image_of('a.jpg') == 'p/a.jpg'
    assert image_of('a.png') == 'p/a.png'


def test_images_that_differ_in_case_alone_are_numbered(predict, tmp_path):
    """Not every file system tells their results apart; a name stays when more of them come."""
    make('p/a.jpg', 'p/A.jpg')
    assert predict('p') == 0
    assert names_in(tmp_path / 'out') == sorted([*results('A.jpg'), *results('a.jpg-2')])
    assert [image_of(name) for name in ('A.jpg', 'a.jpg-2')] == ['p/A.jpg', 'p/a.jpg']
    make('p/A.JPG')
    assert predict('p', '--resume') == 0
    found = names_in(tmp_path / 'out')
    assert len({name.casefold() for name in found}) == len(found) == 9
    assert [image_of(name) for name in ('A.jpg', 'a.jpg-2')] == ['p/A.jpg', 'p/a.jpg']


def test_an_image_keeps_its_name_when_another_one_comes(predict, tmp_path):
    make('p/a.jpg')
    assert predict('p') == 0
    make('p/a.png')
    assert predict('p', '--resume') == 0
    assert names_in(tmp_path / 'out') == sorted([*results('a'), *results('a.png')])
    assert image_of('a') == 'p/a.jpg'


def test_a_second_process_is_refused(predict, tmp_path, capsys):
    make('a.jpg')
    (tmp_path / 'out').mkdir()
    with FileLock(tmp_path / 'out' / LOCK):
        assert predict('a.jpg') == 2
    assert 'another `swin-dense predict` is writing to out; wait for it' in capsys.readouterr().err
    assert names_in(tmp_path / 'out') == []
    assert predict('a.jpg') == 0


@pytest.mark.parametrize(
    ('option', 'message'),
    [
        ([], 'exists already; force=True (--force) replaces it'),
        (['--resume'], 'is not a result of `swin-dense predict`, or one of an earlier version; move it'),
    ],
)
@pytest.mark.parametrize('ending', ['json', 'painted.jpg', 'labels.png', 'panoptic.png'])
def test_files_of_the_user_are_neither_replaced_nor_deleted(predict, tmp_path, capsys, option, message, ending):
    make('a.jpg', 'b.jpg')
    (tmp_path / 'out').mkdir()
    own = tmp_path / f'out/b.{ending}'
    own.write_text('mine')
    assert predict('a.jpg', 'b.jpg', *option) == 2
    assert f'out/b.{ending} {message}' in capsys.readouterr().err
    assert own.read_text() == 'mine'
    assert [path.name for path in (tmp_path / 'out').iterdir()] == [own.name]


def test_force_replaces_what_it_writes_and_deletes_nothing_else(predict, tmp_path):
    make('a.jpg')
    (tmp_path / 'out').mkdir()
    for name in (*results('a'), 'a.panoptic.png'):
        (tmp_path / 'out' / name).write_text('mine')
    assert predict('a.jpg', '--force') == 0
    assert image_of('a') == 'a.jpg'
    assert (tmp_path / 'out/a.panoptic.png').read_text() == 'mine'


def test_a_file_of_the_user_that_comes_later_is_kept(predict, tmp_path):
    """Its name belonged to a result of an earlier run, which was replaced by a run without one."""
    make('a.jpg')
    assert predict('a.jpg') == 0
    (tmp_path / 'a.jpg').write_text('no image')
    assert predict('a.jpg', '--force') == 1
    assert names_in(tmp_path / 'out') == []
    (tmp_path / 'out/a.labels.png').write_text('mine')
    for status, option in ((1, '--force'), (2, '--resume')):
        assert predict('a.jpg', option) == status
        assert (tmp_path / 'out/a.labels.png').read_text() == 'mine'
    with pytest.raises(FileExistsError, match='by another program meanwhile'):
        ResultFolder(tmp_path / 'out').write('a.jpg', 'a', Prediction({}, labels=np.zeros((2, 2), np.int32)))


def test_another_spelling_of_a_path_is_the_same_image(predict, tmp_path, capsys):
    make('p/a.jpg', 'p/b.jpg')
    (tmp_path / 'link').symlink_to('p')
    assert predict('p/a.jpg', './p/a.jpg', tmp_path / 'p/a.jpg') == 0
    assert '1 of 1 images' in capsys.readouterr().out
    written = (tmp_path / 'out/a.json').stat().st_mtime_ns
    assert predict('link', '--resume') == 0
    assert (tmp_path / 'out/a.json').stat().st_mtime_ns == written
    assert names_in(tmp_path / 'out') == sorted([*results('a'), *results('b')])
    (tmp_path / 'p/c.jpg').symlink_to('a.jpg')  # another name for its content, which has results of its own
    assert predict('p', '--resume') == 0
    assert names_in(tmp_path / 'out') == sorted([*results('a'), *results('b'), *results('c')])


def test_results_of_another_image_are_not_resumed(predict, capsys):
    make('p/a.jpg', 'q/a.jpg')
    assert predict('p', 'q') == 2
    assert 'several images would be written to out/a.jpg: p/a.jpg, q/a.jpg' in capsys.readouterr().err
    assert predict('p') == 0
    assert predict('q', '--resume') == 2
    assert re.search(
        r'out/a.json is the result of .*/p/a.jpg; write those of .*/q/a.jpg to another', capsys.readouterr().err
    )
    assert predict('q') == 2
    assert 'out/a.json exists already; force=True (--force) replaces it' in capsys.readouterr().err
    assert predict('q', '--force') == 0
    assert image_of('a') == 'q/a.jpg'


def change_record(change):
    """Rewrite each line of the record."""
    with open(f'out/{RECORD}') as file:
        entries = [json.loads(line) for line in file if line.strip()]
    with open(f'out/{RECORD}', 'w') as file:
        file.writelines(f'{json.dumps(change(entry))}\n' for entry in entries)


@pytest.mark.parametrize(
    ('options', 'difference'),
    [
        (['--score', '0.6'], r'score 0.3 there, 0.6 now'),
        (['--runtime', 'openvino'], r"runtime 'onnxruntime' there, 'openvino' now"),
        ([], r"model '(\w{64})' there, '(?!\1)\w{64}' now"),
    ],
)
def test_results_of_another_model_or_of_other_options_are_not_resumed(predict, tmp_path, capsys, options, difference):
    if 'openvino' in options:
        pytest.importorskip('openvino')
    make('p/a.jpg', 'p/b.jpg')
    assert predict('p/a.jpg') == 0
    assert predict('p', '--resume') == 0
    if not options:
        write_file(tmp_path / 'model.onnx', 'ArgMin')
    before = (tmp_path / 'out/a.json').read_bytes()
    (tmp_path / 'out/b.json').unlink()  # as in a run that was killed: it is predicted again
    capsys.readouterr()
    assert predict('p', '--resume', *options) == 2
    error = capsys.readouterr().err
    assert re.search(rf'out/a.json was predicted with other settings \({difference}\); give --force instead', error)
    assert (tmp_path / 'out/a.json').read_bytes() == before
    assert predict('p/b.jpg', '--resume', *options) == 0
    assert predict('p', '--force', *options) == 0
    assert predict('p', '--resume', *options) == 0


def test_results_of_a_version_that_did_not_record_settings_are_resumed(predict):
    make('a.jpg')
    assert predict('a.jpg') == 0
    change_record(lambda entry: {key: value for key, value in entry.items() if key != 'settings'})
    assert predict('a.jpg', '--resume', '--score', '0.6') == 0


@pytest.mark.parametrize('rest', ['{"format": 1, "na', '\n\n'])
def test_a_record_whose_last_line_was_cut(predict, tmp_path, rest):
    make('a.jpg', 'b.jpg')
    assert predict('a.jpg') == 0
    with (tmp_path / 'out' / RECORD).open('a') as file:
        file.write(rest)
    assert predict('a.jpg', 'b.jpg', '--resume') == 0
    assert names_in(tmp_path / 'out') == sorted([*results('a'), *results('b')])
    assert predict('a.jpg', 'b.jpg', '--force') == 0


def test_times_of_the_steps(predict, capsys):
    make('p/a.jpg', 'p/b.jpg', 'p/c.jpg')
    assert predict('p', '--time') == 0
    number = r'\d+\.\d'
    steps = ', '.join(f'{step} {number}' for step in ('read', 'prepare', 'run', 'finish', 'write', 'in all'))
    assert re.search(rf'^milliseconds per image, the median of 3: {steps}$', capsys.readouterr().out, re.M)


def test_a_folder_that_cannot_be_locked_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr('swin_dense.workbench.runtime.folder.find_spec', lambda name: None)
    with ResultFolder(tmp_path / 'out').locked():
        assert str(tmp_path / 'out') in caplog.text
    assert 'pip install filelock' in caplog.text
