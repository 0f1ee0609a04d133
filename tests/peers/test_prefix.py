"""Every adapter chooses one of several backbones in a checkpoint by its prefix."""

import pytest
import torch

from swin_dense import SwinBackbone
from tests.conftest import TINY, equal_weights, randomize

from .peer import needed


def of_timm(path, prefix):
    timm = needed('timm')
    import swin_dense.integrations.timm  # noqa: F401

    return timm.create_model(
        'swin_dense_t', features_only=True, checkpoint_path=str(path), prefix=prefix, **TINY
    ).backbone


def of_detectron2(path, prefix):
    pytest.importorskip('detectron2', reason='put a clone of github.com/facebookresearch/detectron2 on PYTHONPATH')
    from detectron2.config import CfgNode, get_cfg
    from detectron2.modeling import build_backbone

    from examples.detectron2_swin import add_swin_config

    cfg = get_cfg()
    add_swin_config(cfg)
    cfg.MODEL.BACKBONE.NAME = 'D2SwinDense'
    sizes = {
        'EMBED_DIM': 16,
        'DEPTHS': [2, 2, 2, 2],
        'NUM_HEADS': [1, 2, 4, 8],
    }
    cfg.MODEL.SWIN = CfgNode(
        {
            **sizes,
            'CHECKPOINT': str(path),
            'PREFIX': prefix,
        }
    )
    return build_backbone(cfg)


@pytest.mark.parametrize('adapter', [of_timm, of_detectron2])
def test_the_prefix_chooses_the_backbone(adapter, tmp_path):
    student = randomize(SwinBackbone('t', **TINY), 0).state_dict()
    teacher = randomize(SwinBackbone('t', **TINY), 1).state_dict()
    path = tmp_path / 'both.pth'
    torch.save({'student': {'backbone': student}, 'teacher': {'backbone': teacher}}, path)
    loaded = adapter(path, 'teacher').state_dict()
    assert equal_weights(loaded, teacher)
    missing = teacher.keys() - loaded.keys()
    assert {name.split('.')[0] for name in missing} <= {'norm0', 'norm1', 'norm2'}
