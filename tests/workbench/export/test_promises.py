"""What the pages promise of exported files: each promise, for each kind of model, in each form of its file.

The files are those that ``export`` writes. docs/serving.md has the promises.
"""

import functools
import json
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

from swin_dense import export_model, runtime
from swin_dense.commands._main import main
from swin_dense.export import verify
from swin_dense.workbench.export import agreement, whole
from swin_dense.workbench.predict import Predictor
from swin_dense.workbench.runtime import pictures
from tests.conftest import ROOT
from tests.examples import load_example
from tests.export.test_export import SHAPES, Pooled, assert_right, build
from tests.processes import python

KINDS = {
    'boxes': 'retinanet on resnet',
    'masks': 'mask_rcnn on swin',
    'queries': 'mask2former_panoptic on resnet',
    'segmentor': 'untrained upernet on swin',
}
FORMS = ('onnxruntime', 'openvino', 'openvino xml')
THREADS = 4
pytestmark = pytest.mark.slow


class Served:
    """A kind of model in a form of its file."""

    def __init__(self, kind, form, exported, converted, pixels):
        self.config, self.weights, path = exported(KINDS[kind])
        self.is_segmentor = kind == 'segmentor'
        self.runtime, _, is_xml = form.partition(' ')
        self.path = converted(KINDS[kind]) if is_xml else path
        self.pixels = pixels

    @functools.cached_property
    def model(self):
        return runtime.load(self.path, runtime=self.runtime, threads=1, score=0.05)

    def images(self):
        """Return inputs of two sizes, of two images each, whose predictions differ."""
        found = []
        for size in ((96, 130), (128, 96)):
            for shown in (self.pixels, self.pixels[::-1, ::-1]):
                found.append(whole._image(pictures.resized(shown, *size)))
        return found


def kinds_in_forms():
    """Return each kind in each form; a converted file goes through the same code as one that OpenVINO reads itself."""
    for kind in KINDS:
        for form in FORMS:
            is_repeated = form == 'openvino xml' and kind != 'masks'
            yield pytest.param((kind, form), marks=[pytest.mark.long] if is_repeated else [])


@pytest.fixture(params=kinds_in_forms(), ids=' in '.join, scope='module')
def served(request, exported, converted, pixels):
    return Served(*request.param, exported, converted, pixels)


def assert_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_predictions_are_those_of_the_framework_at_other_sizes_and_batches(served):
    """Near ties decide a few predictions, as in the check of ``export``."""
    predictor, facts = Predictor(served.config, str(served.weights), 'cpu'), {}
    plan = whole.planned_segmentor if served.is_segmentor else whole.planned_detector
    *_, compare = plan(predictor.model, facts)
    model, count = served.model, 0

    def run(feed):
        size = feed.get('size')
        return model.run(feed['img'], None if size is None else size.tolist())

    for size in ((97, 65), (64, 160), (231, 350)):
        image = pictures.resized(served.pixels, *size)
        share, compared = whole.compared(compare, run, image)
        assert share <= agreement.LARGEST_SHARE, size
        count += compared
    assert count > 5


def test_threads_share_a_model(served):
    """Each gets the predictions of its own image, whose array stays as it was, and earlier results do too."""
    model, images = served.model, served.images()
    given = [image.copy() for image in images]
    alone = [model.run(image) for image in images]
    kept = [[array.copy() for array in outputs] for outputs in alone]
    shown = [outputs[-1] for outputs in alone]
    assert len({(array.shape, array.tobytes()) for array in shown}) == len(images)
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(model.run, 6 * images))
    for outputs, expected in zip(found, 6 * kept, strict=True):
        assert_equal(outputs, expected)
    assert_equal(images, given)
    for outputs, expected in zip(alone, kept, strict=True):
        assert_equal(outputs, expected)


