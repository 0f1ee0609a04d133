"""SwinDense in detectron2, whose Python code runs uncompiled from a clone on PYTHONPATH."""

import pickle

import pytest
import torch

from tests.conftest import TINY, equal_weights

from .detection import HEIGHT, WIDTH, scene, train, without_gradient

pytest.importorskip('detectron2', reason='put a clone of github.com/facebookresearch/detectron2 on PYTHONPATH')
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import LazyCall, get_cfg, instantiate
from detectron2.modeling import build_backbone, build_model
from detectron2.modeling.backbone.fpn import FPN, LastLevelMaxPool
from detectron2.structures import BitMasks, Boxes, Instances

from examples.detectron2_swin import D2SwinDense, D2SwinV2Dense, add_swin_config

YAML = """
MODEL:
  META_ARCHITECTURE: GeneralizedRCNN
  DEVICE: cpu
  MASK_ON: True
  PIXEL_MEAN: [0.1, 0.1, 0.1]
  PIXEL_STD: [0.3, 0.3, 0.3]
  BACKBONE: {NAME: D2SwinDense, FREEZE_AT: 2}
  SWIN: {EMBED_DIM: 16, DEPTHS: [2, 2, 2, 2], NUM_HEADS: [1, 2, 4, 8], DROP_PATH_RATE: 0.0, QK_SCALE: null, APE: True}
"""
IMAGE = torch.rand(1, 3, HEIGHT, WIDTH)


def configured(tmp_path, text=YAML):
    cfg = get_cfg()
    add_swin_config(cfg)
    (tmp_path / 'config.yaml').write_text(text)
    cfg.merge_from_file(str(tmp_path / 'config.yaml'))
    return cfg


def test_a_yaml_config(tmp_path):
    backbone = build_backbone(configured(tmp_path))
    assert isinstance(backbone, D2SwinDense)
    assert {name: (shape.channels, shape.stride) for name, shape in backbone.output_shape().items()} == {
        'res2': (16, 4), 'res3': (32, 8), 'res4': (64, 16), 'res5': (128, 32)
    }  # fmt: skip
    assert [tuple(x.shape[2:]) for x in backbone(IMAGE).values()] == [(25, 34), (13, 17), (7, 9), (4, 5)]
    assert backbone.absolute_pos_embed is not None
    assert (backbone.size_divisibility, backbone.padding_constraints) == (0, {})


@pytest.mark.parametrize(
    ('freeze_at', 'frozen'),
    [
        (0, set()),
        (1, {'patch_embed'}),
        (2, {'patch_embed', 'stages.0'}),
    ],
)
def test_freeze_at(tmp_path, freeze_at, frozen):
    backbone = build_backbone(configured(tmp_path, YAML.replace('FREEZE_AT: 2', f'FREEZE_AT: {freeze_at}')))
    names = {name for name, parameter in backbone.named_parameters() if not parameter.requires_grad}
    modules = {'.'.join(name.split('.')[: 2 if name.startswith('stages') else 1]) for name in names}
    assert modules - {'norm0', 'absolute_pos_embed'} == frozen


def test_an_unknown_key_is_named(tmp_path):
    with pytest.raises(ValueError, match='WINDOW_SISE'):
        build_backbone(configured(tmp_path, YAML.replace('APE', 'WINDOW_SISE')))


def test_a_lazy_config():
    options = {
        **TINY,
        'arch': 't',
        'out_features': ('res3', 'res5'),
        'freeze_at': 0,
    }
    lazy = LazyCall(FPN)(
        bottom_up=LazyCall(D2SwinV2Dense)(**options),
        in_features=['res3', 'res5'],
        out_channels=8,
        top_block=LazyCall(LastLevelMaxPool)(),
    )
    lazy.bottom_up.window_size = 8
    assert instantiate(lazy.bottom_up).window_size == (8, 8)
    del options['out_features']
    lazy = LazyCall(FPN)(
        bottom_up=LazyCall(D2SwinDense)(**options), in_features=['res2', 'res3', 'res4', 'res5'], out_channels=8
    )
    fpn = instantiate(lazy)
    assert fpn.size_divisibility == 32
    assert [tuple(x.shape[1:]) for x in fpn(torch.rand(1, 3, 96, 128)).values()] == [
        (8, 24, 32), (8, 12, 16), (8, 6, 8), (8, 3, 4)
    ]  # fmt: skip


@pytest.mark.slow
def test_mask_rcnn_learns_and_its_checkpoint_loads_exactly(tmp_path):
    from examples import detectron2_swin as ours

    @ours.BACKBONE_REGISTRY.register()
    def _swin_fpn(cfg, input_shape):
        bottom_up = D2SwinDense(cfg, input_shape)
        return FPN(
            bottom_up,
            ['res2', 'res3', 'res4', 'res5'],
            32,
            top_block=LastLevelMaxPool(),
        )

    levels = ['p2', 'p3', 'p4', 'p5']
    cfg = configured(tmp_path, YAML.replace('D2SwinDense', '_swin_fpn').replace('FREEZE_AT: 2', 'FREEZE_AT: 0'))
    cfg.MODEL.RPN.IN_FEATURES = [*levels, 'p6']
    cfg.MODEL.ANCHOR_GENERATOR.SIZES = [
        [16],
        [32],
        [64],
        [128],
        [256],
    ]
    cfg.MODEL.ROI_HEADS.IN_FEATURES = levels
    cfg.MODEL.ROI_HEADS.NAME = 'StandardROIHeads'
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = 3
    cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE = 64
    cfg.MODEL.ROI_BOX_HEAD.NAME = 'FastRCNNConvFCHead'
    cfg.MODEL.ROI_BOX_HEAD.NUM_FC = 1
    cfg.MODEL.ROI_BOX_HEAD.FC_DIM = 128
    cfg.MODEL.ROI_MASK_HEAD.NAME = 'MaskRCNNConvUpsampleHead'
    cfg.MODEL.ROI_MASK_HEAD.NUM_CONV = 1
    cfg.MODEL.ROI_MASK_HEAD.CONV_DIM = 32
    torch.manual_seed(0)
    model = build_model(cfg).train()
    image, target = scene()
    instances = Instances((HEIGHT, WIDTH))
    instances.gt_boxes, instances.gt_classes = Boxes(target['boxes']), target['labels']
    instances.gt_masks = BitMasks(target['masks'])

    from detectron2.utils.events import EventStorage

    def losses():
        with EventStorage():
            return model([{'image': image, 'instances': instances}])

    done = train(model, losses)
    assert not without_gradient(model)
    assert done[-1] < done[0] / 3, done

    with (tmp_path / 'model.pkl').open('wb') as file:
        weights = {key: value.numpy() for key, value in model.state_dict().items()}
        pickle.dump({'model': weights, '__author__': 'a test'}, file)
    other = build_model(cfg)
    DetectionCheckpointer(other).load(str(tmp_path / 'model.pkl'))
    assert equal_weights(model, other)
    with torch.no_grad():
        (found,) = other.eval()([{'image': image}])
    assert len(found['instances']) > 0
