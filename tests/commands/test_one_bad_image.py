"""One bad image ends no folder: it is named with its error, the others have their results, and a second run goes on."""

import json
import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import tifffile
import torch
from PIL import Image

from swin_dense import SwinBackbone, SwinClassifier
from swin_dense.__main__ import main
from swin_dense.analysis import accuracy
from swin_dense.workbench.predict import Predictor
from swin_dense.workbench.runtime import Model, Prediction, results
from tests.commands.files import write_file
from tests.commands.test_predict import RECIPES, make_weights, names_in
from tests.conftest import TINY, randomize
from tests.features.helpers import command_line, failures_in, finished_in

SIZES = [(60, 90), (64, 64), (48, 70)]
GOOD = [f'{folder}/{number}' for folder in 'ab' for number in range(3)] + ['deep', 'photo']
TOO_LARGE = (31, 37)  # of the image for which memory is short
BAD = ['broken', 'empty', 'float', 'gone', 'large', 'text', 'truncated']


@pytest.fixture
def folder(tmp_path):
    """Good images in two subfolders, with the same names in both, and bad ones of several kinds."""
    random = np.random.default_rng(0)
    root = tmp_path / 'photos'
    for name in GOOD:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 255, (*SIZES[len(name) % 3], 3), np.uint8)
        Image.fromarray(pixels).save(root / f'{name}.png')
    Image.fromarray(random.integers(0, 65535, (40, 50), np.uint16)).save(root / 'deep.png')
    (root / 'photo.png').rename(root / 'photo.tga')  # which OpenCV does not decode
    Image.fromarray(pixels).save(root / 'photo.tga')
    Image.fromarray(pixels).save(root / 'truncated.jpg')
    (root / 'truncated.jpg').write_bytes((root / 'truncated.jpg').read_bytes()[:500])
    tifffile.imwrite(root / 'broken.tif', pixels, compression='zlib', photometric='rgb')
    damaged = bytearray((root / 'broken.tif').read_bytes())
    damaged[-900:-100] = bytes(800)
    (root / 'broken.tif').write_bytes(damaged)
    tifffile.imwrite(root / 'float.tif', np.full((30, 30), 1000, np.float32))
    (root / 'empty.jpg').write_bytes(b'')
    (root / 'text.png').write_text('no image')
    (root / 'gone.png').symlink_to(root / 'nowhere.png')
    Image.fromarray(pixels[: TOO_LARGE[0], : TOO_LARGE[1]]).save(root / 'large.png')
    return root


def model_of(kind, tmp_path, monkeypatch):
    """Return the first arguments of `predict`; the model lacks memory for images of the size TOO_LARGE."""
    if kind == 'onnx':
        original = Model.run

        def run(self, img, size=None):
            if img.shape[2:] == TOO_LARGE:
                raise onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException(
                    'Failed to allocate memory for 9 bytes'
                )
            return original(self, img, size)

        monkeypatch.setattr(Model, 'run', run)
        return write_file(tmp_path / 'model.onnx')
    outputs = Predictor.outputs

    def fail(self, loaded, path):
        if loaded.shape[:2] == TOO_LARGE:
            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB')
        return outputs(self, loaded, path)

    monkeypatch.setattr(Predictor, 'outputs', fail)
    make_weights(kind, tmp_path / 'weights.pth')
    return [RECIPES[kind], str(tmp_path / 'weights.pth')]


