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


def of_smp_with_timm(path, prefix):
    smp = needed('segmentation_models_pytorch')
    import swin_dense.integrations.timm  # noqa: F401

    unet = smp.Unet('tu-swin_dense_t', encoder_weights=None, checkpoint_path=str(path), prefix=prefix, **TINY)
    return unet.encoder.model.backbone


def of_detectron2(path, prefix):
    pytest.importorskip('detectron2', reason='put a clone of github.com/facebookresearch/detectron2 on PYTHONPATH')
    from detectron2.config import CfgNode, get_cfg
    from detectron2.modeling import build_backbone

    from examples.detectron2_swin import add_swin_config

    cfg = get_cfg()
    add_swin_config(cfg)
    cfg.MODEL.BACKBONE.NAME = 'D2SwinDense'
    sizes = {'EMBED_DIM': 16, 'DEPTHS': [2, 2, 2, 2], 'NUM_HEADS': [1, 2, 4, 8]}
    cfg.MODEL.SWIN = CfgNode({**sizes, 'CHECKPOINT': str(path), 'PREFIX': prefix})
    return build_backbone(cfg)


ADAPTERS = [of_timm, of_smp_with_timm, of_detectron2]


@pytest.mark.parametrize('adapter', ADAPTERS)
def test_the_prefix_chooses_the_backbone(adapter, tmp_path):
    both = {name: randomize(SwinBackbone('t', **TINY), seed) for seed, name in enumerate(('student', 'teacher'))}
    path = tmp_path / 'both.pth'
    torch.save({name: {'backbone': backbone.state_dict()} for name, backbone in both.items()}, path)
    loaded, expected = adapter(path, 'teacher').state_dict(), both['teacher'].state_dict()
    assert equal_weights(loaded, expected)
    assert expected.keys() - loaded.keys() <= {
        f'norm{stage}.{leaf}' for stage in range(3) for leaf in ('weight', 'bias')
    }
