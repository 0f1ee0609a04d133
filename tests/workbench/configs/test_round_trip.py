"""What annotations state beside what mmdet yields and loads: nothing is lost, gained or cut without a word."""

import contextlib
import io
import json
import math
import sys

import numpy as np
import pytest
import torch
from mmengine.registry import METRICS, TASK_UTILS, TRANSFORMS, init_default_scope
from mmengine.structures import InstanceData
from PIL import Image, ImageDraw
from pycocotools import mask as mask_tools

from swin_dense.workbench.checking import hints
from swin_dense.workbench.recipes.files import load_recipe
from tests.workbench.configs.data import CLASSES, SIDE, SPLITS, TRAIN, VAL, check_data, dataset_of
from tests.workbench.configs.test_checking import BOXES, WRONG, WRONG_MASKS, each


def notes(config, split='train'):
    return ' '.join(check_data(config, (split,)))


@pytest.mark.parametrize('file', [TRAIN, VAL])
def test_every_damage_is_found_without_words_for_it(fruit, monkeypatch, file):
    """The tables of words explain what is found, and find nothing themselves."""
    config, path = fruit.write(), fruit.root / file
    before = path.read_text()
    for table in (hints.LEFT_OUT, hints.IGNORED, hints.FILTERS, hints.HINTS_ON_READING):
        monkeypatch.setattr(hints, next(name for name, value in vars(hints).items() if value is table), {})
    split = 'train' if file == TRAIN else 'val'
    for case, (damage, _) in {**WRONG, **WRONG_MASKS}.items():
        path.write_text(before)
        fruit.change(damage, file)
        with pytest.raises(ValueError, match='fruit') as caught:
            check_data(config, (split,))
        assert '.json' in str(caught.value), case
    path.write_text(before)
    check_data(config, (split,))


def turned(annotation):
    """Write a rectangle of 40 x 6 pixels, turned by 45 degrees about (32, 32), as CVAT does."""
    attributes = {'occluded': False, 'rotation': 45.0}
    annotation.update(bbox=[12, 29, 40, 6], area=240, segmentation=[], attributes=attributes)


def test_boxes_of_turned_rectangles(fruit):
    """The box of the copy is that of the drawn rectangle; without the copy, a note says what the file has."""
    fruit.change(each(turned))
    fruit.recipe = BOXES
    config = fruit.write()
    canvas = Image.new('L', (SIDE, SIDE))
    corners = [(-20, -3), (20, -3), (20, 3), (-20, 3)]
    turn = math.radians(45)
    drawn = [
        (32 + x * math.cos(turn) - y * math.sin(turn), 32 + x * math.sin(turn) + y * math.cos(turn)) for x, y in corners
    ]
    ImageDraw.Draw(canvas).polygon(drawn, fill=1)
    expected = canvas.getbbox()
    for split in ('train', 'val'):
        box = dataset_of(config, split, pipeline=[]).get_data_info(0)['instances'][0]['bbox']
        assert max(abs(own - other) for own, other in zip(box, expected, strict=True)) <= 1.5
        assert 'turned afterwards' not in notes(config, split)
    config.train_dataloader.dataset.ann_file = TRAIN
    assert '4 of 4 boxes are of rectangles that were turned afterwards' in notes(config)


def test_a_mask_much_smaller_than_its_box(fruit):
    """As in files whose boxes are those of another size of the image."""
    fruit.change(each(lambda one: one.update(bbox=[2, 2, 60, 60])), TRAIN)
    assert 'the bounds of 4 of 4 masks fill less than half of their box, down to 13 %' in notes(fruit.write())


def test_a_file_under_several_ids_with_other_objects_each_time(ten_fruits):
    def flat(content):
        for image in content['images']:
            image['file_name'] = f'{image["id"] % 5}.jpg'

    ten_fruits.change(flat, TRAIN)
    said = ten_fruits.refused()
    assert '10 images name 5 files, such as' in said
    assert 'with other objects each time' in said

    def same(content):
        for one in content['annotations']:
            first = content['annotations'][one['image_id'] % 5]
            one.update({key: first[key] for key in ('bbox', 'category_id', 'segmentation')})

    ten_fruits.change(same, TRAIN)
    assert '10 images name 5 files, such as' in notes(ten_fruits.write())


def test_objects_that_are_stated_twice(fruit):
    def double(content):
        content['annotations'] += [{**one, 'id': one['id'] + 100} for one in content['annotations']]

    config = fruit.write()
    fruit.change(double, TRAIN)
    assert '4 of 8 annotations repeat another of the same image, class and place' in notes(config)


def test_training_data_without_an_object(fruit):
    fruit.change(lambda content: content.update(annotations=[]), TRAIN)
    said = fruit.refused()
    assert f'{fruit.root / TRAIN}: none of 0 annotations is of a class, apple, ripe pear\n' in said


def test_mixed_images_without_their_masks(fruit):
    """mmdet's Mosaic mixes boxes alone, and a later step fails with an IndexError on some image of the epoch."""
    config = fruit.write()
    entry = config.train_dataloader.dataset
    steps = entry.pipeline
    mosaic = [{'type': 'Mosaic', 'img_scale': (SIDE, SIDE)}, {'type': 'FilterAnnotations', 'min_gt_bbox_wh': (1, 1)}]
    entry.pipeline = steps[:2]
    config.train_dataloader.dataset = {
        'type': 'MultiImageMixDataset',
        'dataset': entry,
        'pipeline': [*mosaic, {'type': 'PackDetInputs'}],
    }
    with pytest.raises(ValueError, match=r'fails for mixed images .*CachedMosaic'):
        check_data(config, ('train',))
    entry = config.train_dataloader.dataset.dataset
    entry.pipeline[1].pop('with_mask')
    check_data(config, ('train',))


