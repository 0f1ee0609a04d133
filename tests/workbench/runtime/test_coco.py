"""Predictions in COCO's formats are read by pycocotools and by supervision."""

import json

import numpy as np
import pytest

from swin_dense.workbench.runtime import Coco, masks
from swin_dense.workbench.runtime.coco import RECORD_FORMAT
from swin_dense.workbench.runtime.model import begun_record
from tests.conftest import IfInstalled

coco = IfInstalled('pycocotools.coco')
cocoeval = IfInstalled('pycocotools.cocoeval')
supervision = IfInstalled('supervision')
CLASSES = ('apple', 'pear')


def record(name, seed, with_masks=True):
    random = np.random.default_rng(seed)
    instances = []
    for index in range(6):
        x, y = random.integers(0, 50, 2)
        w, h = random.integers(5, 30, 2)
        mask = np.zeros((80, 90), bool)
        mask[y : y + h, x : x + w] = True
        label = int(random.integers(2))
        box = [float(x), float(y), float(x + w), float(y + h)]
        instance = {'class': CLASSES[label], 'label': label, 'score': 0.9 - index / 10, 'box': box}
        instances.append({**instance, 'mask': masks.run_lengths(mask)} if with_masks else instance)
    return {**begun_record(f'some/folder/{name}', (80, 90)), 'instances': instances}


RECORDS = [record('a.jpg', 0), record('b.jpg', 1)]


def collected(known=None, records=RECORDS):
    made = Coco(CLASSES, known)
    for one in records:
        made.add(one)
    return made


