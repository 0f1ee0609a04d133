"""examples/evaluate_file.py, with models whose score is known."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.conftest import IfInstalled
from tests.workbench.configs.data import SIDE, VAL, make_coco

mask_utils = IfInstalled('pycocotools.mask')
SIZE = 32, 40


@pytest.fixture
def example():
    pytest.importorskip('pycocotools')
    from tests.examples import load_example

    return load_example('evaluate_file')


def records_of(content):
    """Return what a perfect model predicts for annotations, by the names of the images."""
    classes = {category['id']: category['name'] for category in content['categories']}
    records = {image['id']: {'instances': []} for image in content['images']}
    for annotation in content['annotations']:
        left, top, width, height = annotation['bbox']
        mask = mask_utils.merge(mask_utils.frPyObjects(annotation['segmentation'], SIDE, SIDE))
        instance = {
            'class': classes[annotation['category_id']],
            'score': 0.9,
            'box': [left, top, left + width, top + height],
            'mask': mask,
        }
        records[annotation['image_id']]['instances'].append(instance)
    return {image['file_name']: records[image['id']] for image in content['images']}


@pytest.mark.parametrize(('missed', 'precision'), [(None, 1), ('apple', 0.5)])
def test_the_precision_of_a_perfect_detector_and_of_one_that_misses_a_class(example, tmp_path, missed, precision):
    path = make_coco(tmp_path / 'fruit') / VAL
    content = json.loads(path.read_text())
    for annotation in content['annotations']:
        annotation['id'] += 1  # pycocotools takes an annotation 0 for no match
    path.write_text(json.dumps(content))
    records = records_of(content)
    for record in records.values():
        record['instances'] = [one for one in record['instances'] if one['class'] != missed]
    found = example.average_precision(lambda image: records[image.name], tmp_path, path)
    assert found == {'bbox': pytest.approx(precision), 'segm': pytest.approx(precision)}


def test_mean_iou_is_that_of_pixels(example, tmp_path):
    rng = np.random.default_rng(0)
    images, masks = tmp_path / 'images', tmp_path / 'masks'
    images.mkdir()
    masks.mkdir()
    true, found = rng.integers(0, 3, (2, 2, *SIZE))
    true[:, :4] = 255
    for index, mask in enumerate(true.astype(np.uint8)):
        Image.fromarray(mask).save(masks / f'{index}.png')
        Image.new('RGB', SIZE[::-1]).save(images / f'{index}.jpg')
    true, counted = true[:, 4:], found[:, 4:]
    expected = []
    for label in range(3):
        both = (true == label) & (counted == label)
        either = (true == label) | (counted == label)
        expected.append(both.sum() / either.sum())
    score = example.mean_iou(lambda image: found[int(image.stem)], images, masks, classes=4)
    assert score == pytest.approx(np.mean(expected))
