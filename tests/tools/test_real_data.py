"""benchmarks/real_data.py on a few drawn images in the layouts of the public repositories."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks import bench_photographs as photographs
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / 'tools'))
import photographs_table

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
    ours, original, control = json.loads(results.read_text())['runs']
    assert [run['backbone'] for run in (ours, original, control)] == ['SwinDense', 'SwinTransformer', 'control']
    assert len(ours['losses']) == 2
    for name, loss in original['losses'][0].items():
        assert ours['losses'][0][name] == pytest.approx(loss, rel=1e-5)
        assert control['losses'][0][name] == pytest.approx(loss, rel=1e-5)
    first, second = (
        torch.load(tmp_path / 'work' / f'nuclei-pixels-small-3-{name}' / 'initial.pth')['state_dict']
        for name in ('SwinTransformer', 'control')
    )
    changed = {name for name, value in first.items() if not torch.equal(value, second[name])}
    assert len(changed) > 100
    torch.testing.assert_close(second, first, rtol=1.2e-7, atol=1e-45)  # one step of float32
    assert ours['scores']['framework']['mIoU'] == pytest.approx(original['scores']['framework']['mIoU'], abs=0.02)
    assert original['scores']['file']['mIoU'] == pytest.approx(original['scores']['framework']['mIoU'], abs=1e-3)
    assert 'file' not in ours['scores']


def a_run(backbone, seed, score, size='small', losses=(4.0, 3.0, 2.0)):
    scores = {'mIoU': score, 'IoU of classes': {'nucleus': score / 2}}
    return {
        'dataset': 'nuclei-pixels',
        'size': size,
        'seed': seed,
        'backbone': backbone,
        'settings': {'epochs': 2},
        'scores': {'framework': scores, 'file': scores},
        'costs': {'train': {'processor seconds': 60}},
        'processor': 'A processor (two cores)',
        'losses': [{'loss': loss} for loss in losses],
    }


def test_tables_compare_the_runs_of_one_seed_and_one_size(tmp_path, monkeypatch):
    monkeypatch.setattr(photographs_table, 'RESULTS', tmp_path / 'results.json')
    runs = [
        a_run('SwinTransformer', 0, 0.5),
        a_run('SwinTransformer', 1, 0.7),
        a_run('SwinDense', 1, 0.6, losses=(4.0, 3.003, 2.0)),
        a_run('SwinDense', 0, 0.75),
        a_run('control', 1, 0.8),
        a_run('SwinDense', 0, 0.9, size='medium'),
    ]
    (tmp_path / 'results.json').write_text(json.dumps({'runs': runs}))
    page = photographs_table.photographs_table()
    assert '| mIoU | 0.500, 0.700 | -, 0.800 | 0.750, 0.600 |' in page
    assert 'mIoU | control | -, +0.100 |  |' in page
    assert 'mIoU | SwinDense | +0.250, -0.100 | +0.075 ± 0.175 |' in page
    assert 'by at most 1e-03 of their value with SwinDense, and by 0e+00 in the control' in page
    assert '| 0.600 (0.500 to 0.700; 2) | 0.800 (0.800 to 0.800; 1) | 0.675 (0.600 to 0.750; 2) |' in (
        photographs_table.trained_table()
    )
    assert photographs_table.medium_table().splitlines()[-1].endswith('1 min of one thread | mIoU | 0.900 | 0.900 |')
