"""Networks of transformers and timm as teachers: maps where the library puts them, of images as it normalises them."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F

from swin_dense import FeatureDistillation, SwinBackbone
from swin_dense.pretraining.teacher_sources import load_teacher
from swin_dense.pretraining.teachers import teacher_of
from tests.conftest import TINY, equal_weights, randomize

from .peer import needed

MEAN, STD = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
VIT = {'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 2}


def images(height, width):
    return torch.rand(2, 3, height, width, generator=torch.Generator().manual_seed(0))


def transformers_model(name, config, **options):
    transformers = needed('transformers')
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**options)).eval()


def check(network, img, expected, strides):
    """Compare the maps of a teacher, and train with it; it must not change."""
    teacher = teacher_of(network)
    assert teacher.out_strides == tuple(strides)
    maps = teacher(img)
    assert [tuple(one.shape) for one in maps] == [tuple(one.shape) for one in expected]
    torch.testing.assert_close(maps, list(expected), atol=1e-4, rtol=1e-4)
    assert not any(one.requires_grad for one in maps)
    before = copy.deepcopy(network.state_dict())
    model = FeatureDistillation(SwinBackbone(**TINY, window_size=4), network, mean=None, std=None).train()
    randomize(model.heads)
    model(img)['loss_features'].backward()
    assert all(p.grad is not None for p in model.parameters())
    assert not any('teacher' in name for name in model.state_dict())
    assert not network.training
    assert equal_weights(network, before)
    return teacher


@pytest.mark.parametrize(
    ('name', 'config', 'options', 'special'),
    [
        ('Dinov2Model', 'Dinov2Config', {'image_size': 56, 'patch_size': 14}, 1),
        ('Dinov2WithRegistersModel', 'Dinov2WithRegistersConfig', {'image_size': 56, 'num_register_tokens': 4}, 5),
        ('DINOv3ViTModel', 'DINOv3ViTConfig', {'num_register_tokens': 4, 'intermediate_size': 64}, 5),
    ],
)
def test_vits_of_transformers(name, config, options, special):
    """At a size that is no multiple of the patch; the tokens of class and registers come first."""
    network = transformers_model(name, config, **VIT, **options)
    patch, img = network.config.patch_size, images(74, 60)
    rows, columns = {14: (5, 4), 16: (5, 4)}[patch]
    whole = F.interpolate(img, (rows * patch, columns * patch), mode='bilinear', antialias=True)
    with torch.no_grad():
        tokens = network(pixel_values=(whole - MEAN) / STD).last_hidden_state
    assert tokens.shape[1] == special + rows * columns
    expected = tokens[:, special:].reshape(2, rows, columns, 32).permute(0, 3, 1, 2)
    check(network, img, [expected], [patch])


def check_convnext(network, stem, stages):
    img = images(74, 90)
    whole = F.interpolate(img, (64, 96), mode='bilinear', antialias=True)
    expected = []
    with torch.no_grad():
        x = stem((whole - MEAN) / STD)
        for stage in stages:
            x = stage(x)
            expected.append(x)
    check(network, img, expected, [4, 8, 16, 32])


def test_convnext_of_dinov3():
    network = transformers_model(
        'DINOv3ConvNextModel', 'DINOv3ConvNextConfig', hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]
    )
    check_convnext(network, torch.nn.Identity(), (network.model if hasattr(network, 'model') else network).stages)


@pytest.mark.parametrize('name', ['SamVisionModel', 'SamModel'])
def test_sam(name):
    """Its images have one size."""
    vision = {**VIT, 'image_size': 64, 'patch_size': 16, 'output_channels': 24, 'mlp_dim': 64, 'window_size': 2}
    vision['global_attn_indexes'] = [1]
    if name == 'SamVisionModel':
        network = transformers_model(name, 'SamVisionConfig', **vision)
    else:
        sizes = {'hidden_size': 24, 'image_size': 64, 'patch_size': 16, 'image_embedding_size': 4}
        decoder = {
            'hidden_size': 24,
            'mlp_dim': 32,
            'num_hidden_layers': 1,
            'iou_head_hidden_dim': 24,
            'num_attention_heads': 2,
        }
        options = {'vision_config': vision, 'prompt_encoder_config': sizes, 'mask_decoder_config': decoder}
        network = transformers_model(name, 'SamConfig', **options)
    img = images(50, 90)
    whole = F.interpolate(img, (64, 64), mode='bilinear', antialias=True)
    with torch.no_grad():
        expected = network.vision_encoder((whole - MEAN) / STD).last_hidden_state
    teacher = check(network, img, [expected], [16])
    assert teacher.input_size(50, 90) == (64, 64)


@pytest.mark.parametrize('is_wrapped', [False, True])
@pytest.mark.parametrize(
    ('name', 'options', 'size'),
    [
        ('vit_tiny_patch16_224', {'img_size': 48}, (48, 48)),
        ('vit_tiny_patch16_224', {'img_size': 48, 'dynamic_img_size': True}, (80, 64)),
        ('vit_small_patch14_dinov2', {'img_size': 56, 'dynamic_img_size': True}, (70, 56)),
        ('vit_small_patch16_dinov3', {'img_size': 48}, (80, 64)),
    ],
)
def test_vits_of_timm(name, options, size, is_wrapped):
    """Their statistics are timm's; a ViT of one size gets images of this size."""
    timm = needed('timm')
    torch.manual_seed(0)
    network = timm.create_model(name, embed_dim=32, depth=2, num_heads=2, num_classes=0, **options).eval()
    img = images(74, 60)
    whole = F.interpolate(img, size, mode='bilinear', antialias=True)
    mean, std = (torch.tensor(network.pretrained_cfg[key])[:, None, None] for key in ('mean', 'std'))
    patch = network.patch_embed.patch_size[0]
    with torch.no_grad():
        tokens = network.forward_features((whole - mean) / std)[:, network.num_prefix_tokens :]
    expected = tokens.transpose(1, 2).reshape(2, 32, size[0] // patch, size[1] // patch)
    given = network
    if is_wrapped:
        transformers = needed('transformers')
        given = transformers.TimmWrapperModel.__new__(transformers.TimmWrapperModel)
        torch.nn.Module.__init__(given)
        given.timm_model = network
        given.eval()
    teacher = check(given, img, [expected], [patch])
    assert teacher.mean == network.pretrained_cfg['mean']


def test_a_vit_that_timms_factory_did_not_build_has_the_statistics_of_imagenet():
    timm = needed('timm')
    network = timm.models.VisionTransformer(img_size=32, patch_size=16, embed_dim=32, depth=1, num_heads=2).eval()
    img = images(32, 32)
    with torch.no_grad():
        tokens = network.forward_features((img - MEAN) / STD)[:, 1:]
    check(network, img, [tokens.transpose(1, 2).reshape(2, 32, 2, 2)], [16])


def test_convnext_of_timm():
    timm = needed('timm')
    torch.manual_seed(0)
    network = timm.create_model('convnext_atto', depths=(1, 1, 1, 1), dims=(8, 16, 24, 32), num_classes=0).eval()
    check_convnext(network, network.stem, network.stages)


def test_other_networks_are_named():
    timm = needed('timm')
    with pytest.raises(TypeError, match='class ResNet is not known'):
        teacher_of(timm.create_model('resnet18'))


def test_a_model_in_a_folder(tmp_path):
    """Its statistics are those of the image processor beside it; on the meta device, only its shapes are known."""
    network = transformers_model('Dinov2Model', 'Dinov2Config', **VIT, image_size=56)
    network.save_pretrained(tmp_path)
    mean, std = [0.1, 0.2, 0.3], [0.4, 0.5, 0.6]
    (tmp_path / 'preprocessor_config.json').write_text(json.dumps({'image_mean': mean, 'image_std': std}))
    img = images(56, 42)
    own = (img - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    with torch.no_grad():
        expected = network(own).last_hidden_state[:, 1:].reshape(2, 4, 3, 32).permute(0, 3, 1, 2)
    torch.testing.assert_close(load_teacher(str(tmp_path))(img), [expected], atol=1e-5, rtol=1e-5)
    with torch.device('meta'):
        teacher = load_teacher(str(tmp_path))
    assert (teacher.out_channels, teacher.out_strides) == ((32,), (14,))
    assert all(p.is_meta for p in teacher.parameters())
    with pytest.raises(OSError, match='nowhere cannot be loaded'):
        load_teacher(str(tmp_path / 'nowhere'))
