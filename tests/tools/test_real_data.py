"""benchmarks/real_data.py on a few drawn images in the layouts of the public repositories."""

import json
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from benchmarks import bench_photographs as photographs
from tests.conftest import ROOT

VOC = """<annotation><object><name>{name}</name><bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin><xmax>{box[2]}</xmax>
<ymax>{box[3]}</ymax></bndbox></object></annotation>"""


def make_nuclei(folder, images=10):
    """Write images of 64 x 96 pixels (height x width), each with two squares, as a folder of masks for each image."""
    for number in range(images):
        one = folder / 'stage1_train' / f'{number:02}'
        pixels = np.full((64, 96, 4), 255, np.uint8)
        pixels[..., :3] = 20
        for name in ('images', 'masks'):
            (one / name).mkdir(parents=True)
        for index, left in enumerate((8 + number, 60)):
            mask = np.zeros((64, 96), np.uint8)
            mask[20 : 36 + number, left : left + 16] = 255
            pixels[mask > 0, :3] = 200
            Image.fromarray(mask).save(one / 'masks' / f'{index}.png')
        Image.fromarray(pixels).save(one / 'images' / f'{number:02}.png')


def make_blood_cells(folder):
    """Write two images of 96 x 64 pixels with an object each, and the repository's lists."""
    for name in ('JPEGImages', 'Annotations', 'ImageSets/Main'):
        (folder / 'BCCD' / name).mkdir(parents=True)
    for part, name, box in (('trainval', 'WBC', (10, 20, 40, 60)), ('test', 'RBC', (30, 8, 70, 32))):
        Image.new('RGB', (96, 64)).save(folder / 'BCCD' / 'JPEGImages' / f'{part}.jpg')
        flat = VOC.format(name='Platelets', box=(5, 5, 9, 5))
        objects = VOC.format(name=name, box=box).replace('</annotation>', flat.removeprefix('<annotation>'))
        (folder / 'BCCD' / 'Annotations' / f'{part}.xml').write_text(objects)
        (folder / 'BCCD' / 'ImageSets' / 'Main' / f'{part}.txt').write_text(part)


def test_boxes_shrink_with_their_image_and_those_without_an_area_are_left_out(tmp_path):
    make_blood_cells(tmp_path)
    photographs.convert('blood-cells', tmp_path, tmp_path / 'data', 48)
    truth = json.loads((tmp_path / 'data' / 'val.json').read_text())
    assert [(one['width'], one['height']) for one in truth['images']] == [(48, 32)]
    assert [(one['category_id'], one['bbox'], one['area']) for one in truth['annotations']] == [
        (1, [15, 4, 20, 12], 240)
    ]
    assert Image.open(tmp_path / 'data' / 'train' / 'trainval.png').size == (48, 32)


def test_masks_are_cut_with_their_image_and_a_perfect_result_scores_one(tmp_path):
    make_nuclei(tmp_path)
    for dataset in ('nuclei', 'nuclei-pixels'):
        photographs.convert(dataset, tmp_path, tmp_path / dataset, 48)
    data = tmp_path / 'nuclei'
    truth = json.loads((data / 'val.json').read_text())
    assert [one['file_name'] for one in truth['images']] == ['00.png', '05.png']
    # The centre of 96 x 64 begins at (24, 8): the first square begins left of it, and the second ends right of it.
    assert [one['bbox'] for one in truth['annotations']] == [
        [36, 12, 12, 16], [0, 12, 5, 21], [36, 12, 12, 21],
    ]  # fmt: skip
    found = [{**one, 'score': 0.9} for one in truth['annotations']]
    scores = photographs.average_precision(data, {'bbox': found[:2], 'segm': found})
    assert scores['mask'] == {
        'AP': pytest.approx(1),
        'AP50': pytest.approx(1),
        'AP of classes': {'nucleus': pytest.approx(1)},
    }
    assert scores['box']['AP'] == pytest.approx(67 / 101)  # two of three found: precision 1 at 67 of 101 recalls

    data = tmp_path / 'nuclei-pixels'
    true = {path.stem: np.asarray(Image.open(path)) for path in (data / 'val_masks').iterdir()}
    assert {name: int(mask.sum()) for name, mask in true.items()} == {'00': 12 * 16, '05': 17 * 21}
    names = photographs.classes_of('nuclei-pixels')
    assert photographs.mean_iou(data, true.__getitem__, names)['mIoU'] == 1
    nothing = photographs.mean_iou(data, lambda name: true[name] * 0, names)
    assert nothing['IoU of classes'] == {'background': pytest.approx(1 - (192 + 357) / (2 * 48 * 48)), 'nucleus': 0}


@pytest.mark.long
def test_both_backbones_take_the_same_first_step_and_a_file_scores_as_its_framework(tmp_path):
    make_nuclei(tmp_path)
    results = tmp_path / 'results.json'
    command = [sys.executable, ROOT / 'benchmarks' / 'real_data.py', 'nuclei-pixels', tmp_path, '--seed', '3']
    command += ['--steps', '2', '--json', results, '--work-dir', tmp_path / 'work']
    subprocess.run([*command, '--parts', 'train'], check=True, cwd=tmp_path)
    subprocess.run([*command, '--parts', 'file', '--backbone', 'SwinTransformer'], check=True, cwd=tmp_path)
    ours, original = json.loads(results.read_text())['runs']
    assert (ours['backbone'], original['backbone']) == ('SwinDense', 'SwinTransformer')
    assert len(ours['losses']) == 2
    for name, loss in original['losses'][0].items():
        assert ours['losses'][0][name] == pytest.approx(loss, rel=1e-5)
    assert ours['scores']['framework']['mIoU'] == pytest.approx(original['scores']['framework']['mIoU'], abs=0.02)
    assert original['scores']['file']['mIoU'] == pytest.approx(original['scores']['framework']['mIoU'], abs=1e-3)
    assert 'file' not in ours['scores']
