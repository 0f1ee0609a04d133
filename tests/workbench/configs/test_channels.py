"""A neck or a head that does not take the maps of the backbone is an error with the setting that mends it."""

import pytest
from mmengine.config import Config

from swin_dense.commands._main import main
from swin_dense.workbench.checking.settings import check_channels
from swin_dense.workbench.configs.experiment import Experiment
from swin_dense.workbench.configs.settings import merge_settings
from swin_dense.workbench.recipes.files import load_recipe
from tests.workbench.configs.data import DETECTOR, SEGMENTOR

CASCADE = 'atss_swin-l-p4-w12_fpn_dyhead_ms-2x_coco'
MASK2FORMER = 'mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco'
# A recipe, settings that do not fit it, and what the error says.
WRONG = [
    (
        'mask-rcnn_swin-t-p4-w7_fpn_1x_coco',
        'model.backbone.embed_dims=24',
        'model.neck.in_channels is [96, 192, 384, 768], but the maps of the backbone have 24, 48, 96, 192 channels; '
        'add --set model.neck.in_channels=24,48,96,192',
    ),
    (DETECTOR, 'model.backbone.out_indices=1,2,3', 'add --set model.neck.in_channels=64,128,256'),
    (CASCADE, 'model.backbone.embed_dims=24', 'add --set model.neck.0.in_channels=48,96,192'),
    (MASK2FORMER, 'model.backbone.embed_dims=24', 'add --set model.panoptic_head.in_channels=24,48,96,192'),
    (
        SEGMENTOR,
        'model.backbone.embed_dims=16',
        'add --set model.decode_head.in_channels=16,32,64,128 model.auxiliary_head.in_channels=64',
    ),
    (SEGMENTOR, 'model.auxiliary_head.in_channels=7', 'model.auxiliary_head.in_channels is 7, but'),
    (SEGMENTOR, 'model.backbone.out_indices=0,1,2', 'selects maps that the backbone does not return; it returns 3'),
]


@pytest.mark.parametrize(('name', 'setting', 'message'), WRONG)
def test_the_setting_that_mends_a_model_is_said(name, setting, message):
    config = load_recipe(name)
    check_channels(Experiment(config))
    merge_settings(config, [setting])
    with pytest.raises(ValueError, match='the backbone') as caught:
        check_channels(Experiment(config))
    said = str(caught.value)
    assert message in said
    advice = said.partition('add --set ')[2].split()
    if advice:
        merge_settings(config, advice)
        check_channels(Experiment(config))


@pytest.mark.parametrize(
    'backbone',
    [
        {'type': 'ResNet', 'depth': 50},
        {'type': 'Unheard'},
        None,
    ],
)
def test_a_model_with_a_backbone_of_another_package_is_left_to_it(backbone):
    model = {'backbone': backbone, 'neck': {'type': 'FPN', 'in_channels': [1, 2]}}
    check_channels(Experiment(Config({'default_scope': 'mmdet', 'model': model})))


def test_config_and_train_say_it_before_anything_is_built(fruit, tmp_path, capsys):
    narrow, advice = 'model.backbone.embed_dims=16', 'add --set model.neck.in_channels=16,32,64,128'
    assert advice in fruit.refused('--set', narrow)
    assert not (tmp_path / 'mine.py').exists()
    fruit.write()
    work_dir = tmp_path / 'run'
    assert main(['train', str(tmp_path / 'mine.py'), '--work-dir', str(work_dir), '--set', narrow]) == 2
    assert advice in capsys.readouterr().err
    assert not work_dir.exists()
