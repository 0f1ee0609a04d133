"""Unsupported parts of models and pipelines are refused by name, and no file is written."""

import importlib
from pathlib import Path

import pytest
import torch
from mmdet.models.dense_heads import RPNHead
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, init_default_scope

from swin_dense import export_whole
from swin_dense.commands._main import main
from swin_dense.export import ExportError
from swin_dense.workbench.export import gate
from tests.workbench.export import query_models, whole_models


@MODELS.register_module()
class MyRPNHead(RPNHead):
    """A custom head."""


def built(config):
    init_default_scope(config.default_scope)
    return MODELS.build(config.model).eval()


def config_of(name, data):
    models = query_models if name in query_models.FILES else whole_models
    return models.config_of(name, data)


def reasons_against(config):
    pipeline = config.test_dataloader.dataset.pipeline
    return '; '.join([*gate.reasons_against(built(config)), *gate.reasons_against_pipeline(pipeline)])


@pytest.mark.parametrize('name', [*whole_models.HEADS, 'upernet', *query_models.FILES])
def test_supported_models_are_not_refused(demo_data, name):
    assert not reasons_against(config_of(name, demo_data))


SOFTMAX = {'_delete_': True, 'type': 'CrossEntropyLoss', 'use_sigmoid': False}
SEESAW = {'type': 'SeesawLoss', 'num_classes': 5}
GENERIC = {'type': 'GenericRoIExtractor'}
DOUBLE = {'type': 'DoubleHeadRoIHead', 'reg_roi_scale_factor': 1.3}
POOL = {'_delete_': True, 'type': 'RoIPool', 'output_size': 7}
COARSE = {'_delete_': True, 'type': 'CoarseMaskHead', 'num_classes': 5}
SLIDE = {
    'mode': 'slide',
    'crop_size': (64, 64),
    'stride': (32, 32),
}


@pytest.mark.parametrize(
    ('name', 'key', 'value', 'message'),
    [
        ('faster_rcnn', 'test_cfg.rpn.nms.max_num', 9, 'model.test_cfg.rpn.nms has max_num=9'),
        ('faster_rcnn', 'test_cfg.rcnn.max_per_img', -1, 'must have max_per_img above 0, got -1'),
        ('mask_rcnn', 'test_cfg.rcnn.mask_thr_binary', -1, 'mask_thr_binary is below 0'),
        ('mask_rcnn', 'test_cfg.rcnn.aug', True, 'model.test_cfg.rcnn has aug=True'),
        ('mask_rcnn', 'rpn_head.type', 'MyRPNHead', 'is a MyRPNHead of tests.workbench.export.test_gate'),
        ('faster_rcnn', 'rpn_head.bbox_coder.type', 'LegacyDeltaXYWHBBoxCoder', 'is a LegacyDeltaXYWHBBoxCoder'),
        ('faster_rcnn', 'roi_head.bbox_head.bbox_coder.type', 'LegacyDeltaXYWHBBoxCoder', 'bbox_head.bbox_coder is a'),
        ('retinanet', 'bbox_head.anchor_generator.type', 'LegacyAnchorGenerator', 'is a LegacyAnchorGenerator'),
        ('retinanet', 'bbox_head.loss_cls', SOFTMAX, 'is a RetinaHead with use_sigmoid_cls=False'),
        ('faster_rcnn', 'roi_head', DOUBLE, 'model.roi_head is a DoubleHeadRoIHead'),
        ('faster_rcnn', 'roi_head.bbox_head.loss_cls', SEESAW, 'bbox_head.loss_cls is a SeesawLoss'),
        ('faster_rcnn', 'roi_head.bbox_roi_extractor', GENERIC, 'is a GenericRoIExtractor'),
        ('faster_rcnn', 'roi_head.bbox_roi_extractor.roi_layer', POOL, 'is a RoIPool'),
        ('faster_rcnn', 'roi_head.bbox_roi_extractor.roi_layer.pool_mode', 'max', "is a RoIAlign with pool_mode='max'"),
        ('mask_rcnn', 'roi_head.mask_head', COARSE, 'mask_head is a CoarseMaskHead'),
        ('upernet', 'test_cfg', SLIDE, "mode='slide'; supported: 'whole'"),
        ('upernet', 'backbone.clamp_window', True, 'model.backbone is a SwinDense with clamp_window=True'),
        ('upernet', 'decode_head.num_classes', 1, 'one output for two classes (a binary head)'),
        ('upernet', 'data_preprocessor.test_cfg', {'size': (9, 9)}, 'is a ConfigDict with size=(9, 9)'),
        ('dino', 'data_preprocessor.pad_size_divisor', 32, 'with pad_size_divisor=32; supported: 1'),
        ('maskformer', 'data_preprocessor.pad_size_divisor', 32, 'with pad_size_divisor=32; supported: 1'),
        ('deformable_detr', 'bbox_head.loss_cls', SOFTMAX, 'use_sigmoid=False'),
        ('dino', 'test_cfg.nms', {'type': 'nms'}, 'model.bbox_head.test_cfg has nms='),
        ('mask2former', 'test_cfg.semantic_on', True, 'has semantic_on=True; supported: False'),
        ('mask2former', 'test_cfg.score_thr', 0.1, 'model.panoptic_fusion_head.test_cfg has score_thr=0.1'),
        ('rtmdet', 'bbox_head.bbox_coder.type', 'TBLRBBoxCoder', 'model.bbox_head.bbox_coder is a TBLRBBoxCoder'),
        ('rtmdet', 'test_cfg.nms.type', 'soft_nms', "model.test_cfg.nms has type='soft_nms'"),
        ('mmseg_maskformer', 'data_preprocessor.test_cfg', {'size_divisor': 32}, 'with size_divisor=32'),
        ('mmseg_mask2former', 'test_cfg.mode', 'slide', "with mode='slide'; supported: 'whole'"),
    ],
)
def test_unsupported_models(demo_data, name, key, value, message):
    config = config_of(name, demo_data)
    config.merge_from_dict({f'model.{key}': ConfigDict(value) if isinstance(value, dict) else value})
    assert message in reasons_against(config)


