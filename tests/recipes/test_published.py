"""`swin-dense test RECIPE --published` tests the weights at the address of a recipe against its published accuracy."""

import dataclasses
import re

import pytest
import torch
from mmengine.registry import MODELS, init_default_scope

from swin_dense.__main__ import main
from swin_dense.recipes import published
from swin_dense.recipes.files import load_recipe, recipe_root
from swin_dense.recipes.zoo import FOLDERS, read_zoo
from tests.tools.test_train_and_test import options

RECIPES = [recipe for folder in FOLDERS for recipe in read_zoo(recipe_root(), folder)]


@pytest.mark.slow
def test_published_and_measured_accuracy(tmp_path, demo_data, monkeypatch, capsys):
    config = 'upernet_swin-demo'
    init_default_scope('mmseg')
    model = MODELS.build(load_recipe(config).model)
    model.init_weights()
    torch.save({'state_dict': model.state_dict(), 'meta': {}}, tmp_path / 'weights.pth')
    address = (tmp_path / 'weights.pth').as_uri()
    stand_in = dataclasses.replace(RECIPES[0], metrics={'mIoU': 3.0, 'mIoU(ms+flip)': 4.0}, weights=address)
    monkeypatch.setattr('swin_dense.commands.test.recipe_with_weights', {config: stand_in}.__getitem__)
    work = ['--work-dir', str(tmp_path / 'work'), '--set', *options('mmseg', demo_data)]
    assert main(['test', config, '--published', *work]) == 0
    printed = capsys.readouterr().out
    measured = float(re.findall(r'mIoU: (\S+)', printed)[-1])
    table = printed[printed.rindex(address) :].splitlines()[1:]
    assert [line.split() for line in table[:3]] == [
        ['metric', 'published', 'measured', 'difference'],
        ['mIoU', '3.00', f'{measured:.2f}', f'{measured - 3:+.2f}'],
        ['mIoU(ms+flip)', '4.00', 'not', 'measured'],
    ]


def test_augmented_accuracy_is_compared_with_augmented_accuracy():
    recipe = dataclasses.replace(RECIPES[0], metrics={'mIoU': 44.5, 'mIoU(ms+flip)': 45.8})
    lines = published.side_by_side(recipe, {'aAcc': 80.0, 'mIoU': 45.6}, is_augmented=True).splitlines()
    assert lines[1].split() == ['mIoU', '44.50', 'not', 'measured']
    assert lines[2].split() == ['mIoU(ms+flip)', '45.80', '45.60', '-0.20']


@pytest.mark.parametrize('name', [recipe.config.stem for recipe in RECIPES if recipe.weights and recipe.metrics])
def test_recipes_with_weights_are_found(name):
    recipe = published.recipe_with_weights(f'configs/x/{name}.py')
    assert recipe.weights.startswith('https://')
    measured = {'coco/bbox_mAP': 0.4, 'coco/segm_mAP': 0.3, 'coco_panoptic/PQ': 5.0, 'mIoU': 6.0}
    for line in published.side_by_side(recipe, measured).splitlines()[1:]:
        # Only video instance segmentation has another metric.
        assert ('not measured' in line) == line.startswith(('mIoU(ms+flip)', 'AP ')), line


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['mask-rcnn_swin-demo_fpn', '--published'], 'needs the name of a recipe'),
        (['mask-rcnn_swin-t-p4-w7_fpn_1x_coco'], 'give either a checkpoint or --published'),
        (['mask-rcnn_swin-t-p4-w7_fpn_1x_coco', 'a.pth', '--published'], 'give either a checkpoint or --published'),
    ],
)
def test_what_cannot_be_compared_is_refused(capsys, arguments, message):
    assert main(['test', *arguments]) == 2
    assert message in capsys.readouterr().err
