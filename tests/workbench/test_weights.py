"""A whole model gets all of its weights from its checkpoint, or an error names what is missing."""

import logging

import pytest
import torch
from mmengine.registry import MODELS, init_default_scope

from swin_dense import CheckpointError, export_state_dict, export_whole
from swin_dense.commands._main import main
from swin_dense.workbench.predict import Predictor
from swin_dense.workbench.recipes.files import load_recipe
from swin_dense.workbench.weights import build_whole
from tests.commands.test_predict import RECIPES, make_weights
from tests.conftest import equal_weights

CLASSIFIER = 'roi_head.bbox_head.fc_cls'


@pytest.fixture(scope='module')
def model():
    init_default_scope('mmdet')
    return MODELS.build(load_recipe(RECIPES['mmdet']).model)


@pytest.fixture
def state(model):
    return dict(model.state_dict())


def without_head(state):
    return {name: tensor for name, tensor in state.items() if not name.startswith('roi_head.bbox_head')}


def of_other_classes(state):
    return {**state, f'{CLASSIFIER}.weight': torch.zeros(81, 64), f'{CLASSIFIER}.bias': torch.zeros(81)}


def saved(state, path, **more):
    torch.save({'state_dict': state, 'meta': {'dataset_meta': {'classes': ('a', 'b', 'c', 'd', 'e')}}, **more}, path)
    return str(path)


def built(path, **options):
    return build_whole(load_recipe(RECIPES['mmdet']), path, **options)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (without_head, r'does not fill the MaskRCNN of the config: of \d+ parameters 8 are missing \(roi_head.bbox_'),
        (
            of_other_classes,
            rf'2 are of another shape \({CLASSIFIER}.weight, {CLASSIFIER}.bias\), which would be random',
        ),
        (
            lambda state: of_other_classes({k: v for k, v in state.items() if 'neck' not in k}),
            'missing .* and 2 are of',
        ),
    ],
)
def test_what_is_missing_is_counted_and_named(state, tmp_path, change, message):
    path = saved(change(state), tmp_path / 'w.pth')
    with pytest.raises(CheckpointError, match=message):
        built(path)
    with pytest.raises(CheckpointError, match='allow_partial=True accepts'):
        Predictor(load_recipe(RECIPES['mmdet']), path, 'cpu')
    with pytest.raises(CheckpointError, match=message):
        export_whole(load_recipe(RECIPES['mmdet']), path, tmp_path / 'x.onnx')
    assert not (tmp_path / 'x.onnx').exists()


def test_a_partial_checkpoint_loads_if_asked_for(state, tmp_path, caplog):
    path = saved(of_other_classes(without_head(state)), tmp_path / 'w.pth')
    with caplog.at_level(logging.WARNING):
        model, meta = built(path, allow_partial=True)
    assert 'are missing' in caplog.text
    assert meta['dataset_meta']['classes'] == ('a', 'b', 'c', 'd', 'e')
    assert equal_weights(without_head(state), model.state_dict())
    backbone_alone = {name: tensor for name, tensor in state.items() if name.startswith('neck')}
    built(saved(backbone_alone, tmp_path / 'neck.pth'), allow_partial=True)


def test_other_forms_of_complete_checkpoints(model, state, tmp_path, caplog):
    """Without the dict around it, of data parallelism, with the names of the authors, and with more than the model."""
    index = 'backbone.stages.0.blocks.0.attn.w_msa.relative_position_index'  # a buffer of mmdet's own class
    authors = {f'backbone.{name}': x for name, x in export_state_dict(model.backbone, 'official').items()}
    of_authors = {**{name: x for name, x in state.items() if not name.startswith('backbone')}, **authors}
    torch.save(state, tmp_path / 'bare.pth')
    forms = [
        str(tmp_path / 'bare.pth'),
        saved({f'module.{name}': x for name, x in state.items()}, tmp_path / 'wrapped.pth'),
        saved(of_authors, tmp_path / 'authors.pth'),
        saved({**state, index: torch.zeros(49, 49, dtype=torch.int64)}, tmp_path / 'mmdet.pth'),
    ]
    for path in forms:
        assert equal_weights(state, built(path)[0].state_dict())
    assert 'ignored' not in caplog.text
    built(saved({**state, 'teacher.weight': torch.zeros(3)}, tmp_path / 'more.pth'))
    assert 'not in the model, ignored: teacher.weight' in caplog.text


def test_every_command_refuses_and_says_how_to_accept(state, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = saved(without_head(state), tmp_path / 'w.pth')
    (tmp_path / 'a.jpg').write_text('')
    for command in (
        ['predict', RECIPES['mmdet'], path, 'a.jpg'],
        ['test', RECIPES['mmdet'], path],
        ['export', RECIPES['mmdet'], path, '--out', 'x.onnx'],
    ):
        assert main(command) == 2, command
        printed = capsys.readouterr()
        assert printed.out == ''
        assert '8 are missing' in printed.err
        assert '--allow-partial accepts random values' in printed.err
    assert not (tmp_path / 'x.onnx').exists()
    assert not (tmp_path / 'predictions').exists()
    assert main(['predict', RECIPES['mmdet'], path, 'a.jpg', '--allow-partial']) == 1  # of the image, which is empty


def test_a_segmentor_of_other_classes_is_refused(tmp_path):
    make_weights('mmseg', tmp_path / 'w.pth')
    config = load_recipe(RECIPES['mmseg'])
    config.model.decode_head.num_classes = 4
    with pytest.raises(CheckpointError, match=r'2 are of another shape \(decode_head.conv_seg.weight'):
        build_whole(config, str(tmp_path / 'w.pth'))
