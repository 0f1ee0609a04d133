"""docs/from-photographs-to-a-file.md, followed literally: its ten commands, in order, in two new environments."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import skimage.data
from PIL import Image, ImageDraw

from swin_dense.commands._main import main
from tests.conftest import ROOT, needs
from tests.processes import completed

PAGE = (ROOT / 'docs' / 'from-photographs-to-a-file.md').read_text()
CLASSES = ('apple', 'pear')
COLOURS = ((210, 30, 40), (120, 190, 40))
HEIGHT, WIDTH, IMAGES = 128, 160, 60
# A Swin that a CPU trains in minutes, on images of the size of the data: the only change of the page's commands.
SMALL = (
    '--set model.backbone.init_cfg=None model.backbone.frozen_stages=-1 model.backbone.embed_dims=32 '
    'model.backbone.depths=2,2,2,2 model.backbone.num_heads=1,2,4,8 model.neck.in_channels=32,64,128,256 '
    'train_dataloader.dataset.pipeline.2.scale="(160,128)" val_dataloader.dataset.pipeline.1.scale="(160,128)" '
    'test_dataloader.dataset.pipeline.1.scale="(160,128)" optim_wrapper.optimizer.lr=0.0005 '
    'model.roi_head.bbox_head.fc_out_channels=128 model.train_cfg.rcnn.sampler.num=64 '
    'model.train_cfg.rpn_proposal.nms_pre=300 model.train_cfg.rpn_proposal.max_per_img=200'
)


def commands(heading):
    (block,) = re.findall(rf'^## {heading}\n.*?^```shell\n(.*?)^```', PAGE, re.S | re.M)
    return block.splitlines()


def python_block(first_words):
    (block,) = re.findall(rf'^```py\n({re.escape(first_words)}.*?)^```', PAGE, re.S | re.M)
    return block


def make_photographs(folder):
    """Write photographs with an apple and a pear each, 1.jpg and so on; return their boxes: (x, y, width, height)."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    photographs = [
        skimage.data.astronaut(),
        skimage.data.coffee(),
        skimage.data.chelsea(),
    ]
    boxes = {}
    for number in range(1, IMAGES + 1):
        pixels = photographs[number % len(photographs)]
        top, left = (int(rng.integers(0, size)) for size in (pixels.shape[0] - HEIGHT, pixels.shape[1] - WIDTH))
        image = Image.fromarray(pixels[top : top + HEIGHT, left : left + WIDTH])
        draw = ImageDraw.Draw(image)
        boxes[f'{number}.jpg'] = [draw_fruit(draw, rng, label) for label in range(len(CLASSES))]
        image.save(folder / f'{number}.jpg')
    return boxes


