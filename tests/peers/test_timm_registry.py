"""SwinDense models in timm's registry, and libraries that build models from it."""

import copy
import importlib
import pickle
import re

import pytest
import torch

from swin_dense import SwinBackbone
from swin_dense.archs.weights import published
from tests.conftest import randomize

from .peer import largest_difference, needed

timm = needed('timm')
import swin_dense.integrations.timm as ours  # noqa: E402

TINY = {'embed_dim': 16, 'depths': (2, 2, 2, 2), 'num_heads': (1, 2, 4, 8)}
IMAGE = torch.randn(2, 3, 97, 133)
# timm's descriptions of the weights of its Swins, by address.
OF_TIMM = timm.list_pretrained(exclude_filters='*dense*', filter='swin*')
TIMMS = {cfg.url: cfg for cfg in map(timm.get_pretrained_cfg, OF_TIMM)}


def create(name='swin_dense_t', seed=0, **options):
    return randomize(timm.create_model(name, **{**TINY, **options}), seed).eval()


@torch.no_grad()
@pytest.mark.parametrize('name', ['swin_dense_t', 'swinv2_dense_t'])
def test_features(name):
    model = create(name, features_only=True, in_chans=4, out_indices=(1, -1))
    maps = model(torch.randn(1, 4, 97, 133))
    assert [tuple(x.shape) for x in maps] == [(1, 32, 13, 17), (1, 128, 4, 5)]
    assert model.feature_info.channels() == [32, 128]
    assert model.feature_info.reduction() == [8, 32]
    assert model.feature_info.out_indices == (1, 3)
    for path in model.feature_info.module_name():
        model.get_submodule(path)
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert largest_difference(copied(torch.ones(1, 4, 64, 64)), model(torch.ones(1, 4, 64, 64))) == 0
    assert create(name, features_only=True, out_indices=2).feature_info.out_indices == (2, 3)


@pytest.mark.parametrize('name', list(ours.PRETRAINED))
def test_published_sizes_on_the_meta_device(name):
    with torch.device('meta'):
        model = timm.create_model(name, features_only=True, in_chans=4, out_indices=(1, -1))
    assert model.feature_info.out_indices == (1, 3)
    classifier = timm.create_model(name, device='meta', dtype=torch.bfloat16)
    weights = published()[ours.PRETRAINED[name]]
    twin = timm.create_model(TIMMS[weights.address].architecture, device='meta')
    assert pickle.loads(pickle.dumps(classifier)).num_classes == 1000
    count = sum(parameter.numel() for parameter in classifier.parameters())
    assert count == sum(parameter.numel() for parameter in twin.parameters())
    assert {parameter.device.type for parameter in (*model.parameters(), *classifier.parameters())} == {'meta'}
    assert classifier.pretrained_cfg['url'] == weights.address


def test_the_table_of_published_weights_agrees_with_timm_and_torchvision():
    """In the addresses, the sizes and the number of classes, as far as they know the weights."""
    models = importlib.import_module('torchvision.models')
    of_torchvision = {w.url: w for name in models.list_models(include='swin_*') for w in models.get_model_weights(name)}
    seen = {'Microsoft': 0, 'torchvision': 0}
    for weights in published().values():
        if weights.publisher == 'Microsoft':
            cfg = TIMMS[weights.address]
            assert cfg.input_size == (3, weights.img_size, weights.img_size)
            assert (cfg.num_classes, cfg.license) == (weights.classes, weights.licence.lower())
            assert re.search(r'window(?:\d+to)?(\d+)', cfg.architecture)[1] == str(weights.window_size)
            assert weights.arch == re.sub(r'(swinv?2?_\w)[a-z]+_.*', r'\1', cfg.architecture)
        elif weights.publisher == 'torchvision':
            entry = of_torchvision[weights.address]
            assert entry.transforms().crop_size == [weights.img_size]
            assert len(entry.meta['categories']) == weights.classes
        else:
            continue
        seen[weights.publisher] += 1
    of_authors = [address for address in TIMMS if 'SwinTransformer/storage' in address]
    assert seen == {'Microsoft': len(of_authors), 'torchvision': len(of_torchvision)}


def test_output_stride():
    assert [x.shape[2] for x in create(features_only=True, output_stride=16)(torch.rand(1, 3, 64, 64))] == [16, 8, 4, 4]
    assert create(features_only=True, output_stride=8).feature_info.reduction() == [4, 8, 8, 8]
    assert [level['reduction'] for level in create(output_stride=16).feature_info] == [4, 8, 16, 16]
    for wrong in ({'output_stride': 4}, {'out_indices': (0, 4)}, {'windw_size': 7}):
        with pytest.raises((ValueError, TypeError), match=next(iter(wrong))):
            create(features_only=True, **wrong)


@torch.no_grad()
@pytest.mark.parametrize('kind', ['own', 'timm', 'bare'])
def test_checkpoint_path(kind, tmp_path):
    if kind == 'own':
        source = create(seed=1)
    elif kind == 'timm':
        source = create('swin_tiny_patch4_window7_224', seed=1, img_size=224)
    else:
        source = randomize(SwinBackbone(embed_dims=16, **{k: TINY[k] for k in ('depths', 'num_heads')}), 1).eval()
    path = str(tmp_path / 'weights.pth')
    torch.save({'model': source.state_dict()}, path)
    features = create(seed=2, features_only=True)
    with torch.no_grad():
        loaded = timm.create_model('swin_dense_t', features_only=True, checkpoint_path=path, **TINY).eval()
    assert largest_difference(loaded(IMAGE), features(IMAGE)) > 0.01
    if kind == 'bare':
        assert largest_difference(loaded(IMAGE), source(IMAGE)) == 0
        with pytest.raises(Exception, match='head'):
            timm.create_model('swin_dense_t', checkpoint_path=path, **TINY)
        return
    classifier = timm.create_model('swin_dense_t', checkpoint_path=path, **TINY).eval()
    image = torch.randn(2, 3, 224, 224)
    assert (classifier(image) - source(image)).abs().max() < 1e-4


