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
        name, found = f'{number}.jpg', []
        images.append(
            {
                'id': number,
                'file_name': name,
                'height': SIZE[0],
                'width': SIZE[1],
            }
        )
        records[name] = {'instances': found}
        for label, (x, y, width, height) in enumerate([(2, 3, 10, 12), (20, 5, 15, 20)], start=1):
            right, bottom = x + width, y + height
            polygon = [x, y, right, y, right, bottom, x, bottom]
            annotations.append(
                {
                    'id': len(annotations) + 1,
                    'image_id': number,
                    'category_id': 3 * label,
                    'bbox': [x, y, width, height],
                    'area': width * height,
                    'iscrowd': 0,
                    'segmentation': [polygon],
                }
            )
            mask = mask_utils.merge(mask_utils.frPyObjects([polygon], *SIZE))
            found.append(
                {
                    'class': f'class {label}',
                    'score': 0.9,
                    'box': [x, y, right, bottom],
                    'mask': mask,
                }
            )
    categories = [{'id': 3, 'name': 'class 1'}, {'id': 6, 'name': 'class 2'}]
    path = folder / 'annotations.json'
    path.write_text(json.dumps({'images': images, 'annotations': annotations, 'categories': categories}))
    return path, records


def test_a_perfect_detector_and_one_that_misses_a_class(example, tmp_path):
    path, records = coco(tmp_path)

    def precision():
        return example.average_precision(lambda image: records[image.name], tmp_path, path)

    assert precision() == {'bbox': pytest.approx(1), 'segm': pytest.approx(1)}
    for record in records.values():
        record['instances'].pop()
    assert precision() == {'bbox': pytest.approx(0.5), 'segm': pytest.approx(0.5)}


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