@pytest.mark.parametrize(
    ('shape', 'dtype', 'error', 'message'),
    [
        ((1, 3, 64, 64), 'float64', TypeError, 'img must be an array of float32, got float64'),
        ((1, 3, 64, 64), 'uint8', TypeError, 'img must be an array of float32, got uint8'),
        ((3, 64, 64), 'float32', ValueError, r'img must have the shape \(., 3, H, W\), got \(3, 64, 64\)'),
        ((1, 4, 64, 64), 'float32', ValueError, r'img must have the shape \(., 3, H, W\), got \(1, 4, 64, 64\)'),
        ((1, 3, 0, 64), 'float32', ValueError, r'img must have the shape \(., 3, H, W\), got \(1, 3, 0, 64\)'),
        ((2, 3, 64, 64), 'float32', ValueError, r'img must have the shape \(1, 3, H, W\), got \(2, 3, 64, 64\)'),
    ],
)
def test_a_wrong_input_is_one_clear_error(served, shape, dtype, error, message):
    model, image = served.model, np.zeros(shape, dtype)
    if served.is_segmentor and shape[0] == 2:  # which takes any batch
        (labels,) = model.run(image)
        assert labels.shape == (2, 64, 64)
        return
    with pytest.raises(error, match=f'^{message}$'):
        model.run(image)


def test_processes_and_memory_without_torch(served, tmp_path):
    images = tmp_path / 'images.npz'
    largest = whole._image(pictures.resized(served.pixels, 128, 160))
    np.savez(images, served.images()[0], largest)
    python(Path(__file__).with_name('serving.py'), served.path, served.runtime, images)


# Runs the command, and receives a signal while it predicts the second image.
STOPPED = """
import signal, sys
from swin_dense import runtime
from swin_dense.commands._main import main
predict, seen = runtime.Model.predict, []
def stopped(self, *arguments, **options):
    seen.append(arguments)
    if len(seen) == 2:
        signal.raise_signal(signal.SIGTERM)
    return predict(self, *arguments, **options)
runtime.Model.predict = stopped
sys.exit(main(sys.argv[1:]))
"""


def test_the_command(served, tmp_path, capfd):
    """A signal leaves complete results, which a second run completes; an unreadable image and a wrong option are told.

    Nothing is written outside of --out.
    """
    outside = [tmp_path / name for name in ('home', 'temporary', 'work')]
    photos = tmp_path / 'photos'
    for folder in (*outside, photos):
        folder.mkdir()
    for name, size in (('a', (96, 130)), ('b', (128, 96)), ('c', (64, 64))):
        rgb = pictures.resized(served.pixels, *size)[:, :, ::-1]
        Image.fromarray(rgb).save(photos / f'{name}.png')
    (photos / 'no image.jpg').write_text('no image')
    out = tmp_path / 'out'
    command = ['predict', served.path, photos, '--runtime', served.runtime, '--score', '0.05', '--out', out]
    command += ['--threads', '1']
    variables = {'HOME': str(outside[0]), 'TMPDIR': str(outside[1])}
    python('-c', STOPPED, *command, status=128 + signal.SIGTERM, cwd=outside[2], **variables)
    assert [path for folder in outside for path in folder.rglob('*')] == []
    assert sorted(path.name for path in out.glob('*.json')) == ['a.json', 'b.json']
    before = (out / 'a.json').stat().st_mtime_ns
    capfd.readouterr()
    assert main([*map(str, command), '--resume']) == 1
    printed = capfd.readouterr()
    assert f'3 of 4 images are in {out}' in printed.out
    assert [line for line in printed.err.splitlines() if 'no image.jpg' in line] == printed.err.splitlines()[-1:]
    assert (out / 'a.json').stat().st_mtime_ns == before
    assert main([*map(str, command), '--resume', '--threads', '-1']) == 2
    assert '--threads must be at least 0, got -1' in capfd.readouterr().err

    counted = 0
    for name in 'abc':
        record = json.loads((out / f'{name}.json').read_text())
        assert record == served.model(str(photos / f'{name}.png'))
        assert record.keys() <= KEYS
        for part in ('instances', 'segments'):
            for found in record.get(part, []):
                assert found.keys() <= set(PARTS[part])
                counted += 1
    assert counted > 3