@pytest.mark.parametrize(
    ('framework', 'path', 'message'),
    [
        ('mmdet', 'dab_detr/dab-detr_r50_8xb2-50e_coco.py', 'model is a DABDETR of mmdet'),
        ('mmdet', 'rtmdet/rtmdet-ins_tiny_8xb32-300e_coco.py', 'model.bbox_head is a RTMDetInsSepBNHead of mmdet'),
        ('mmdet', 'sabl/sabl-faster-rcnn_r50_fpn_1x_coco.py', 'model.roi_head.bbox_head is a SABLHead of mmdet'),
        ('mmseg', '_base_/models/pointrend_r50.py', 'model is a CascadeEncoderDecoder of mmseg'),
        ('mmseg', '_base_/models/encnet_r50-d8.py', 'is a EncHead, which overrides `predict`'),
    ],
)
def test_unsupported_published_models(framework, path, message):
    folder = Path(importlib.import_module(framework).__file__).parent / '.mim' / 'configs'
    config = Config.fromfile(folder / path)
    config.default_scope = framework
    for part in (config.model, config.model.backbone):
        part.pop('pretrained', None)
        part.pop('init_cfg', None)
    assert message in '; '.join(gate.reasons_against(built(config)))


@pytest.mark.parametrize(
    ('index', 'transform', 'message'),
    [
        (1, {'type': 'TestTimeAug', 'transforms': []}, 'the test pipeline has TestTimeAug'),
        (0, {'type': 'mmdet.Pad', 'size_divisor': 32}, 'the test pipeline has Pad before Resize'),
        (2, {'type': 'Pad', 'pad_to_square': True}, 'Pad of the test pipeline has pad_to_square=True'),
        (1, {'type': 'Resize', 'scale': (50, 50), 'backend': 'pillow'}, "has backend='pillow'; supported: 'cv2'"),
        (1, {'type': 'Resize', 'scale': 50, 'interpolation': 'bicubic'}, "has interpolation='bicubic'"),
        (0, {'type': 'LoadImageFromFile', 'imdecode_backend': 'pillow'}, "has imdecode_backend='pillow'"),
        (3, {'type': 'Resize', 'scale': (50, 50)}, 'has Resize 2 times'),
    ],
)
def test_unsupported_pipelines(demo_data, index, transform, message):
    config = config_of('faster_rcnn', demo_data)
    pipeline = config.test_dataloader.dataset.pipeline
    pipeline[index] = ConfigDict(transform)
    assert message in '; '.join(gate.reasons_against_pipeline(pipeline))