@pytest.mark.parametrize('tile', [[], ['--tile', '64']], ids=['whole', 'tiles'])
@pytest.mark.parametrize('kind', ['onnx', 'mmseg', 'mmdet'])
def test_predict_names_every_bad_image_and_goes_on(folder, tmp_path, monkeypatch, capsys, kind, tile):
    monkeypatch.setattr(logging, 'raiseExceptions', False)  # handlers of the tests before write into closed files
    out = folder / 'out'  # within the folder: what it contains is not predicted
    coco = ['--format', 'coco'] if kind == 'mmdet' else []
    arguments = ['predict', *model_of(kind, tmp_path, monkeypatch), str(folder), '--out', str(out), *tile, *coco]
    assert main([*arguments, '--resume']) == 1
    printed = capsys.readouterr()
    assert f'8 of 15 images are in {out}' in printed.out
    assert 'Traceback' not in printed.err
    lines = [line for line in printed.err.splitlines() if line.startswith('swin-dense predict: ')]
    assert len(lines) == len(BAD)
    for name in BAD:
        assert sum(f'/{name}.' in line for line in lines) == 1, name
    assert sum('too little memory' in line for line in lines) == 1
    assert [name for name in names_in(out) if name.endswith('.json') and 'coco_' not in name] == [
        f'{name}.json' for name in GOOD
    ]
    if coco:
        data = json.loads((out / 'coco_annotations.json').read_text())
        assert [image['file_name'].partition('.')[0] for image in data['images']] == GOOD
        assert len({image['id'] for image in data['images']}) == len(GOOD)

    # The bad image that is mended is predicted, and nothing else; the files for COCO contain all of them.
    (folder / 'text.png').unlink()
    Image.new('RGB', (40, 50)).save(folder / 'text.png')
    before = {name: (out / name).stat().st_mtime_ns for name in names_in(out)}
    assert main([*arguments, '--resume']) == 1
    after = {name: (out / name).stat().st_mtime_ns for name in names_in(out)}
    assert {name for name in after if after[name] != before.get(name)} >= {'text.json'}
    assert all(name.startswith(('text.', 'coco_')) for name in after if after[name] != before.get(name))
    if coco:
        data = json.loads((out / 'coco_annotations.json').read_text())
        assert [image['file_name'].partition('.')[0] for image in data['images']] == [*GOOD, 'text']


@pytest.mark.parametrize('tile', [[], ['--tile', '224']], ids=['whole', 'tiles'])
def test_features_names_every_bad_image_and_goes_on(folder, tmp_path, monkeypatch, capsys, tile):
    monkeypatch.setattr(logging, 'raiseExceptions', False)
    Image.new('RGB', (1, 1)).save(folder / 'small.png')  # which a backbone takes
    run, _ = command_line(monkeypatch, tmp_path / 'out', '--pool', 'avg')
    forward = SwinBackbone.forward

    def with_little_memory(self, img):
        if img.shape[2:] == TOO_LARGE:
            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB')
        return forward(self, img)

    monkeypatch.setattr(SwinBackbone, 'forward', with_little_memory)
    assert run(folder, *tile) == 1
    printed = capsys.readouterr().err
    assert 'Traceback' not in printed
    assert sorted(Path(name).stem for name in failures_in(tmp_path / 'out')) == BAD
    assert len(finished_in(tmp_path / 'out')) == len(GOOD) + 1
    assert all(f'/{name}.' in printed for name in BAD)
    (folder / 'text.png').unlink()
    Image.new('RGB', (40, 50)).save(folder / 'text.png')
    assert run(folder, *tile) == 1
    assert len(finished_in(tmp_path / 'out')) == len(GOOD) + 2


def test_eval_names_every_bad_image_and_goes_on(folder, tmp_path, capsys, monkeypatch):
    classifier = randomize(SwinClassifier(TINY, 2, window_size=2), 1)
    torch.save(classifier.state_dict(), tmp_path / 'swin.pth')
    (folder / 'a').rename(tmp_path / 'a')
    (tmp_path / 'a').rename(folder / 'b' / 'a')
    labelled = tmp_path / 'labelled'
    (labelled / 'other').mkdir(parents=True)
    folder.rename(labelled / 'photos')
    resized = accuracy._resized

    def with_little_memory(image, size, crop):
        if image.size == TOO_LARGE[::-1]:
            raise MemoryError
        return resized(image, size, crop)

    monkeypatch.setattr(accuracy, '_resized', with_little_memory)
    status = main(['eval', str(labelled), '--checkpoint', str(tmp_path / 'swin.pth'), '--size', '64', '--json'])
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert status == 1
    assert 'Traceback' not in printed.err
    assert result['images'] == len(GOOD)
    assert sorted(Path(name).stem for name in result['broken']) == BAD
    assert all(f'/{name}.' in printed.err for name in BAD)


def test_options_that_would_be_mixed_are_refused(folder, tmp_path, capsys):
    arguments = ['predict', *write_file(tmp_path / 'model.onnx'), str(folder), '--out', str(tmp_path / 'out')]
    assert main(arguments) == 1
    assert main(arguments) == 2
    assert '--force replaces it, --resume keeps it' in capsys.readouterr().err
    assert main([*arguments, '--resume', '--score', '0.5']) == 2
    assert 'or of another score, which --resume would mix' in capsys.readouterr().err
    os.utime(tmp_path / 'model.onnx', (1, 1))
    assert main([*arguments, '--resume']) == 2
    assert 'another version of the weights' in capsys.readouterr().err
    assert main([*arguments, '--force', '--score', '0.5']) == 1
    assert main([*arguments, '--resume', '--score', '0.5']) == 2  # bad images may have results of the first run


