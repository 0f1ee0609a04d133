"""Load checkpoints of mmdet and mmseg models, save for them, and load into models with additional modules."""

import mmdet.models.backbones  # noqa: F401  registers them
import pytest
import torch
from mmengine.logging import MessageHub
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_checkpoint as load_by_mmengine

from swin_dense import CheckpointError, SwinDense
from swin_dense.recipes.files import load_recipe
from tests.conftest import TINY, equal_weights, randomize
from tests.mm.demo import with_tiny_swin


def tiny(name, kind, seed, **options):
    """Build the model of a recipe with a tiny Swin of type ``kind`` and random weights."""
    config = load_recipe(name)
    init_default_scope(config.default_scope)
    with_tiny_swin(config.model, type=kind, **options)
    return randomize(MODELS.build(config.model), seed)


def detector(kind, seed, **options):
    return tiny('mask-rcnn_swin-t-p4-w7_fpn_1x_coco', kind, seed, **options).eval()


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    """Save a detector with SwinDense and return the path."""
    path = tmp_path_factory.mktemp('detector') / 'epoch_1.pth'
    torch.save({'state_dict': detector('SwinDense', 1).state_dict()}, path)
    return str(path)


def backbone_of(path):
    state = torch.load(path)['state_dict']
    return {name.removeprefix('backbone.'): x for name, x in state.items() if name.startswith('backbone.')}


@pytest.mark.parametrize(
    'name',
    [
        'mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco',
        'mask2former_swin-t_8xb2-160k_ade20k-512x512',
        'dino-5scale_swin-l_8xb2-12e_coco',
    ],
)
def test_load_from_loads_all_weights_of_a_published_query_based_model(name, tmp_path):
    """The file is a training checkpoint with the framework's Swin, including heads, message hub and optimiser."""
    theirs, ours = tiny(name, 'SwinTransformer', 1), tiny(name, 'SwinDense', 2)
    hub = MessageHub.get_instance('published')
    hub.update_scalar('train/loss', 1.0)
    checkpoint = {
        'meta': {'epoch': 12, 'dataset_meta': {'classes': ('person',)}, 'time': '20220508'},
        'state_dict': theirs.state_dict(),
        'message_hub': hub.state_dict(),
        'optimizer': torch.optim.AdamW(theirs.parameters()).state_dict(),
    }
    torch.save(checkpoint, tmp_path / 'published.pth')
    load_by_mmengine(ours, str(tmp_path / 'published.pth'))
    expected = {k: x for k, x in theirs.state_dict().items() if not k.endswith('relative_position_index')}
    found = ours.state_dict()
    assert found.keys() == expected.keys()
    assert equal_weights(expected, found)


@torch.no_grad()
def test_a_detector_with_swin_dense_loads_into_mmdets(saved):
    theirs, ours = detector('SwinTransformer', 2), detector('SwinDense', 1)
    missing, unexpected = theirs.load_state_dict(torch.load(saved)['state_dict'], strict=False)
    assert all(name.endswith('.relative_position_index') for name in missing)
    assert not unexpected
    image = torch.randn(1, 3, 67, 93)
    for a, b in zip(ours.extract_feat(image), theirs.extract_feat(image), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


@pytest.mark.parametrize(
    'part',
    [
        lambda name: not name.startswith('backbone'),
        lambda name: 'stages.3' not in name,
        lambda name: 'qkv.weight' not in name,
    ],
    ids=['heads alone', 'a stage missing', 'a layer missing'],
)
def test_allow_partial_in_the_config_accepts_parts(saved, tmp_path, part):
    state = {name: x for name, x in torch.load(saved)['state_dict'].items() if part(name)}
    torch.save({'state_dict': state}, tmp_path / 'part.pth')
    with pytest.raises(CheckpointError, match='allow_partial=True as an option'):
        load_by_mmengine(detector('SwinDense', 2), str(tmp_path / 'part.pth'))
    model = detector('SwinDense', 2, allow_partial=True)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    load_by_mmengine(model, str(tmp_path / 'part.pth'))
    assert all(torch.equal(x, state.get(name, before[name])) for name, x in model.state_dict().items())


def test_allow_partial_also_applies_to_init_cfg(saved, tmp_path):
    state = {name: x for name, x in backbone_of(saved).items() if 'stages.3' not in name}
    torch.save(state, tmp_path / 'part.pth')
    init_cfg = {'type': 'Pretrained', 'checkpoint': str(tmp_path / 'part.pth')}
    with pytest.raises(CheckpointError):
        SwinDense(**TINY, init_cfg=init_cfg).init_weights()
    backbone = SwinDense(**TINY, init_cfg=init_cfg, allow_partial=True)
    backbone.init_weights()
    assert torch.equal(backbone.norm0.weight, state['norm0.weight'])
    with pytest.raises(TypeError, match='allow_partial must be True or False'):
        SwinDense(**TINY, allow_partial=1)
