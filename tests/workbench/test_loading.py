"""A whole model gets all of its weights from its checkpoint, or an error names what is missing."""

import logging

import pytest
import torch
from mmengine.registry import MODELS, init_default_scope

from swin_dense import CheckpointError, export_state_dict, export_whole
from swin_dense.commands._main import main
from swin_dense.workbench.loading import build_whole
from swin_dense.workbench.predict import Predictor
from swin_dense.workbench.recipes.files import load_recipe
from tests.commands.test_predict import RECIPES
from tests.conftest import equal_weights

CLASSIFIER = 'roi_head.bbox_head.fc_cls'
META = {'classes': ('a', 'b', 'c', 'd', 'e')}


@pytest.fixture(scope='module')
def model():
    init_default_scope('mmdet')
    return MODELS.build(load_recipe(RECIPES['mmdet']).model)


@pytest.fixture
def state(model):
    return dict(model.state_dict())


def without_head(state):
    return {name: tensor for name, tensor in state.items() if not name.startswith('roi_head.bbox_head')}


def without_neck(state):
    return {name: tensor for name, tensor in state.items() if 'neck' not in name}


def of_other_classes(state):
    return {
        **state,
        f'{CLASSIFIER}.weight': torch.zeros(81, 64),
        f'{CLASSIFIER}.bias': torch.zeros(81),
    }


def saved(state, path):
    torch.save({'state_dict': state, 'meta': {'dataset_meta': META}}, path)
    return str(path)


def built(path, **options):
    return build_whole(load_recipe(RECIPES['mmdet']), path, **options)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (
            without_head,
            r'does not fill the MaskRCNN of the config: of its \d+ parameters, 8 are missing \(roi_head.bbox_',
        ),
        (
            of_other_classes,
            rf'2 are of another shape \({CLASSIFIER}.weight, {CLASSIFIER}.bias\), which would be random',
        ),
        (lambda state: of_other_classes(without_neck(state)), 'missing .* and 2 are of'),
    ],
)
def test_what_is_missing_is_counted_and_named(state, tmp_path, change, message):
    path, config = saved(change(state), tmp_path / 'w.pth'), load_recipe(RECIPES['mmdet'])
    with pytest.raises(CheckpointError, match=message):
        build_whole(config, path)
    with pytest.raises(CheckpointError, match='allow_partial=True accepts'):
        Predictor(config, path, 'cpu')
    with pytest.raises(CheckpointError, match=message):
        export_whole(config, path, tmp_path / 'x.onnx')
    assert not (tmp_path / 'x.onnx').exists()


def test_a_partial_checkpoint_loads_if_asked_for(state, tmp_path, caplog):
    path = saved(of_other_classes(without_head(state)), tmp_path / 'w.pth')
    with caplog.at_level(logging.WARNING):
        model, content = built(path, allow_partial=True)
    assert 'are missing' in caplog.text
    assert content['meta']['dataset_meta'] == META
    assert equal_weights(without_head(state), model.state_dict())


def test_a_preprocessor_outside_of_the_model_completes_it_as_in_mmengines_runner(state, tmp_path):
    config = load_recipe(RECIPES['mmdet'])
    mean = config.model.data_preprocessor.mean
    config.data_preprocessor = config.model.pop('data_preprocessor')
    model, _ = build_whole(config, saved(state, tmp_path / 'w.pth'))
    assert model.data_preprocessor.mean.flatten().tolist() == pytest.approx(mean)


def of_authors(state, model):
    backbone = export_state_dict(model.backbone, 'official')
    renamed = {f'backbone.{name}': tensor for name, tensor in backbone.items()}
    return {name: tensor for name, tensor in state.items() if not name.startswith('backbone')} | renamed


def test_other_forms_of_complete_checkpoints(model, state, tmp_path, caplog):
    """Without the dict around it, of data parallelism, with the names of the authors, and with more than the model."""
    index = 'backbone.stages.0.blocks.0.attn.w_msa.relative_position_index'  # a buffer of mmdet's own class
    path = tmp_path / 'w.pth'
    torch.save(state, path)
    assert equal_weights(state, built(path)[0].state_dict())
    parallel = {f'module.{name}': tensor for name, tensor in state.items()}
    with_index = {**state, index: torch.zeros(49, 49, dtype=torch.int64)}
    for form in (parallel, with_index, of_authors(state, model)):
        assert equal_weights(state, built(saved(form, path))[0].state_dict())
    assert 'ignored' not in caplog.text
    built(saved({**state, 'teacher.weight': torch.zeros(3)}, path))
    assert 'not in the model, ignored: teacher.weight' in caplog.text


@pytest.mark.parametrize('command', ['predict {} {} a.jpg', 'test {} {}', 'export {} {} --out x.onnx'])
def test_every_command_refuses_and_says_how_to_accept(state, tmp_path, capsys, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    saved(without_head(state), tmp_path / 'w.pth')
    (tmp_path / 'a.jpg').write_text('')
    data = tmp_path / 'work_dirs/demo/data/coco'  # which test looks for first
    (data / 'annotations').mkdir(parents=True)
    (data / 'annotations/instances_val2017.json').write_text('{}')
    (data / 'val2017').mkdir()
    words = command.format(RECIPES['mmdet'], 'w.pth').split()
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ''
    assert '8 are missing' in printed.err
    assert 'allow_partial=True accepts random values' in printed.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a.jpg', 'w.pth', 'work_dirs']
    if words[0] == 'predict':
        assert main([*words, '--allow-partial']) == 1  # of the image, which is empty
