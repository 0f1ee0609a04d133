"""SwinDense models in timm's registry, and libraries that build models from it."""

import copy
import importlib
import pickle
import re

import pytest
import torch

from swin_dense import SwinBackbone
from swin_dense.archs.published import published
from tests.conftest import equal_weights, randomize

from .peer import largest_difference, needed

timm = needed('timm')
import swin_dense.integrations.timm as ours  # noqa: E402

TINY = {
    'embed_dim': 16,
    'depths': (2, 2, 2, 2),
    'num_heads': (1, 2, 4, 8),
}
IMAGE = torch.randn(2, 3, 97, 133)
# timm's descriptions of the weights of its Swins, by address.
OF_TIMM = timm.list_pretrained(exclude_filters='*dense*', filter='swin*')
TIMMS = {cfg.url: cfg for cfg in map(timm.get_pretrained_cfg, OF_TIMM)}


def create(name='swin_dense_t', seed=0, **options):
    return randomize(timm.create_model(name, **{**TINY, **options}), seed).eval()


@torch.no_grad()
@pytest.mark.parametrize('name', ['swin_dense_t', 'swinv2_dense_t'])
def test_features(name):
    model = create(
        name,
        features_only=True,
        in_chans=4,
        out_indices=(1, -1),
    )
    first, last = model(torch.randn(1, 4, 97, 133))
    assert first.shape == (1, 32, 13, 17)
    assert last.shape == (1, 128, 4, 5)
    info = model.feature_info
    assert info.channels() == [32, 128]
    assert info.reduction() == [8, 32]
    assert info.out_indices == (1, 3)
    for path in info.module_name():
        model.get_submodule(path)
    image = torch.ones(1, 4, 64, 64)
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert largest_difference(copied(image), model(image)) == 0
    last_two = create(name, features_only=True, out_indices=2)
    assert last_two.feature_info.out_indices == (2, 3)


