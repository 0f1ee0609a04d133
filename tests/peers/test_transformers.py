import pytest
import torch
from safetensors.torch import load_file

from swin_dense.checkpoint import export_state_dict, load_checkpoint
from tests.conftest import randomize

from .peer import IMAGE_SIZE, IMAGES, build, largest_difference, needed, prepared, transformers_swin

needed('transformers')


@torch.no_grad()
@pytest.mark.parametrize(
    'options',
    [
        {},
        {'use_absolute_embeddings': True},
        {'qkv_bias': False},
    ],
)
def test_backbone(options):
    ours = {
        'use_abs_pos_embed': options.get('use_absolute_embeddings', False),
        'pretrain_img_size': IMAGE_SIZE,
        'qkv_bias': options.get('qkv_bias', True),
    }
    backbone, peer = build(1, **ours), prepared(transformers_swin(**options), 2)
    report = load_checkpoint(backbone, peer.state_dict(), log=None)
    assert report.family == 'transformers'
    assert not report.missing
    assert largest_difference(backbone(IMAGES), peer(IMAGES).feature_maps) < 1e-9
    randomize(backbone, 3)
    missing, unexpected = peer.load_state_dict(export_state_dict(backbone, 'transformers'), strict=False)
    assert set(missing) == {'swin.layernorm.weight', 'swin.layernorm.bias'}
    assert not unexpected
    assert largest_difference(backbone(IMAGES), peer(IMAGES).feature_maps) < 1e-9


def last_map_is_equal(backbone, peer):
    expected = peer.swin(IMAGES).last_hidden_state
    return (backbone(IMAGES)[-1].flatten(2).transpose(1, 2) - expected).abs().max() < 1e-9


@torch.no_grad()
@pytest.mark.parametrize('size', ['50KB', '1GB'])
def test_folders_and_files_of_save_pretrained(tmp_path, size):
    """Several shards load by their folder, one file by its path; it has the names of earlier versions."""
    backbone, peer = build(1), prepared(transformers_swin(kind='ForImageClassification'), 2)
    peer.save_pretrained(tmp_path, max_shard_size=size)
    place = tmp_path
    if size == '1GB':
        place = tmp_path / 'model.safetensors'
        assert any('attention.self.query' in key for key in load_file(place))
    else:
        assert (tmp_path / 'model.safetensors.index.json').exists()
    report = load_checkpoint(backbone, place, final_norm=True, log=None)
    assert (report.family, report.unexpected) == ('transformers', [])
    assert last_map_is_equal(backbone, peer)


@torch.no_grad()
def test_parts_of_masked_image_modelling_are_left_out():
    backbone, peer = build(1), prepared(transformers_swin(kind='ForMaskedImageModeling'), 2)
    report = load_checkpoint(backbone, peer.state_dict(), final_norm=True, log=None)
    assert report.left_out['swin.embeddings.mask_token'] == 'mask token of the pretraining'
    assert not report.unexpected
    assert last_map_is_equal(backbone, peer)
