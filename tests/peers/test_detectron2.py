"""SwinDense in detectron2, whose Python code runs uncompiled from a clone on PYTHONPATH."""

import pickle

import numpy as np
import pytest
import torch

from swin_dense import CheckpointError, SwinBackbone, export_state_dict
from tests.conftest import TINY, equal_weights, randomize

from .detection import HEIGHT, WIDTH

pytest.importorskip('detectron2', reason='put a clone of github.com/facebookresearch/detectron2 on PYTHONPATH')
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import LazyCall, get_cfg, instantiate
from detectron2.modeling import build_backbone
from detectron2.modeling.backbone.fpn import FPN, LastLevelMaxPool

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


def test_an_unknown_key_is_named_and_a_prefix_chooses_a_backbone(tmp_path):
    with pytest.raises(ValueError, match='WINDOW_SISE'):
        build_backbone(configured(tmp_path, YAML.replace('APE', 'WINDOW_SISE')))
    teacher = randomize(SwinBackbone('t', **TINY))
    both = torch.nn.ModuleDict({'student': SwinBackbone('t', **TINY), 'teacher': teacher})
    torch.save(both.state_dict(), tmp_path / 'both.pth')
    chosen = f'APE: False, CHECKPOINT: {tmp_path}/both.pth, PREFIX: teacher'
    assert equal_weights(build_backbone(configured(tmp_path, YAML.replace('APE: True', chosen))), teacher)


def test_a_file_of_a_backbone_that_detectron2_would_match_by_the_ends_of_names(tmp_path):
    """Mask2Former's script writes such files; detectron2 gives its last norm to another layer, with a warning."""
    source = randomize(SwinBackbone('t', **TINY))
    weights = {
        name: weight.numpy()
        for name, weight in export_state_dict(source, 'official').items()
        if not name.startswith('norm')
    }
    weights |= {'norm.weight': np.ones(128, np.float32), 'norm.bias': np.ones(128, np.float32)}
    file = {'model': weights, '__author__': 'third_party', 'matching_heuristics': True}
    (tmp_path / 'swin.pkl').write_bytes(pickle.dumps(file))
    text = YAML.replace('APE: True', 'APE: False')
    chosen = f'APE: False, CHECKPOINT: {tmp_path}/swin.pkl'
    loaded = dict(build_backbone(configured(tmp_path, YAML.replace('APE: True', chosen))).named_parameters())
    for name, weight in source.named_parameters():
        assert name.startswith('norm') or torch.equal(loaded[name], weight)
    model = torch.nn.ModuleDict({'backbone': build_backbone(configured(tmp_path, text))})
    with pytest.raises(CheckpointError, match='no parameters of a Swin Transformer were found'):
        DetectionCheckpointer(model).load(str(tmp_path / 'swin.pkl'))


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