def parameters_of(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize('name', list(ours.PRETRAINED))
def test_published_sizes_on_the_meta_device(name):
    weights = published()[ours.PRETRAINED[name]]
    classifier = timm.create_model(name, device='meta', dtype=torch.bfloat16)
    twin = timm.create_model(TIMMS[weights.address].architecture, device='meta')
    assert parameters_of(classifier) == parameters_of(twin)
    with torch.device('meta'):
        features = timm.create_model(name, features_only=True, in_chans=4)
    for parameter in (*classifier.parameters(), *features.parameters()):
        assert parameter.device.type == 'meta'
    assert classifier.pretrained_cfg['url'] == weights.address
    assert pickle.loads(pickle.dumps(classifier)).num_classes == 1000


def test_the_table_of_published_weights_agrees_with_timm_and_torchvision():
    """In the addresses, the sizes and the number of classes, as far as they know the weights."""
    models = importlib.import_module('torchvision.models')
    of_torchvision = {}
    for name in models.list_models(include='swin_*'):
        for entry in models.get_model_weights(name):
            of_torchvision[entry.url] = entry
    seen = {'Microsoft': 0, 'torchvision': 0}
    for weights in published().values():
        if weights.publisher == 'Microsoft':
            cfg = TIMMS[weights.address]
            assert cfg.input_size == (3, weights.img_size, weights.img_size)
            assert cfg.pool_size == (weights.img_size // 32, weights.img_size // 32)
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
    model = create(features_only=True, output_stride=16)
    maps = model(torch.rand(1, 3, 64, 64))
    assert [x.shape[2] for x in maps] == [16, 8, 4, 4]
    assert create(features_only=True, output_stride=8).feature_info.reduction() == [4, 8, 8, 8]
    levels = create(output_stride=16).feature_info
    assert [level['reduction'] for level in levels] == [4, 8, 16, 16]


@pytest.mark.parametrize(
    'wrong',
    [
        {'output_stride': 4},
        {'out_indices': (0, 4)},
        {'windw_size': 7},
    ],
)
def test_wrong_options_are_named(wrong):
    (name,) = wrong
    with pytest.raises((ValueError, TypeError), match=name):
        create(features_only=True, **wrong)


def test_a_wrong_number_of_stages():
    with pytest.raises(ValueError, match='a number of stages from 1 to 4, or stages between -4 and 3, got 0'):
        create(features_only=True, out_indices=0)


def saved(model, path):
    torch.save({'model': model.state_dict()}, path)
    return str(path)


@torch.no_grad()
@pytest.mark.parametrize('name', ['swin_dense_t', 'swin_tiny_patch4_window7_224'])
def test_checkpoint_path_of_a_classifier(name, tmp_path):
    source = create(name, seed=1, img_size=224) if name.endswith('224') else create(name, seed=1)
    path = saved(source, tmp_path / 'weights.pth')
    classifier = timm.create_model('swin_dense_t', checkpoint_path=path, **TINY).eval()
    image = torch.randn(2, 3, 224, 224)
    assert (classifier(image) - source(image)).abs().max() < 1e-4
    features = timm.create_model('swin_dense_t', features_only=True, checkpoint_path=path, **TINY)
    assert equal_weights(features.backbone.stages, classifier.backbone.stages)


@torch.no_grad()
@pytest.mark.parametrize('classes', [5, 7])
def test_without_strict_the_head_is_loaded_if_it_has_the_same_classes(classes):
    peer = create('swin_tiny_patch4_window7_224', seed=1, num_classes=5)
    classifier = create(num_classes=classes, seed=2)
    head = classifier.head.weight.clone() if classes == 7 else peer.head.fc.weight
    classifier.load_state_dict(peer.state_dict(), strict=False)
    image = torch.randn(2, 3, 224, 224)
    pooled = peer.forward_head(peer.forward_features(image), pre_logits=True)
    assert (classifier.forward_head(classifier.forward_features(image), pre_logits=True) - pooled).abs().max() < 1e-4
    assert torch.equal(classifier.head.weight, head)


@torch.no_grad()
def test_checkpoint_path_of_a_backbone(tmp_path):
    sizes = {'embed_dims': 16, 'depths': TINY['depths'], 'num_heads': TINY['num_heads']}
    source, teacher = (randomize(SwinBackbone(**sizes), seed).eval() for seed in (1, 2))
    path = saved(source, tmp_path / 'weights.pth')
    loaded = timm.create_model('swin_dense_t', features_only=True, checkpoint_path=path, **TINY).eval()
    assert largest_difference(loaded(IMAGE), source(IMAGE)) == 0
    with pytest.raises(Exception, match='head'):
        timm.create_model('swin_dense_t', checkpoint_path=path, **TINY)
    path = saved(torch.nn.ModuleDict({'student': source, 'teacher': teacher}), tmp_path / 'both.pth')
    options = {'checkpoint_path': path, 'prefix': 'teacher', **TINY}
    loaded = timm.create_model('swin_dense_t', features_only=True, **options).eval()
    assert largest_difference(loaded(IMAGE), teacher(IMAGE)) == 0


@torch.no_grad()
def test_pretrained_weights_of_timm(tmp_path):
    """Use pretrained=True with a local file, also with a different number of classes or channels."""
    peer = create('swin_tiny_patch4_window7_224', seed=1, num_classes=7)
    torch.save(peer.state_dict(), tmp_path / 'weights.pth')
    cfg = {'file': tmp_path / 'weights.pth', 'num_classes': 7}

    def pretrained(**options):
        options = {'pretrained': True, 'pretrained_cfg_overlay': cfg, **TINY, **options}
        return timm.create_model('swin_dense_t', **options).eval()

    image = torch.randn(1, 3, 224, 224)
    same = pretrained(num_classes=7)
    assert (same(image) - peer(image)).abs().max() < 1e-4
    other = pretrained(num_classes=3, in_chans=1)
    one_channel = image[:, :1]
    assert other(one_channel).shape == (1, 3)
    expected = same.forward_features(
        one_channel.expand(
            -1,
            3,
            -1,
            -1,
        )
    )
    assert largest_difference([other.forward_features(one_channel)], [expected]) < 1e-3
    features = pretrained(features_only=True)
    assert equal_weights(features.backbone.stages, same.backbone.stages)


def test_the_classifier_has_timms_interface():
    from timm.optim import param_groups_layer_decay

    model = create(num_classes=5, drop_rate=0.1)
    assert model(IMAGE).shape == (2, 5)
    features = model.forward_features(IMAGE)
    assert model.forward_head(features, pre_logits=True).shape == (2, model.num_features)
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    scales = {group['lr_scale'] for group in groups}
    assert len(scales) == 2 + sum(TINY['depths'])
    assert sum(len(group['params']) for group in groups) == len(list(model.parameters()))
    model.set_grad_checkpointing()
    model.train()(IMAGE).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.reset_classifier(0)
    assert model.get_classifier()(IMAGE) is IMAGE
    without_head = create(num_classes=0, global_pool='')
    assert without_head(IMAGE).shape == (2, 128, 4, 5)
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
    save_for_hf(
        model.eval(),
        tmp_path / 'timm',
        model_args={**TINY, 'output_stride': 16, 'in_chans': 4},
    )
    loaded = timm.create_model(f'local-dir:{tmp_path / "timm"}', pretrained=True).eval()
    assert (loaded.num_classes, loaded.global_pool) == (model.num_classes, model.global_pool)
    assert torch.equal(loaded(image), model(image))


@torch.no_grad()
@pytest.mark.parametrize(
    ('name', 'twin', 'size'),
    [
        ('swin_dense_t', 'swin_tiny_patch4_window7_224', 224),
        ('swinv2_dense_t', 'swinv2_tiny_window8_256', 256),
    ],
)
def test_intermediates_equal_those_of_timm(name, twin, size):
    peer, model = create(twin, seed=1).double(), create(name, seed=2).double()
    model.load_state_dict(peer.state_dict())
    image = torch.rand(1, 3, size, size, dtype=torch.float64)
    for options in (
        {},
        {'indices': 2, 'norm': True},
        {'indices': (0, -1), 'norm': True},
        {'indices': [1]},
    ):
        last, maps = model.forward_intermediates(image, **options)
        expected, theirs = peer.forward_intermediates(image, **options)
        assert largest_difference([*maps, last], [*theirs, expected.permute(0, 3, 1, 2)]) < 1e-9, options
        alone = model.forward_intermediates(image, **options, intermediates_only=True)
        assert largest_difference(alone, maps) == 0


@pytest.mark.parametrize('options', [{}, {'features_only': True}])
def test_scriptable_models_are_refused(options):
    with pytest.raises(ValueError, match=r'scriptable=True .*export_model'):
        timm.create_model('swin_dense_t', scriptable=True, **options, **TINY)


@torch.no_grad()
def test_timm_backbone_of_mmpretrain():
    backbones = needed('mmpretrain.models.backbones')
    options = {
        'features_only': True,
        'pretrained': False,
        'out_indices': (1, 3),
        **TINY,
    }
    model = backbones.TIMMBackbone('swin_dense_t', **options)
    model.eval()
    first, last = model(IMAGE)
    assert first.shape[1:] == (32, 13, 17)
    assert last.shape[1:] == (128, 4, 5)