def test_a_file_of_another_form_or_with_other_weights_is_refused(exported, converted, pixels, tmp_path, capsys):
    openvino = pytest.importorskip('openvino')
    *_, path = exported(KINDS['segmentor'])
    folded = tmp_path / 'folded.xml'
    openvino.save_model(openvino.convert_model(path), folded)
    with pytest.raises(ValueError, match=r'folded\.xml has lost the optional input `size` of a segmentor.*read_model'):
        runtime.load(folded)
    for suffix in ('.xml', '.bin'):
        shutil.copy(converted(KINDS['segmentor']).with_suffix(suffix), tmp_path / f'model{suffix}')
    with pytest.raises(ValueError, match=r'model\.xml is a file of OpenVINO, which onnxruntime does not read; leave'):
        runtime.load(tmp_path / 'model.xml', runtime='onnxruntime')
    Image.fromarray(pixels[:64, :64, ::-1]).save(tmp_path / 'a.png')
    model, image, out = (str(tmp_path / name) for name in ('model.xml', 'a.png', 'out'))
    command = ['predict', model, image, '--out', out]
    assert main(command) == 0
    assert main([*command, '--resume']) == 0
    with (tmp_path / 'model.bin').open('ab') as weights:
        weights.write(b'other')
    assert main([*command, '--resume']) == 2
    assert 'was predicted with other settings (model ' in capsys.readouterr().err


@pytest.mark.parametrize('name', ['onnxruntime', 'openvino'])
def test_a_file_for_one_size(exported, tmp_path, monkeypatch, name):
    """The lines of docs/files.md for TensorRT fix the height and the width."""
    page = (ROOT / 'docs' / 'files.md').read_text()
    lines = re.findall(r'^python -m (onnxruntime\.tools\.make_dynamic_shape_fixed .*)', page, re.M)
    shutil.copy(exported(KINDS['boxes'])[2], tmp_path / 'model.onnx')
    for line, named in zip(lines, ('64xany', '64x96'), strict=True):
        words = line.replace(' 800 ', ' 64 ').replace(' 1344 ', ' 96 ').split()
        python('-m', *words, cwd=tmp_path)
        model = runtime.load(tmp_path / words[-1], runtime=name)
        boxes, *_ = model.run(np.zeros((1, 3, 64, 96), np.float32))
        assert boxes.shape[1:] == (4,)
        with pytest.raises(ValueError, match=f'inputs of {named} pixels, got 60x90; resize'):
            model.run(np.zeros((1, 3, 60, 90), np.float32))


@pytest.mark.parametrize('kind', ['boxes', 'segmentor'])
def test_the_server_of_the_page(exported, pixels, tmp_path, monkeypatch, kind):
    """Its threads answer requests with the bytes of an image at the same time."""
    shutil.copy(exported(KINDS[kind])[2], tmp_path / 'model.onnx')
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code_on_the_page('ThreadingHTTPServer').replace('8000', '0'), names)
    names['Handler'].log_message = lambda *arguments: None
    bodies = []
    for size in ((96, 130), (128, 96), (64, 64)):
        _, body = cv2.imencode('.png', pictures.resized(pixels, *size))
        bodies.append(body.tobytes())
    with names['server'] as server, ThreadPoolExecutor(THREADS + 1) as pool:
        pool.submit(server.serve_forever)
        answers = [*pool.map(functools.partial(answer_of, server), 3 * [*bodies, b'no image'])]
        server.shutdown()
    expected = [(200, names['model'](body)) for body in bodies]
    error = 'image of 8 bytes: the content is not an image of a supported format'
    assert answers == 3 * [*expected, (400, {'error': error})]


def answer_of(server, body):
    connection = HTTPConnection(*server.server_address, timeout=60)
    connection.request('POST', '/', body)
    response = connection.getresponse()
    return response.status, json.load(response)


def code_on_the_page(word):
    """Return the block of Python in docs/serving.md that contains a word."""
    blocks = re.findall(r'^```python\n(.*?)^```', (ROOT / 'docs' / 'serving.md').read_text(), re.S | re.M)
    (found,) = (block for block in blocks if word in block)
    return found