@pytest.mark.parametrize(('kind', 'with_masks'), [('bbox', False), ('bbox', True), ('segm', True)])
def test_predictions_evaluated_against_themselves_are_perfect(tmp_path, kind, with_masks):
    records = [record('a.jpg', 0, with_masks), record('b.jpg', 1, with_masks)]
    truth = collected(None, records).annotations()
    # Ids of another data set, in another order.
    for image, number in zip(truth['images'], (70, 30), strict=True):
        old, image['id'] = image['id'], number
        for annotation in truth['annotations']:
            if annotation['image_id'] == old:
                annotation['image_id'] = number
    swapped = {1: 18, 2: 5}
    for one in truth['annotations']:
        one['category_id'] = swapped[one['category_id']]
    truth['categories'] = [{'id': swapped[one['id']], 'name': one['name']} for one in reversed(truth['categories'])]
    (tmp_path / 'truth.json').write_text(json.dumps(truth))
    (tmp_path / 'results.json').write_text(json.dumps(collected(truth, records).results()))
    ground_truth = coco.COCO(str(tmp_path / 'truth.json'))
    evaluation = cocoeval.COCOeval(ground_truth, ground_truth.loadRes(str(tmp_path / 'results.json')), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    assert evaluation.stats[0] == pytest.approx(1)


def test_annotations_are_a_data_set(tmp_path):
    (tmp_path / 'a.json').write_text(json.dumps(collected().annotations()))
    data = coco.COCO(str(tmp_path / 'a.json'))
    assert [one['file_name'] for one in data.loadImgs([1, 2])] == ['a.jpg', 'b.jpg']
    assert [one['name'] for one in data.loadCats([1, 2])] == list(CLASSES)
    assert len(data.getAnnIds()) == 12
    for annotation in data.loadAnns(data.getAnnIds()):
        assert annotation['area'] == data.annToMask(annotation).sum() == np.prod(annotation['bbox'][2:])


def test_what_does_not_fit_is_refused():
    known = {'images': [{'file_name': 'a.jpg', 'id': 1}], 'categories': [{'id': 1, 'name': 'apple'}]}
    with pytest.raises(ValueError, match="have no category 'pear'"):
        Coco(CLASSES, known)
    with pytest.raises(ValueError, match=r'no image some/folder/b.jpg; give those'):
        collected({**known, 'categories': [*known['categories'], {'id': 2, 'name': 'pear'}]})
    with pytest.raises(ValueError, match='this model predicts none; use a detector'):
        Coco(CLASSES).add({'image': 'a.jpg', 'height': 8, 'width': 9, 'segments': []})
    with pytest.raises(ValueError, match=r'a.jpg has no height and width, .*predict'):
        Coco(CLASSES).add({'image': 'a.jpg', 'instances': []})
    with pytest.raises(ValueError, match=r'a.jpg has the format 2 of a later'):
        Coco(CLASSES).add({'format': RECORD_FORMAT + 1, 'image': 'a.jpg'})


KNOWN = ['a/1.jpg', 'b/1.jpg', 'b/c/1.jpg', '2.jpg', '/data/x/3.jpg', '../y/3.jpg', 'd/4.jpg', 'e/d/4.jpg']


@pytest.mark.parametrize(
    ('image', 'name', 'expected'),
    [
        ('photos/a/1.jpg', 'a/1.jpg', 'a/1.jpg'),
        ('photos/b/c/1.jpg', 'b/c/1.jpg', 'b/c/1.jpg'),
        ('photos/b/1.jpg', '1.jpg', 'b/1.jpg'),  # of the folder photos/b
        ('2.jpg', None, '2.jpg'),
        ('z/2.jpg', 'z/2.jpg', '2.jpg'),
        ('photos/c/1.jpg', 'c/1.jpg', 'b/c/1.jpg'),
        ('photos/z/1.jpg', 'z/1.jpg', None),
        ('else/y/3.jpg', '3.jpg', '../y/3.jpg'),
        ('else/d/4.jpg', 'd/4.jpg', 'd/4.jpg'),
        ('else/e/d/4.jpg', 'e/d/4.jpg', 'e/d/4.jpg'),
        ('else/z/1.jpg', '1.jpg', ValueError),
        ('photos/5.jpg', '5.jpg', None),
    ],
)
def test_images_are_found_by_their_paths(image, name, expected):
    """Oracle: written by hand."""
    known = {'images': [{'id': 10 + i, 'file_name': name} for i, name in enumerate(KNOWN)]}
    made = Coco(CLASSES, {**known, 'categories': [{'id': 1, 'name': 'pear'}, {'id': 2, 'name': 'apple'}]})
    if expected is ValueError:
        with pytest.raises(ValueError, match='; give the folder that the names'):
            made.entry_of(image, name)
    else:
        found = made.entry_of(image, name)
        assert found == (expected and {'id': 10 + KNOWN.index(expected), 'file_name': expected})


def test_two_images_of_one_name_need_their_folders():
    made = Coco(CLASSES)
    first, second = record('a.jpg', 0), {**record('a.jpg', 1), 'image': 'other/a.jpg'}
    made.add(first)
    with pytest.raises(ValueError, match=r'a.jpg and other/a.jpg are both a.jpg'):
        made.add(second)
    made = Coco(CLASSES)
    made.add(first, 'folder/a.jpg')
    made.add(second, 'other/a.jpg')
    assert [image['file_name'] for image in made.annotations()['images']] == ['folder/a.jpg', 'other/a.jpg']
    assert len({image['id'] for image in made.annotations()['images']}) == 2


def test_supervision_reads_the_annotations(tmp_path):
    from PIL import Image

    for one in RECORDS:
        Image.new('RGB', (90, 80)).save(tmp_path / one['image'].rpartition('/')[2])
    (tmp_path / 'a.json').write_text(json.dumps(collected().annotations()))
    data = supervision.DetectionDataset.from_coco(str(tmp_path), str(tmp_path / 'a.json'), force_masks=True)
    assert data.classes == list(CLASSES)
    found = {path.rpartition('/')[2]: detections for path, _, detections in data}
    for one in RECORDS:
        detections = found[one['image'].rpartition('/')[2]]
        np.testing.assert_allclose(detections.xyxy, [instance['box'] for instance in one['instances']])
        assert detections.class_id.tolist() == [instance['label'] for instance in one['instances']]