def draw_fruit(draw, rng, label):
    """Draw an apple in the left half or a pear in the right half; return its box."""
    side = int(rng.integers(30, 50))
    x, y = int(rng.integers(0, WIDTH // 2 - side)) + label * WIDTH // 2, int(rng.integers(0, HEIGHT - side))
    corners = (x, y, x + side, y + side)
    if label == 0:
        draw.ellipse(corners, fill=COLOURS[label])
    else:
        draw.polygon([(x + side // 2, y), (x + side, y + side), (x, y + side)], fill=COLOURS[label])
    return x, y, side, side


def write_coco(path, boxes):
    images, annotations = [], []
    for number, (name, own) in enumerate(boxes.items(), start=1):
        images.append({'id': number, 'file_name': name, 'height': HEIGHT, 'width': WIDTH})
        for label, box in enumerate(own, start=1):
            place = {'bbox': list(box), 'area': box[2] * box[3], 'iscrowd': 0}
            annotations.append({'id': len(annotations) + 1, 'image_id': number, 'category_id': label, **place})
    categories = [{'id': label, 'name': name} for label, name in enumerate(CLASSES, start=1)]
    path.write_text(json.dumps({'images': images, 'annotations': annotations, 'categories': categories}))


def write_voc(folder, boxes):
    """Write a file for each image, in which the first pixel has the number 1."""
    folder.mkdir()
    for name, own in boxes.items():
        objects = ''
        for label, (x, y, width, height) in zip(CLASSES, own, strict=True):
            corners = f'<xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + width}</xmax><ymax>{y + height}</ymax>'
            objects += f'<object><name>{label}</name><bndbox>{corners}</bndbox></object>'
        text = f'<annotation><filename>{name}</filename>{objects}</annotation>'
        (folder / name.replace('.jpg', '.xml')).write_text(text)


def clone(folder):
    subprocess.run(['git', 'clone', '-q', str(ROOT), str(folder)], check=True)
    return folder


class Environment:
    def __init__(self, folder, place):
        subprocess.run([sys.executable, '-m', 'venv', str(folder)], check=True)
        self.place, self.environment = place, {**os.environ, 'PATH': f'{folder / "bin"}:{os.environ["PATH"]}'}
        for name in ('PYTHONPATH', 'TRITON_INTERPRET'):
            self.environment.pop(name, None)

    def run(self, command):
        done = completed(['bash', '-c', command], cwd=self.place, env=self.environment)
        return done.stdout + done.stderr


def test_there_are_ten_commands():
    assert len(commands('Where you train') + commands('Elsewhere')) == 10


@needs('supervision')
def test_a_file_of_pascal_voc_becomes_one_of_coco(tmp_path, monkeypatch):
    boxes = make_photographs(tmp_path / 'data' / 'fruit' / 'images')
    write_voc(tmp_path / 'data' / 'fruit' / 'xml', boxes)
    monkeypatch.chdir(tmp_path)
    exec(python_block('# needs supervision'), {})
    written = json.loads((tmp_path / 'data' / 'fruit' / 'annotations.json').read_text())
    names = {one['id']: one['name'] for one in written['categories']}
    files = {one['id']: one['file_name'] for one in written['images']}
    found = {(files[one['image_id']], names[one['category_id']]): one['bbox'] for one in written['annotations']}
    assert len(found) == 2 * len(boxes)
    for name, own in boxes.items():
        for label, box in enumerate(own):
            np.testing.assert_allclose(found[name, CLASSES[label]], box, atol=1)


@needs('supervision')
def test_labels_of_yolo_become_a_file_of_coco(tmp_path, monkeypatch):
    """The page's lines with from_yolo: a file per image of classes from 0 and boxes as shares; one has no object."""
    boxes = make_photographs(tmp_path / 'images')
    boxes['1.jpg'] = []
    (tmp_path / 'labels').mkdir()
    for name, own in boxes.items():
        shares = [
            (label, (x + width / 2) / WIDTH, (y + height / 2) / HEIGHT, width / WIDTH, height / HEIGHT)
            for label, (x, y, width, height) in enumerate(own)
        ]
        text = ''.join(f'{" ".join(map(str, line))}\n' for line in shares)
        (tmp_path / 'labels' / name.replace('.jpg', '.txt')).write_text(text)
    (tmp_path / 'data.yaml').write_text(f'names: [{", ".join(CLASSES)}]\n')
    import supervision

    monkeypatch.chdir(tmp_path)
    read = supervision.DetectionDataset.from_yolo('images', 'labels', 'data.yaml')
    read.as_coco(annotations_path='annotations.json')
    written = json.loads((tmp_path / 'annotations.json').read_text())
    files = {one['id']: one['file_name'] for one in written['images']}
    names = {one['id']: one['name'] for one in written['categories']}
    found = {(files[one['image_id']], names[one['category_id']]): one['bbox'] for one in written['annotations']}
    assert len(files) == IMAGES
    assert len(found) == 2 * (IMAGES - 1)
    for name, own in boxes.items():
        for label, box in enumerate(own):
            np.testing.assert_allclose(found[name, CLASSES[label]], box, atol=1)
    recipe = 'faster-rcnn_swin-t-p4-w7_fpn_small_coco'
    words = ['--data-root', '.', '--val-share', '0.2', '--classes', 'annotations.json']
    assert main(['config', recipe, '--out', 'mine.py', *words]) == 0


@pytest.mark.slow
@pytest.mark.long
def test_the_page_leads_to_a_detector_that_runs_without_torch(tmp_path):
    place = clone(tmp_path / 'clone')
    write_coco_of = make_photographs(place / 'data' / 'fruit' / 'images')
    write_coco(place / 'data' / 'fruit' / 'annotations.json', write_coco_of)
    training = Environment(tmp_path / 'training', place)
    said = {}
    for command in commands('Where you train'):
        if ' config ' in command:
            command = f'{command} {SMALL}'
        said[command.split()[1]] = training.run(command)
    assert 'bbox_mAP' in said['test']
    assert len(list((place / 'look').glob('*.painted.jpg'))) == IMAGES

    elsewhere = clone(tmp_path / 'elsewhere')
    shutil.copy(place / 'fruit.onnx', elsewhere)
    shutil.copytree(place / 'data' / 'fruit' / 'images', elsewhere / 'photos')
    without_torch = Environment(tmp_path / 'without_torch', elsewhere)
    for command in commands('Elsewhere'):
        last = without_torch.run(command)
    assert 'milliseconds' in last
    installed = without_torch.run('pip list --format freeze')
    assert not re.search(r'^(torch|mm\w+)==', installed, re.M)
    assert len(list((elsewhere / 'found').glob('*.painted.jpg'))) == IMAGES
    (elsewhere / 'run.py').write_text(python_block('# needs fruit.onnx'))
    found = without_torch.run('python run.py')
    assert {line.split()[0] for line in found.splitlines()} <= {*CLASSES}