def test_a_failed_image_keeps_nothing_of_the_run_before(folder, tmp_path):
    arguments = ['predict', *write_file(tmp_path / 'model.onnx'), str(folder), '--out', str(tmp_path / 'out')]
    assert main(arguments) == 1
    assert 'a/1.labels.png' in names_in(tmp_path / 'out')
    (folder / 'a/1.png').write_bytes(b'')
    assert main([*arguments, '--force']) == 1
    assert [name for name in names_in(tmp_path / 'out') if name.startswith('a/1')] == []


def test_a_signal_ends_after_an_image_and_writes_the_files_for_coco(folder, tmp_path, monkeypatch, capsys):
    arguments = ['predict', *model_of('mmdet', tmp_path, monkeypatch), str(folder), '--out', str(tmp_path / 'out')]
    predict = Predictor.predict

    def signalled(self, path):
        if path.endswith('a/1.png'):
            signal.raise_signal(signal.SIGTERM)
        return predict(self, path)

    with monkeypatch.context() as patched:
        patched.setattr(Predictor, 'predict', signalled)
        assert main([*arguments, '--format', 'coco']) == 128 + signal.SIGTERM
    assert 'run the same command again with --resume' in capsys.readouterr().err
    data = json.loads((tmp_path / 'out' / 'coco_annotations.json').read_text())
    assert [image['file_name'] for image in data['images']] == ['a/0.png', 'a/1.png']
    assert main([*arguments, '--format', 'coco', '--resume']) == 1
    data = json.loads((tmp_path / 'out' / 'coco_annotations.json').read_text())
    assert len(data['images']) == len(GOOD)


def test_results_that_cannot_be_written_end_the_run(folder, tmp_path, monkeypatch, capsys):
    arguments = ['predict', *write_file(tmp_path / 'model.onnx'), str(folder), '--out', str(tmp_path / 'out')]
    write = results.write_json

    def full(path, content):
        if path.name == '2.json':
            raise OSError(28, 'No space left on device')
        write(path, content)

    monkeypatch.setattr(results, 'write_json', full)
    assert main(arguments) == 1
    printed = capsys.readouterr().err
    assert 'cannot write to' in printed
    assert 'No space left on device. Finished images are kept' in printed
    assert [name for name in names_in(tmp_path / 'out') if name.endswith('json')] == ['a/0.json', 'a/1.json']


def test_pixels_of_no_segment_are_0_in_the_file_for_coco(tmp_path):
    """Inside, they have the number of the class that there is not, which would be an id of COCO's."""
    ids = np.array([[1002, 1002, 80], [3, 2002, 80]], np.int32)
    record = {'segments': [{'id': 1002}, {'id': 3}, {'id': 2002}]}
    model = SimpleNamespace(predict=lambda path: Prediction(record, panoptic=ids))
    endings = ('json', 'painted.jpg', 'labels.png', 'panoptic.png')
    results.predict(model, 'a.jpg', {ending: tmp_path / f'a.{ending}' for ending in endings}, None, None)
    assert names_in(tmp_path) == ['a.json', 'a.panoptic.png']
    colours = np.asarray(Image.open(tmp_path / 'a.panoptic.png')).astype(int)
    np.testing.assert_array_equal(colours @ [1, 256, 256**2], [[1002, 1002, 0], [3, 2002, 0]])


@pytest.mark.parametrize('label', [255, 259])
def test_classes_are_stored_in_as_many_bits_as_they_need(tmp_path, label):
    labels = np.full((2, 3), label, np.int32)
    model = SimpleNamespace(predict=lambda path: Prediction({}, labels=labels))
    results.predict(model, 'a.jpg', {ending: tmp_path / ending for ending in ('json', 'labels.png')}, None, None)
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / 'labels.png')), labels)


def test_the_folder_of_the_images_is_not_that_of_the_results(folder, tmp_path, capsys):
    assert main(['predict', *write_file(tmp_path / 'model.onnx'), str(folder), '--out', f'{folder}/../photos']) == 2
    assert 'the folder of the images; choose another one' in capsys.readouterr().err
