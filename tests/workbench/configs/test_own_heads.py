"""Query-based heads and box detectors with custom data: the config that is written, and some steps of training."""

import re

import pytest
import torch
from mmengine.config import Config

from swin_dense.workbench.configs.experiment import Experiment, dicts
from swin_dense.workbench.configs.own_classes import set_classes
from swin_dense.workbench.predict import Predictor
from tests.conftest import some
from tests.mm.demo import with_tiny_swin
from tests.workbench.configs.data import CLASSES, SPLITS, mask_values, written
from tests.workbench.export.whole_models import train

INSTANCES = 'mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco'
SEMANTIC = 'mask2former_swin-t_8xb2-160k_ade20k-512x512'
CASCADE = 'cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-1x_coco'
UPERNET = 'swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512'
DINO = 'dino-5scale_swin-l_8xb2-12e_coco'
BOXES = ('faster-rcnn_swin-t-p4-w7_fpn_1x_coco', 'retinanet_swin-t-p4-w7_fpn_1x_coco', DINO)
PANOPTIC = 'mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco-panoptic'
KNET = 'knet-s3_swin-t_upernet_8xb2-adamw-80k_ade20k-512x512'
ONE_OF_EACH = some([INSTANCES, SEMANTIC, DINO, 'maskformer_swin-t_upernet_8xb2-160k_ade20k-512x512'], every=2)


@pytest.fixture
def boxes(fruit):
    def drop_masks(content):
        for annotation in content['annotations']:
            del annotation['segmentation']

    fruit.change(drop_masks)
    return fruit


@pytest.mark.parametrize('name', [CASCADE, UPERNET, *ONE_OF_EACH])
def test_own_classes_are_set_in_heads_losses_and_data(fruit, roads, tmp_path, name):
    is_detector = 'coco' in name
    data = fruit if is_detector else roads
    config = data.write('--classes', ', '.join(CLASSES), name=name)
    text = (tmp_path / 'mine.py').read_text()
    assert not re.search(r'num_(things_)?classes=(80|150)\b|reduce_zero_label=True', text)
    weights = [part['class_weight'] for part in dicts(config.model) if 'class_weight' in part]
    assert weights == ([] if name in (DINO, CASCADE, UPERNET) else [[1.0, 1.0, 0.1]])
    root = f'{data.root}/' if is_detector else str(data.root)
    for split in SPLITS:
        dataset = config[f'{split}_dataloader'].dataset
        assert (dataset.metainfo.classes, dataset.data_root) == (tuple(CLASSES), root)
    if is_detector:
        assert config.val_evaluator.ann_file == f'{root}annotations/instances_val2017.json'
    else:
        assert mask_values(config) == [0, 1, 255]


def test_own_classes_are_refused_for_panoptic_recipes_and_different_weights(fruit, roads, tmp_path):
    fruit.recipe = PANOPTIC
    assert 'own classes are not supported for panoptic segmentation' in fruit.refused()
    assert not (fruit.beside / 'mine.py').exists()
    config = written(tmp_path, name=KNET)
    config.model.auxiliary_head.loss_decode.class_weight = list(range(1, 151))
    roads.recipe = tmp_path / 'weighed.py'
    config.dump(roads.recipe)
    assert 'has different weights for its 150 classes' in roads.refused()


def test_a_weight_for_no_object_is_kept_if_one_class_becomes_two():
    model = {'num_classes': 1, 'loss_cls': {'class_weight': [1.0, 0.1]}}
    config = Config({'default_scope': 'mmdet', 'model': model})
    set_classes(Experiment(config), CLASSES)
    assert config.model == {'num_classes': 2, 'loss_cls': {'class_weight': [1.0, 1.0, 0.1]}}


@pytest.mark.parametrize('name', BOXES)
def test_a_box_detector_needs_no_masks(boxes, name):
    config = boxes.write(name=name)
    assert 'segm' not in config.val_evaluator.metric
    detector = config.model.get('roi_head', config.model)
    assert detector.bbox_head.num_classes == 2


SIDES = (96, 96)
# Options of transforms, of models, and what they become.
SMALL = {
    'scale': SIDES,
    'crop_size': SIDES,
    'size': SIDES,
    'num_layers': 2,
    'num_queries': 200,
}


def make_small(config):
    with_tiny_swin(config.model)
    loaders = (config.train_dataloader, config.test_dataloader)
    for part in dicts([config.model, *(loader.dataset for loader in loaders)]):
        part.update({key: value for key, value in SMALL.items() if part.get(key) is not None})
        if part.get('type') == 'RandomChoiceResize':
            part.scales = [SIDES]
    for loader in loaders:
        loader.update(num_workers=0, persistent_workers=False)


@pytest.mark.long
@pytest.mark.parametrize('name', [INSTANCES, SEMANTIC, *BOXES])
def test_models_with_own_classes_train_and_predict(fruit, roads, tmp_path, name):
    data, split = (fruit, 'val2017') if 'coco' in name else (roads, 'images/validation')
    config = data.write(name=name)
    make_small(config)
    weights = train(config, tmp_path / 'w.pth', steps=3)
    state = torch.load(weights)['state_dict']
    assert all(tensor.isfinite().all() for tensor in state.values())
    predictor = Predictor(config, str(weights), 'cpu', score=0.0)
    record = predictor(str(next((data.root / split).iterdir())))
    found = record['instances' if data is fruit else 'segments']
    assert {one['class'] for one in found} <= set(predictor.classes)
    assert len(predictor.classes) == 2