@torch.no_grad()
def test_pretrained_weights_of_timm(tmp_path):
    """Use pretrained=True with a local file, also with a different number of classes or channels."""
    peer = create('swin_tiny_patch4_window7_224', seed=1, num_classes=7)
    torch.save(peer.state_dict(), tmp_path / 'weights.pth')
    pretrained = {'pretrained': True, 'pretrained_cfg_overlay': {'file': tmp_path / 'weights.pth', 'num_classes': 7}}
    image = torch.randn(1, 3, 224, 224)
    same = timm.create_model('swin_dense_t', num_classes=7, **pretrained, **TINY).eval()
    assert (same(image) - peer(image)).abs().max() < 1e-4
    other = timm.create_model('swin_dense_t', num_classes=3, in_chans=1, **pretrained, **TINY).eval()
    assert other(image[:, :1]).shape == (1, 3)
    grey = image[:, :1].expand(-1, 3, -1, -1)
    assert largest_difference([other.forward_features(image[:, :1])], [same.forward_features(grey)]) < 1e-3
    features = timm.create_model('swin_dense_t', features_only=True, **pretrained, **TINY).eval()
    assert torch.equal(
        features.backbone.stages[1].blocks[0].norm1.weight, same.backbone.stages[1].blocks[0].norm1.weight
    )


def test_the_classifier_has_timms_interface():
    from timm.optim import param_groups_layer_decay

    model = create(num_classes=5, drop_rate=0.1)
    assert model(IMAGE).shape == (2, 5)
    assert model.forward_head(model.forward_features(IMAGE), pre_logits=True).shape == (2, model.num_features)
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    names = sorted({group['lr_scale'] for group in groups})
    assert len(names) == 2 + sum(TINY['depths'])
    assert sum(len(group['params']) for group in groups) == len(list(model.parameters()))
    model.set_grad_checkpointing()
    model.train()(IMAGE).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.reset_classifier(0)
    assert model.get_classifier()(IMAGE) is IMAGE
    assert timm.create_model('swin_dense_t', num_classes=0, global_pool='', **TINY)(IMAGE).shape == (2, 128, 4, 5)
    assert timm.list_models('swin*_dense_*') == sorted(ours.PRETRAINED)


@torch.no_grad()
@pytest.mark.parametrize('changed', [(), (7,), (0,), (0, ''), (5, '')], ids=str)
def test_a_classifier_with_a_replaced_head_is_saved_and_loaded(changed, tmp_path):
    """Save with timm's ``save_for_hf``."""
    from timm.models import save_for_hf

    pytest.importorskip('safetensors')
    model = create(num_classes=3, in_chans=4, output_stride=16)
    if changed:
        model.reset_classifier(*changed)
    image = torch.rand(1, 4, 64, 96)
    save_for_hf(model.eval(), tmp_path / 'timm', model_args={**TINY, 'output_stride': 16, 'in_chans': 4})
    loaded = timm.create_model(f'local-dir:{tmp_path / "timm"}', pretrained=True).eval()
    assert (loaded.num_classes, loaded.global_pool) == (model.num_classes, model.global_pool)
    assert torch.equal(loaded(image), model(image))


@torch.no_grad()
@pytest.mark.parametrize('name', ['swin_dense_t', 'swinv2_dense_t'])
def test_intermediates_equal_those_of_timm(name):
    twin = {'swin_dense_t': 'swin_tiny_patch4_window7_224', 'swinv2_dense_t': 'swinv2_tiny_window8_256'}[name]
    size = 224 if name == 'swin_dense_t' else 256
    peer, model = create(twin, seed=1).double(), create(name, seed=2).double()
    model.load_state_dict(peer.state_dict())
    image = torch.rand(1, 3, size, size, dtype=torch.float64)
    for options in ({}, {'indices': 2, 'norm': True}, {'indices': (0, -1), 'norm': True}, {'indices': [1]}):
        last, maps = model.forward_intermediates(image, **options)
        expected, theirs = peer.forward_intermediates(image, **options)
        assert largest_difference([*maps, last], [*theirs, expected.permute(0, 3, 1, 2)]) < 1e-9, options
        assert largest_difference(model.forward_intermediates(image, **options, intermediates_only=True), maps) == 0


@pytest.mark.parametrize('options', [{}, {'features_only': True}])
def test_scriptable_models_are_refused(options):
    with pytest.raises(ValueError, match=r'scriptable=True .*export_model'):
        timm.create_model('swin_dense_t', scriptable=True, **options, **TINY)


@torch.no_grad()
def test_timm_backbone_of_mmpretrain():
    backbones = needed('mmpretrain.models.backbones')
    options = {'features_only': True, 'pretrained': False, 'out_indices': (1, 3), **TINY}
    model = backbones.TIMMBackbone('swin_dense_t', **options)
    model.eval()
    assert [tuple(x.shape[1:]) for x in model(IMAGE)] == [(32, 13, 17), (128, 4, 5)]


@torch.no_grad()
def test_timm_backbone_of_transformers():
    transformers = pytest.importorskip('transformers')
    config = transformers.TimmBackboneConfig(backbone='swin_dense_t', out_indices=[0, -1], num_channels=3)
    model = transformers.TimmBackbone(config, **TINY).eval()
    assert model.channels == [16, 128]
    assert [tuple(x.shape[2:]) for x in model(IMAGE).feature_maps] == [(25, 34), (4, 5)]
