"""examples/evaluate_file.py, with models whose score is known."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.conftest import IfInstalled

mask_utils = IfInstalled('pycocotools.mask')
SIZE = 32, 40


@pytest.fixture
def example():
    pytest.importorskip('pycocotools')
    from tests.examples import load_example

    return load_example('evaluate_file')


def coco(folder):
    """Write annotations of two images with two boxes each; return the records of a perfect model."""
    images, annotations, records = [], [], {}
    for number in (1, 2):
        images.append({'id': number, 'file_name': f'{number}.jpg', 'height': SIZE[0], 'width': SIZE[1]})
        records[f'{number}.jpg'] = {'instances': []}
        for label, (x, y, width, height) in enumerate([(2, 3, 10, 12), (20, 5, 15, 20)], start=1):
            polygon = [x, y, x + width, y, x + width, y + height, x, y + height]
            fields = {'bbox': [x, y, width, height], 'area': width * height, 'iscrowd': 0, 'segmentation': [polygon]}
            annotations.append({'id': len(annotations) + 1, 'image_id': number, 'category_id': 3 * label, **fields})
            found = {'class': f'class {label}', 'score': 0.9, 'box': [x, y, x + width, y + height]}
            found['mask'] = mask_utils.merge(mask_utils.frPyObjects([polygon], *SIZE))
            records[f'{number}.jpg']['instances'].append(found)
    categories = [{'id': 3 * label, 'name': f'class {label}'} for label in (1, 2)]
    path = folder / 'annotations.json'
    path.write_text(json.dumps({'images': images, 'annotations': annotations, 'categories': categories}))
    return path, records


def test_a_perfect_detector_and_one_that_misses_a_class(example, tmp_path):
    path, records = coco(tmp_path)
    perfect = example.average_precision(lambda image: records[image.name], tmp_path, path)
    assert perfect == {'bbox': pytest.approx(1), 'segm': pytest.approx(1)}
    for record in records.values():
        record['instances'].pop()
    halved = example.average_precision(lambda image: records[image.name], tmp_path, path)
    assert halved == {'bbox': pytest.approx(0.5), 'segm': pytest.approx(0.5)}


def test_mean_iou_is_that_of_sets_of_pixels(example, tmp_path):
    rng = np.random.default_rng(0)
    images, masks = tmp_path / 'images', tmp_path / 'masks'
    images.mkdir()
    masks.mkdir()
    true, found = rng.integers(0, 3, (2, *SIZE)), rng.integers(0, 3, (2, *SIZE))
    true[:, :4] = 255
    for index in range(2):
        Image.fromarray(true[index].astype(np.uint8)).save(masks / f'{index}.png')
        Image.new('RGB', SIZE[::-1]).save(images / f'{index}.jpg')
    places = [(index, y, x) for index in range(2) for y in range(4, SIZE[0]) for x in range(SIZE[1])]
    by_class = []
    for label in range(3):
        true_pixels = {place for place in places if true[place] == label}
        found_pixels = {place for place in places if found[place] == label}
        by_class.append(len(true_pixels & found_pixels) / len(true_pixels | found_pixels))
    score = example.mean_iou(lambda image: found[int(image.stem)], images, masks, classes=4)
    assert score == pytest.approx(sum(by_class) / 3)