def test_all_reasons_are_reported_and_no_file_is_written(demo_data, tmp_path, capsys):
    config = config_of('faster_rcnn', demo_data)
    config.model.test_cfg.rcnn.nms = ConfigDict(type='soft_nms', iou_threshold=0.5)
    config.model.test_cfg.rpn.nms.class_agnostic = True
    weights, written, path = tmp_path / 'w.pth', tmp_path / 'my config.py', tmp_path / 'x.onnx'
    torch.save({'state_dict': built(config).state_dict(), 'meta': {}}, weights)
    path.write_text('of yesterday')
    with pytest.raises(ExportError, match=r'FasterRCNN .*class_agnostic.*soft_nms'):
        export_whole(config, weights, path)
    config.dump(written)
    assert main(['export', str(written), str(weights), '--out', str(path)]) == 2
    assert 'force=True' in capsys.readouterr().err
    assert main(['export', str(written), str(weights), '--out', str(path), '--force']) == 1
    assert 'soft_nms' in capsys.readouterr().err
    assert path.read_text() == 'of yesterday'
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ['my config.py', 'w.pth', 'x.onnx']


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ('mine.py mine.py --out x.pt2', '--out must end in .onnx'),
        ('mine.py mine.py --out nowhere/x.onnx', 'nowhere'),
        ('mine.py --out x.onnx', 'mine.py is a config, whose model also needs a checkpoint'),
        ('mine.py mine.py a.pth --out x.onnx', 'give CHECKPOINT for a backbone, or CONFIG CHECKPOINT for a whole'),
        (
            'mine.py mine.py --out x.onnx --half',
            'only --out, --force, --set, --image, --opset and --allow-partial are allowed',
        ),
        ('mine.py mine.py --out x.onnx --image none.jpg', 'there is no file none.jpg'),
        ('mine.py mine.py --out x.onnx --opset 9', 'opset must be at least 18'),
        ('mine.py mine.py --out x.onnx --set test_dataloader=None', 'has no test_dataloader.dataset'),
        ('--out x.ts --set a=1', '--image, --set and --allow-partial are for a whole model'),
        ('--out x.ts --image a.jpg', '--image, --set and --allow-partial are for a whole model'),
    ],
)
def test_wrong_arguments(demo_data, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    config_of('faster_rcnn', demo_data).dump('mine.py')
    assert main(['export', *words.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize('scope', [{'default_scope': 'mmpretrain'}, {}])
def test_configs_of_other_frameworks_are_refused(tmp_path, scope):
    with pytest.raises(ValueError, match=r"default_scope = 'mmdet' or 'mmseg', got ('mmpretrain'|None)"):
        export_whole(Config(scope), 'w.pth', tmp_path / 'x.onnx')


def test_wrapped_test_data_and_padding_by_the_pipeline_of_a_segmentor_are_refused(demo_data, tmp_path):
    config = config_of('faster_rcnn', demo_data)
    config.test_dataloader.dataset = {'type': 'RepeatDataset', 'dataset': {}}
    with pytest.raises(ValueError, match='dataset is a RepeatDataset without a'):
        export_whole(config, tmp_path / 'not read.pth', tmp_path / 'x.onnx')
    pipeline = [{'type': kind} for kind in ('LoadImageFromFile', 'Resize', 'Pad', 'PackSegInputs')]
    assert 'test pipeline of a segmentor has Pad' in '; '.join(gate.reasons_against_pipeline(pipeline))
