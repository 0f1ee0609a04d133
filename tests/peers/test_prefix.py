"""Every adapter chooses one of several backbones in a checkpoint by its prefix."""

import pytest
import torch

from swin_dense import SwinBackbone, load_checkpoint
from tests.conftest import TINY, equal_weights, randomize

from .peer import needed


def of_torchvision(path, prefix):
    needed('torchvision')
    from swin_dense.integrations.torchvision import SwinFPN

    return SwinFPN('swin_t', path, prefix=prefix, **TINY).body


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


def of_smp(path, prefix):
    smp = needed('segmentation_models_pytorch')
    from swin_dense.integrations.smp import SwinDenseEncoder

    assert smp.encoders.encoders['swin_dense_t']['encoder'] is SwinDenseEncoder
    backbone = SwinDenseEncoder('swin', 't', **TINY).backbone
    load_checkpoint(backbone, path, prefix=prefix)
    return backbone


def of_detectron2(path, prefix):
    pytest.importorskip('detectron2', reason='put a clone of github.com/facebookresearch/detectron2 on PYTHONPATH')
    from detectron2.config import CfgNode, get_cfg
    from detectron2.modeling import build_backbone

    from swin_dense.integrations.detectron2 import add_swin_config

    cfg = get_cfg()
    add_swin_config(cfg)
    cfg.MODEL.BACKBONE.NAME = 'D2SwinDense'
    sizes = {'EMBED_DIM': 16, 'DEPTHS': [2, 2, 2, 2], 'NUM_HEADS': [1, 2, 4, 8]}
    cfg.MODEL.SWIN = CfgNode({**sizes, 'CHECKPOINT': str(path), 'PREFIX': prefix})
    return build_backbone(cfg)


def of_transformers(path, prefix):
    tf = needed('transformers')
    from swin_dense.integrations.transformers import SwinDenseBackbone

    sizes = {'embed_dim': 16, 'depths': [2, 2, 2, 2], 'num_heads': [1, 2, 4, 8]}
    tf.SwinConfig(**sizes).save_pretrained(path.parent)
    path.rename(path.with_name('pytorch_model.bin'))
    return SwinDenseBackbone.from_pretrained(path.parent, prefix=prefix).backbone


ADAPTERS = [of_torchvision, of_timm, of_smp_with_timm, of_smp, of_detectron2, of_transformers]


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


def test_a_prefix_is_refused_where_transformers_loads_its_own_files(tmp_path):
    needed('transformers')
    from swin_dense.integrations.transformers import SwinDenseBackbone, SwinDenseConfig

    SwinDenseBackbone(SwinDenseConfig('swin_t', **TINY)).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match=r'prefix .* of transformers only'):
        SwinDenseBackbone.from_pretrained(tmp_path, prefix='teacher')
