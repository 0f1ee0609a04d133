"""`swin-dense config --image-size` changes every size of a recipe alike."""

import pytest

from swin_dense.workbench.configs.experiment import Experiment, dicts
from swin_dense.workbench.configs.image_size import set_image_size
from swin_dense.workbench.recipes.files import load_recipe
from tests.conftest import needs

pytestmark = needs('mmdet')


def changed(recipe, longest):
    config = load_recipe(recipe)
    note = set_image_size(Experiment(config), longest)
    return config, note


def test_a_detector_keeps_the_ratios_of_its_scales():
    config, note = changed('mask-rcnn_swin-t-p4-w7_fpn_1x_coco', 667)
    for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
        (step,) = [one for one in config[loader].dataset.pipeline if one.type == 'Resize']
        assert step.scale == (667, 400)  # (1333, 800) before
    assert note == 'the longer side of test images has 667 pixels instead of 1333, and other sizes are scaled alike'


def test_multi_scale_training_and_its_crops_shrink_too():
    recipe = 'mask-rcnn_swin-t-p4-w7_fpn_amp-ms-crop-3x_coco'
    before = load_recipe(recipe).train_dataloader.dataset.pipeline
    config, _ = changed(recipe, 1333 // 2)
    after = config.train_dataloader.dataset.pipeline
    pairs = list(zip(dicts(before), dicts(after), strict=True))
    scaled = [(a.scales, b.scales) for a, b in pairs if 'scales' in a]
    assert len(scaled) == 3
    for olds, news in scaled:
        assert [tuple(round(side * 666 / 1333) for side in old) for old in olds] == news
    crops = [(tuple(a.crop_size), b.crop_size) for a, b in pairs if 'crop_size' in a]
    assert crops == [((384, 600), (192, 288))]  # multiples of 32


def test_a_segmentor_pads_and_crops_to_the_new_size():
    config, _ = changed('swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512', 1024)
    assert config.model.data_preprocessor.size == (256, 256)
    crops = [step.crop_size for step in config.train_dataloader.dataset.pipeline if step.type == 'RandomCrop']
    assert crops == [(256, 256)]
    assert [step.scale for step in config.test_dataloader.dataset.pipeline if step.type == 'Resize'] == [(1024, 256)]


def test_a_size_that_it_does_not_know_is_an_error_and_stays():
    config = load_recipe('rtmdet_l_swin_b_4xb32-100e_coco')
    with pytest.raises(ValueError, match=r'--image-size does not change \w+ of \w+; set the sizes .* with --set'):
        set_image_size(Experiment(config), 320)
