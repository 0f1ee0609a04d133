"""One bad image ends no folder: it is named with its error, the others have their results, and a second run goes on."""

import logging
import os
import signal

import numpy as np
import onnxruntime
import pytest
import tifffile
import torch
from PIL import Image

from swin_dense.commands._main import main
from swin_dense.workbench.predict import Predictor
from swin_dense.workbench.runtime import Model, Prediction
from swin_dense.workbench.runtime.folder import ResultFolder
from tests.commands.files import write_file
from tests.commands.test_predict import RECIPES, make_weights, names_in
from tests.processes import cli

SIZES = [(60, 90), (64, 64), (48, 70)]
GOOD = [f'{folder}/{number}' for folder in 'ab' for number in range(3)] + ['deep', 'photo']
TOO_LARGE = (31, 37)  # of the image for which memory is short
BAD = ['broken', 'empty', 'float', 'gone', 'large', 'text', 'truncated']
# OpenCV does not read TGA, and mmcv reads what is left of a damaged TIFF.
BAD_OF = {'onnx': [*BAD, 'photo'], **{key: [*BAD[1:], 'photo'] for key in ('mmseg', 'mmdet')}}


@pytest.fixture
def folder(tmp_path):
    """Good images in two subfolders, with the same names in both, and bad ones of several kinds."""
    random = np.random.default_rng(0)
    root = tmp_path / 'photos'
    for name in GOOD:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(
            0,
            255,
            (*SIZES[len(name) % 3], 3),
            np.uint8,
        )
        Image.fromarray(pixels).save(root / f'{name}.png')
    Image.fromarray(random.integers(0, 65535, (40, 50), np.uint16)).save(root / 'deep.png')
    (root / 'photo.png').rename(root / 'photo.tga')  # which OpenCV does not decode
    Image.fromarray(pixels).save(root / 'photo.tga')
    height, width = TOO_LARGE
    Image.fromarray(pixels[:height, :width]).save(root / 'large.png')
    Image.fromarray(pixels).save(root / 'truncated.jpg')
    os.truncate(root / 'truncated.jpg', 500)
    tifffile.imwrite(root / 'broken.tif', pixels, compression='zlib', photometric='rgb')
    with open(root / 'broken.tif', 'r+b') as file:
        file.seek(-900, os.SEEK_END)
        file.write(bytes(800))
    tifffile.imwrite(
        root / 'float.tif',
        np.full(
            (30, 30),
            1000,
            np.float32,
        ),
    )
    (root / 'empty.jpg').write_bytes(b'')
    (root / 'text.png').write_text('no image')
    (root / 'gone.png').symlink_to(root / 'nowhere.png')
    return root


def model_of(kind, tmp_path, monkeypatch):
    """Return the first arguments of `predict`; the model lacks memory for images of the size TOO_LARGE."""
    run, outputs = Model.run, Predictor.outputs

    def run_small(self, img, size=None):
        if img.shape[2:] == TOO_LARGE:
            raise onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException('Failed to allocate memory for 9 bytes')
        return run(self, img, size)

    def outputs_of_small(self, loaded, path, clock):
        if loaded.shape[:2] == TOO_LARGE:
            raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 9 GiB')
        return outputs(self, loaded, path, clock)

    if kind == 'onnx':
        monkeypatch.setattr(Model, 'run', run_small)
        return write_file(tmp_path / 'model.onnx')
    monkeypatch.setattr(Predictor, 'outputs', outputs_of_small)
    make_weights(kind, tmp_path / 'weights.pth')
    return [RECIPES[kind], str(tmp_path / 'weights.pth')]


def records_in(out):
    return [name for name in names_in(out) if name.endswith('.json')]


def times_in(out):
    return {name: (out / name).stat().st_mtime_ns for name in names_in(out)}


