"""`swin-dense eval`: the accuracy of a classifier on a folder of images."""

import json
import shutil
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from swin_dense import SwinClassifier, save_adapter
from swin_dense.__main__ import main
from swin_dense.analysis.accuracy import read_square
from swin_dense.models.classifier import create_classifier
from tests.conftest import TINY, needs, photograph, randomize

CLASSES = ('n01', 'n02', 'n03', 'n04', 'n05', 'n06', 'n10')


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """Images in seven classes, of several shapes, in a folder with a space in its name."""
    root = tmp_path_factory.mktemp('image net') / 'val set'
    generator = np.random.default_rng(0)
    for name in CLASSES:
        (root / name).mkdir(parents=True)
        for index, shape in enumerate([(80, 100, 3), (120, 70, 3), (75, 75)]):
            pixels = generator.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f'{index}.png')
    return root


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    classifier = randomize(SwinClassifier(TINY, len(CLASSES), window_size=2), 1)
    path = tmp_path_factory.mktemp('weights') / 'swin.pth'
    state = {name.removeprefix('backbone.').replace('norm3', 'norm'): x for name, x in classifier.state_dict().items()}
    torch.save({'model': state}, path)
    return path


def evaluate(folder, checkpoint, capsys, *options):
    status = main(['eval', str(folder), '--checkpoint', str(checkpoint), '--size', '64', '--workers', '0', *options])
    return status, capsys.readouterr()


@needs('tqdm')
@pytest.mark.parametrize('kind', [None, 'mona', 'lora'])
def test_accuracy_equals_a_count_by_hand(folder, checkpoint, tmp_path, capsys, kind):
    """Also with an adapter, and the head that belongs to it."""
    classifier, options = create_classifier(checkpoint), []
    if kind:
        base = classifier.backbone.state_dict()
        classifier = randomize(SwinClassifier(TINY, len(CLASSES), window_size=2, adapter={'type': kind}), 2).eval()
        own = classifier.backbone.state_dict()
        classifier.backbone.load_state_dict({**own, **base})
        save_adapter(classifier, tmp_path / 'adapter.pth')
        options = ['--adapter-checkpoint', str(tmp_path / 'adapter.pth')]
    correct = {1: 0, 5: 0}
    for label, name in enumerate(CLASSES):
        for path in (folder / name).iterdir():
            with torch.no_grad():
                scores = classifier(read_square(path, 64, True)[None])[0]
            better = int((scores > scores[label]).sum())
            correct = {k: count + (better < k) for k, count in correct.items()}
    status, output = evaluate(folder, checkpoint, capsys, '--json', *options)
    result = json.loads(output.out)
    assert status == 0
    assert result['images'] == 21
    assert 0 < correct[1] < correct[5] < 21
    assert [result['top1'], result['top5']] == pytest.approx([100 * correct[1] / 21, 100 * correct[5] / 21])


@needs('tqdm')
def test_a_signal_stops_after_the_batch_and_reports_the_scores_so_far(folder, checkpoint, capsys, monkeypatch):
    def read_and_signal(path, *options):
        if str(path).endswith('n03/1.png'):
            signal.raise_signal(signal.SIGTERM)
        return read_square(path, *options)

    monkeypatch.setattr('swin_dense.analysis.accuracy.read_square', read_and_signal)
    status, output = evaluate(folder, checkpoint, capsys, '--json', '--batch-size', '4')
    assert status == 128 + signal.SIGTERM
    assert json.loads(output.out)['images'] == 8


@pytest.mark.parametrize('form', ['16-bit grey png', '16-bit colour tiff', 'float tiff'])
@pytest.mark.parametrize('crop', [True, False])
def test_images_of_more_than_8_bits_keep_their_values(tmp_path, form, crop):
    """They equal the same picture in 8 bits, up to its rounding."""
    tifffile = pytest.importorskip('tifffile')
    grey = photograph(80, 100)[:, :, 1]
    pixels = photograph(80, 100) if 'colour' in form else np.stack([grey] * 3, 2)
    Image.fromarray(pixels).save(tmp_path / 'eight.png')
    path = tmp_path / f'deep.{form[-4:].strip()}'
    if form == '16-bit grey png':
        Image.fromarray(grey.astype(np.uint16) * 257).save(path)
    elif form == '16-bit colour tiff':
        tifffile.imwrite(path, pixels.astype(np.uint16) * 257, photometric='rgb')
    else:
        tifffile.imwrite(path, grey / np.float32(255))
    expected, found = (read_square(one, 64, crop) for one in (tmp_path / 'eight.png', path))
    assert (found - expected).abs().mean() < 0.02
    assert (found - expected).abs().max() < 0.06


