"""`swin-dense test RECIPE --published` tests the weights at the address of a recipe against its published accuracy."""

import dataclasses
import functools
import http.server
import re
import threading

import pytest
import torch
from mmengine.registry import MODELS, init_default_scope

from swin_dense.__main__ import main
from swin_dense.recipes import published
from swin_dense.recipes.files import load_recipe, recipe_root
from swin_dense.recipes.zoo import FOLDERS, read_zoo
from tests.tools.test_train_and_test import options

RECIPES = [recipe for folder in FOLDERS for recipe in read_zoo(recipe_root(), folder)]


@pytest.fixture
def address(tmp_path):
    """The address of a server of a folder."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}'
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('framework', 'config', 'metrics'),
    [
        ('mmdet', 'mask-rcnn_swin-demo_fpn', {'box AP': 1.0, 'mask AP': 2.0}),
        ('mmseg', 'upernet_swin-demo', {'mIoU': 3.0, 'mIoU(ms+flip)': 4.0}),
    ],
)
def test_published_and_measured_accuracy(tmp_path, demo_data, address, monkeypatch, capsys, framework, config, metrics):
    init_default_scope(framework)
    model = MODELS.build(load_recipe(config).model)
    model.init_weights()
    torch.save({'state_dict': model.state_dict(), 'meta': {}}, tmp_path / 'weights.pth')
    stand_in = dataclasses.replace(RECIPES[0], metrics=metrics, weights=f'{address}/weights.pth')
    monkeypatch.setattr('swin_dense.commands.test.recipe_with_weights', {config: stand_in}.__getitem__)
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'cache'))
    work = ['--work-dir', str(tmp_path / 'work'), '--set', *options(framework, demo_data)]
    assert main(['test', config, '--published', *work]) == 0
    printed = capsys.readouterr().out
    table = printed[printed.rindex(stand_in.weights) :].splitlines()[1:]
    assert table[0].split() == ['metric', 'published', 'measured', 'difference']
    names = {'box AP': r'bbox_mAP: (\S+)', 'mask AP': r'segm_mAP: (\S+)', 'mIoU': r'mIoU: (\S+)'}
    for (metric, value), line in zip(metrics.items(), table[1:], strict=True):
        if metric.endswith('flip)'):
            assert line.split()[1:] == [f'{value:.2f}', 'not', 'measured']
            continue
        measured = float(re.findall(names[metric], printed)[-1]) * (1 if metric == 'mIoU' else 100)
        assert line.removeprefix(metric).split() == [f'{value:.2f}', f'{measured:.2f}', f'{measured - value:+.2f}']


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