@pytest.mark.parametrize('kind', ['onnx', 'mmseg', 'mmdet'])
def test_predict_names_every_bad_image_and_goes_on(folder, tmp_path, monkeypatch, capsys, kind):
    monkeypatch.setattr(logging, 'raiseExceptions', False)  # handlers of the tests before write into closed files
    bad, out = BAD_OF[kind], folder / 'out'  # within the folder: what it contains is not predicted
    good = {*GOOD, *BAD} - {*bad}
    arguments = [
        'predict',
        *model_of(kind, tmp_path, monkeypatch),
        str(folder),
        '--out',
        str(out),
        '--resume',
    ]
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert f'{len(good)} of 15 images are in {out}' in printed.out
    assert 'Traceback' not in printed.err
    lines = [line for line in printed.err.splitlines() if line.startswith('swin-dense predict: ')]
    (note,) = [line for line in lines if line.startswith('swin-dense predict: note: ')]
    assert '/deep.png, have 16 bits' in note
    lines.remove(note)
    assert len(lines) == len(bad)
    for name in bad:
        assert sum(f'/{name}.' in line for line in lines) == 1, name
    assert sum('too little memory' in line for line in lines) == 1
    assert set(records_in(out)) == {f'{name}.json' for name in good}

    # The bad image that is mended is predicted, and nothing else.
    Image.new('RGB', (40, 50)).save(folder / 'text.png')
    before = times_in(out)
    assert main(arguments) == 1
    changed = {name for name, time in times_in(out).items() if time != before.get(name)}
    assert 'text.json' in changed
    assert all(name.startswith('text.') for name in changed)


def send_signal():
    """Let this process send itself SIGTERM while it predicts the second image."""
    predict = Predictor.predict

    def signalled(self, path, clock, paint):
        if path.endswith('a/1.png'):
            signal.raise_signal(signal.SIGTERM)
        return predict(self, path, clock, paint=paint)

    Predictor.predict = signalled


def test_a_signal_ends_after_an_image(folder, tmp_path):
    """In a process of its own, because a signal that is not caught would end the process of the tests."""
    make_weights('mmdet', tmp_path / 'weights.pth')
    out = tmp_path / 'out'
    arguments = ['predict', RECIPES['mmdet'], tmp_path / 'weights.pth', folder, '--out', out]
    stopped = cli(*arguments, check=False, first=send_signal)
    assert stopped.returncode == 128 + signal.SIGTERM, stopped.stderr
    assert 'stopping after the image at hand; a second signal stops at once' in stopped.stderr
    assert records_in(out) == ['a/0.json', 'a/1.json']
    resumed = cli(*arguments, '--resume', check=False)
    assert resumed.returncode == 1, resumed.stderr
    good = {*GOOD, *BAD} - {*BAD_OF['mmdet']}
    assert set(records_in(out)) == {f'{name}.json' for name in [*good, 'large']}  # for which memory suffices here


def test_pixels_of_no_segment_are_0_in_the_file_for_coco(tmp_path):
    """Inside, they have the number of the class that there is not, which would be an id of COCO's."""
    ids = np.array([[1002, 1002, 80], [3, 2002, 80]], np.int32)
    record = {'segments': [{'id': number} for number in (1002, 3, 2002)]}
    ResultFolder(tmp_path).write('a.jpg', 'a', Prediction(record, panoptic=ids))
    assert names_in(tmp_path) == ['a.json', 'a.panoptic.png']
    colours = np.asarray(Image.open(tmp_path / 'a.panoptic.png')).astype(int)
    np.testing.assert_array_equal(colours @ [1, 256, 256**2], [[1002, 1002, 0], [3, 2002, 0]])


@pytest.mark.parametrize('label', [255, 259])
def test_classes_are_stored_in_as_many_bits_as_they_need(tmp_path, label):
    labels = np.full((2, 3), label, np.int32)
    ResultFolder(tmp_path).write('a.jpg', 'a', Prediction({}, labels=labels))
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / 'a.labels.png')), labels)