@needs('tqdm')
def test_names_of_classes_may_contain_spaces(folder, checkpoint, capsys, tmp_path):
    for name in CLASSES:
        shutil.copytree(folder / name, tmp_path / 'val' / f'{name} traffic light')
    (tmp_path / 'classes.txt').write_text('\r\n'.join(f'{name} traffic light' for name in CLASSES))
    status, output = evaluate(tmp_path / 'val', checkpoint, capsys, '--classes', str(tmp_path / 'classes.txt'))
    assert (status, output.err) == (0, '')


def test_the_exif_orientation_is_ignored_as_published(tmp_path):
    pixels = np.zeros((300, 400, 3), np.uint8)
    pixels[:, 200:] = 255
    exif = Image.Exif()
    exif[274] = 6  # to be shown rotated clockwise, with the right half at the bottom
    Image.fromarray(pixels).save(tmp_path / 'a.png')
    Image.fromarray(pixels).save(tmp_path / 'b.png', exif=exif)
    assert torch.equal(read_square(tmp_path / 'a.png', 224, True), read_square(tmp_path / 'b.png', 224, True))


@needs('tqdm')
def test_folders_of_some_classes_need_a_list(folder, checkpoint, capsys, tmp_path):
    for name in CLASSES[1:]:
        (tmp_path / 'some' / name).mkdir(parents=True)
    shutil.copy(folder / 'n02/0.png', tmp_path / 'some/n02')
    status, output = evaluate(tmp_path / 'some', checkpoint, capsys)
    assert status == 2
    assert 'has 6 folders, but the classifier has 7 classes' in output.err
    (tmp_path / 'classes.txt').write_text('\n'.join(CLASSES))
    status, _ = evaluate(tmp_path / 'some', checkpoint, capsys, '--classes', str(tmp_path / 'classes.txt'))
    assert status == 0


def test_the_crop_is_the_centre_of_the_resized_image(tmp_path):
    """The left half of the image is black, and so is the left half of its centre crop."""
    pixels = np.zeros((300, 400, 3), np.uint8)
    pixels[:, 200:] = 255
    Image.fromarray(pixels).save(tmp_path / 'a.png')
    crop = read_square(tmp_path / 'a.png', 224, True)
    assert crop.shape == (3, 224, 224)
    torch.testing.assert_close(crop[:, 5, 5], torch.tensor([-2.1179, -2.0357, -1.8044]), atol=1e-3, rtol=0)
    torch.testing.assert_close(crop[:, 5, 220], torch.tensor([2.2489, 2.4286, 2.6400]), atol=1e-3, rtol=0)


def test_a_whole_image_keeps_its_edges(tmp_path):
    pixels = np.zeros((300, 400, 3), np.uint8)
    pixels[:, :8] = 255  # the centre crop of 384 from a width of 584 excludes them
    Image.fromarray(pixels).save(tmp_path / 'a.png')
    assert read_square(tmp_path / 'a.png', 384, False)[0, 200, 2] > 2
    assert read_square(tmp_path / 'a.png', 384, True)[0, 200, 2] < -2


@needs('tqdm')
@pytest.mark.parametrize(('size', 'crop'), [(64, True), (352, True), (384, False), (416, False)])
def test_images_are_cropped_below_size_384_as_published(size, crop, folder, checkpoint, capsys, monkeypatch, tmp_path):
    seen = set()
    monkeypatch.setattr(
        'swin_dense.analysis.accuracy.read_square', lambda path, *args: seen.add(args[:2]) or read_square(path, *args)
    )
    for name in CLASSES:
        (tmp_path / name).mkdir()
    shutil.copy(folder / 'n01/0.png', tmp_path / 'n01')
    evaluate(tmp_path, checkpoint, capsys, '--size', str(size))
    assert seen == {(size, crop)}