def test_the_head_of_another_number_of_classes_is_named(fruit):
    config = fruit.write()
    config.model.roi_head.bbox_head.num_classes = 80
    message = r'has 2 classes, apple, ripe pear, but the model has 80: --set model\.roi_head\.bbox_head\.num_classes=2$'
    with pytest.raises(ValueError, match=message):
        check_data(config, ('train',))


class Failing:
    """A step of one's own that one image stops."""

    def __call__(self, results):
        if '3.' in results['img_path'].rpartition('/')[2]:
            raise RuntimeError('no third channel')
        return results


@pytest.mark.parametrize('data', ['fruit', 'roads'])
def test_a_step_that_fails_is_named_with_its_image(request, data):
    config = request.getfixturevalue(data).write()
    TRANSFORMS.register_module(name='Failing', module=Failing)
    try:
        config.train_dataloader.dataset.pipeline.insert(2, {'type': 'Failing'})
        message = r'3\.\w+ cannot be loaded: Failing of train_dataloader.*RuntimeError: no third channel'
        with pytest.raises(ValueError, match=message):
            check_data(config, ('train',))
    finally:
        TRANSFORMS.module_dict.pop('Failing')


def test_images_that_are_trained_on_and_evaluated(fruit, roads):
    config = fruit.write()
    assert 'in the training data too' not in ' '.join(check_data(config, ('train', 'val')))
    config.val_dataloader.dataset.data_prefix.img = 'train2017/'
    said = ' '.join(check_data(config, ('train', 'val')))
    assert 'val_dataloader.dataset: 4 of 4 images are in the training data too, such as' in said
    config = roads.write()
    config.test_dataloader.dataset.data_prefix.img_path = 'images/training'
    said = ' '.join(check_data(config, SPLITS))
    assert said.count('in the training data too') == 1


def test_figures_of_single_classes_that_masks_replace(fruit):
    """The metric of mmdet gives those of boxes and of masks one name."""
    config = fruit.write()
    config.val_evaluator.classwise = True
    config.val_evaluator.metric = ['bbox', 'segm']
    init_default_scope('mmdet')
    metric = METRICS.build(config.val_evaluator)
    metric.dataset_meta = {'classes': CLASSES}
    content = json.loads((fruit.root / VAL).read_text())
    for one in content['annotations']:
        x, y, width, height = one['bbox']
        empty = np.zeros((SIDE, SIDE, 1), np.uint8, order='F')
        empty[:2] = 1  # another place than that of the object
        found = {'bboxes': torch.tensor([[x, y, x + width, y + height]]).float(), 'scores': torch.tensor([0.9])}
        found |= {'labels': torch.tensor([one['category_id'] // 7]), 'masks': mask_tools.encode(empty)}
        metric.process({}, [{'img_id': one['image_id'], 'ori_shape': (SIDE, SIDE), 'pred_instances': found}])
    with contextlib.redirect_stdout(io.StringIO()):
        figures = metric.evaluate(4)
    assert (figures['coco/bbox_mAP'], figures['coco/apple_precision']) == (1, 0)
    said = 'val_evaluator: the logged figures of single classes are those of segm alone'
    assert said in notes(config, 'val')
    config.val_evaluator.metric = 'bbox'
    assert said not in notes(config, 'val')


@pytest.mark.parametrize(('side', 'is_small'), [(4, True), (30, False)])
def test_boxes_smaller_than_every_anchor(fruit, side, is_small):
    """The assigner of mmdet's RPN matches none of its anchors with them, except the best one of each box."""
    fruit.recipe = 'faster-rcnn_swin-t-p4-w7_fpn_1x_coco'
    fruit.change(each(lambda one: one.update(bbox=[10, 10, side, side], area=side * side)))
    config = fruit.write('--set', 'train_dataloader.dataset.pipeline.2.scale=(64,64)')
    said = '4 of 4 boxes are so small that no anchor of RPNHead overlaps them by 0.25: the smallest has sides of 32'
    assert (said in notes(config)) == is_small
    rpn = config.model.rpn_head
    generator = TASK_UTILS.build(rpn.anchor_generator)
    anchors = torch.cat(
        generator.grid_priors([(64 // stride, 64 // stride) for stride in (4, 8, 16, 32, 64)], device='cpu')
    )
    assigner = TASK_UTILS.build({**config.model.train_cfg.rpn.assigner, 'match_low_quality': False, 'pos_iou_thr': 0.3})
    box = torch.tensor([[10.0, 10, 10 + side, 10 + side]])
    assigned = assigner.assign(InstanceData(priors=anchors), InstanceData(bboxes=box, labels=torch.tensor([0])))
    assert bool((assigned.gt_inds > 0).any()) != is_small


def test_a_config_imports_a_module_of_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'steps_of_mine.py').write_text('LOADED = True\n')
    config = "custom_imports = dict(imports=['steps_of_mine'])\nmodel = dict(type='FasterRCNN')\n"
    (tmp_path / 'mine.py').write_text(config)
    paths = list(sys.path)
    assert load_recipe('mine.py').model.type == 'FasterRCNN'
    assert sys.modules.pop('steps_of_mine').LOADED
    assert sys.path == paths
