"""examples/evaluate_file.py, with models whose score is known."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.conftest import IfInstalled
from tests.workbench.configs.data import SEGMENTOR, SIDE, VAL, make_coco, make_masks, written

mask_utils = IfInstalled('pycocotools.mask')
SIZE = 32, 40


@pytest.fixture
def example():
    pytest.importorskip('pycocotools')
    from tests.examples import load_example

    return load_example('evaluate_file')


def records_of(content):
    """Return the predictions of a perfect model for annotations, by the names of the images."""
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


@pytest.fixture
def coco(tmp_path):
    """Return a data set whose ids begin with 0, and the content of its file."""
    path = make_coco(tmp_path / 'fruit') / VAL
    content = json.loads(path.read_text())
    for number, annotation in enumerate(content['annotations']):
        annotation['id'] = number
    path.write_text(json.dumps(content))
    return path, content


@pytest.mark.parametrize('missed', [None, 'apple', 'all'])
def test_the_precision_of_each_class_of_a_perfect_detector_and_of_one_that_misses_some(example, tmp_path, coco, missed):
    path, content = coco
    records = records_of(content)
    for record in records.values():
        record['instances'] = [one for one in record['instances'] if missed not in ('all', one['class'])]
    found = example.precisions_of_classes(lambda image: records[image.name], tmp_path, path)
    classes = [category['name'] for category in content['categories']]
    expected = {name: pytest.approx(float(missed not in ('all', name))) for name in classes}
    assert found == dict.fromkeys(['bbox'] if missed == 'all' else ['bbox', 'segm'], expected)
    mean = example.average_precision(lambda image: records[image.name], tmp_path, path)
    assert mean == {kind: pytest.approx(np.mean([missed not in ('all', name) for name in classes])) for kind in found}


def test_a_class_without_objects_has_no_precision_and_an_unknown_class_is_named(example, tmp_path, coco):
    path, content = coco
    content['categories'].append({'id': 9, 'name': 'plum'})
    path.write_text(json.dumps(content))
    records = records_of(content)
    found = example.precisions_of_classes(lambda image: records[image.name], tmp_path, path)['bbox']
    assert np.isnan(found['plum'])
    assert example.mean(found.values()) == pytest.approx(1)
    for record in records.values():
        record['instances'][0]['class'] = 'grape'
    with pytest.raises(ValueError, match=r"the model predicts 'grape', which is no category of .*apple, .*plum"):
        example.average_precision(lambda image: records[image.name], tmp_path, path)


def write_masks(folder, *masks):
    """Write masks and an image for each, and return their folders."""
    for number, mask in enumerate(np.asarray(masks, np.uint8)):
        for kind, picture in (('masks', Image.fromarray(mask)), ('images', Image.new('RGB', mask.shape[::-1]))):
            (folder / kind).mkdir(exist_ok=True)
            picture.save(folder / kind / f'{number}.{"png" if kind == "masks" else "jpg"}')
    return folder / 'images', folder / 'masks'


def test_the_iou_of_each_class_is_that_of_pixels(example, tmp_path):
    rng = np.random.default_rng(0)
    true, found = rng.integers(0, 3, (2, 2, *SIZE))
    true[:, :4] = 255
    images, masks = write_masks(tmp_path, *true)
    Image.new('RGB', SIZE[::-1]).save(images / '0.b.jpg')  # of no mask
    true, counted = true[:, 4:], found[:, 4:]
    expected = []
    for label in range(3):
        both = (true == label) & (counted == label)
        either = (true == label) | (counted == label)
        expected.append(both.sum() / either.sum())
    arguments = (lambda image: found[int(image.stem)], images, masks)
    scores = example.ious_of_classes(*arguments, classes=4)
    assert scores == [*map(pytest.approx, expected), pytest.approx(np.nan, nan_ok=True)]
    assert example.mean_iou(*arguments, classes=4) == pytest.approx(np.mean(expected))


def test_masks_have_the_values_of_the_config_that_was_exported(example, tmp_path):
    """Half of an image is road, of the value 255, of which a model finds nothing; the value 11 is no class."""
    from mmengine.registry import init_default_scope

    from swin_dense.workbench.checking.masks import labels_of_values

    root = make_masks(tmp_path / 'data')
    words = ['--data-root', root, '--classes', 'ground,road']
    config = written(tmp_path, *words, name=SEGMENTOR)
    init_default_scope('mmseg')
    assert labels_of_values(config.test_dataloader.dataset) == [*range(256)]
    for path in root.glob('annotations/*/*.png'):
        mask = np.array(Image.open(path))
        Image.fromarray(np.choose(np.searchsorted([0, 1, 255], mask), [0, 255, 11]).astype(np.uint8)).save(path)
    config = written(tmp_path, *words, '--mask-values', '0,255', '--ignore', '11', name=SEGMENTOR)
    labels = labels_of_values(config.test_dataloader.dataset)
    assert [labels[value] for value in (0, 1, 11, 255)] == [0, 255, 255, 1]
    mask = np.zeros(SIZE, np.uint8)
    mask[SIZE[0] // 2 :] = 255
    mask[:2] = mask[-2:] = 11
    images, masks = write_masks(tmp_path, mask)
    nothing = (lambda image: np.zeros(SIZE), images, masks)
    assert example.ious_of_classes(*nothing, classes=2, labels=labels) == [0.5, 0]
    with pytest.raises(ValueError, match='has the values 11, which the config of the model neither maps'):
        example.mean_iou(*nothing, classes=2)


@pytest.mark.parametrize(
    ('files', 'message'),
    [
        ({}, 'pixels of one class at most, beside those that are ignored; .*give labels'),
        ({'images/0.png': SIZE}, r'0\.jpg and .*0\.png have the same mask; move one'),
        ({'masks/1.png': SIZE}, r'there is no image .*1\.\* for the mask .*1\.png'),
        ({'masks/0.png': (5, 7)}, r'0\.png is an array \(5, 7\) .* must have the size of its image, \(32, 40\)'),
    ],
)
def test_masks_that_do_not_fit_are_named(example, tmp_path, files, message):
    mask = np.zeros(SIZE, np.uint8)
    mask[20:] = 255
    images, masks = write_masks(tmp_path, mask)
    for name, size in files.items():
        Image.new('L', size[::-1]).save(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        example.mean_iou(lambda image: np.zeros(SIZE), images, masks, classes=2)