def run_by_openvino(path):
    """Return a function that runs a file by the lines of docs/serving.md."""
    names = {'path': path}
    exec(code_on_the_page('create_infer_request').replace("'model.onnx'", 'path'), names)
    return lambda feed: names['run'](feed['img'])


BACKBONES = {
    'onnxruntime': ('.onnx', verify.load),
    'openvino': ('.onnx', run_by_openvino),
    'torch.export': ('.pt2', verify.load),
    'TorchScript': ('.ts', verify.load),
}


@pytest.fixture(scope='module')
def backbone():
    """Return a backbone of unusual options, and adaptive pools behind it."""
    return Pooled(build(window_size=(5, 7), use_abs_pos_embed=True, pretrain_img_size=40, out_indices=(1,)))


@pytest.fixture(params=BACKBONES, scope='module')
def run_backbone(request, backbone, shared_folder):
    suffix, load = BACKBONES[request.param]
    path = shared_folder / f'back bone{suffix}'
    with FileLock(f'{path}.lock'):
        if not path.exists():
            assert len(export_model(backbone, path, size=(75, 100)).errors) == 3
    return load(path)


def test_a_backbone_equals_its_model_at_other_sizes_and_batches(run_backbone, backbone):
    assert_right(run_backbone, backbone, SHAPES[::3])


def test_threads_share_a_backbone(run_backbone):
    random = np.random.default_rng(0)
    images = [random.normal(size=(1, 3, *size)).astype(np.float32) for size in ((40, 56), (40, 56), (64, 33))]
    given = [image.copy() for image in images]
    alone = [run_backbone({'img': image}) for image in images]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda image: run_backbone({'img': image}), 10 * images))
    for outputs, expected in zip(found, 10 * alone, strict=True):
        assert_equal(outputs, expected)
    assert_equal(images, given)


def test_the_example_scores_a_file_as_mmseg_does(exported, demo_data, capsys, monkeypatch):
    from mmengine.registry import DATASETS, init_default_scope
    from mmseg.evaluation import IoUMetric

    config, _, path = exported(KINDS['segmentor'])
    root = demo_data / 'ADEChallengeData2016'
    images, masks = (root / kind / 'validation' for kind in ('images', 'annotations'))
    monkeypatch.setattr('sys.argv', ['evaluate_file.py', *map(str, (path, images, masks))])
    capsys.readouterr()
    load_example('evaluate_file').main()
    lines = capsys.readouterr().out.splitlines()
    init_default_scope('mmseg')
    load = config.test_dataloader.dataset.pipeline[0]
    data = DATASETS.build({**config.test_dataloader.dataset, 'pipeline': [load, {'type': 'LoadAnnotations'}]})
    model = runtime.load(path, score=0)
    counted = []
    for sample in data:
        found = model.predict(sample['img_path']).labels
        pair = [torch.from_numpy(np.asarray(labels, np.int64)) for labels in (found, sample['gt_seg_map'])]
        counted.append(IoUMetric.intersect_and_union(*pair, len(model.classes), 255))
    both, either, *_ = (sum(areas) for areas in zip(*counted, strict=True))
    expected = (both / either).tolist()
    assert lines[0] == f'mIoU {np.nanmean(expected):.4f}'
    assert lines[1:] == [f'  {name}: {score:.4f}' for name, score in zip(model.classes, expected, strict=True)]


def keys_on_the_page():
    """Return the keys of a record on the page, and those of the parts of its lists."""
    (row,) = re.findall(r'^\| `PHOTO\.json` .*', (ROOT / 'docs' / 'reference.md').read_text(), re.M)
    listed = row.partition('not renamed: ')[2]
    parts = {name: re.findall(r'`(\w+)`', keys) for name, keys in re.findall(r'`(\w+)` \(([^)]*)\)', listed)}
    return set(re.findall(r'`(\w+)`', re.sub(r'\([^)]*\)', '', listed))), parts


KEYS, PARTS = keys_on_the_page()


def test_the_page_has_the_keys_of_records():
    assert {'format', 'image', 'height', 'width', 'instances', 'segments'} == KEYS
    assert {'label', 'score', 'box', 'mask', 'class'} == set(PARTS['instances'])
