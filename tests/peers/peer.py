"""Helpers for comparisons with the Swins of other libraries."""

import pytest
import torch

from swin_dense import SwinBackbone
from tests.conftest import randomize

# Map sides of 32, 16, 8 and 4 tokens are multiples of the window and larger, so that no peer pads or clamps windows.
SHAPE = {'depths': (2, 2, 4, 2), 'num_heads': (1, 2, 4, 8)}
TINY = {'embed_dims': 16, **SHAPE, 'window_size': 2}
IMAGE_SIZE = 128
IMAGES = torch.randn(
    2,
    3,
    IMAGE_SIZE,
    IMAGE_SIZE,
    dtype=torch.float64,
    generator=torch.Generator().manual_seed(0),
)


def needed(module):
    """Import a module of another library, or skip the tests that need it."""
    return pytest.importorskip(module, reason='see the group peers of pyproject.toml')


def timm_swin(version=1, **options):
    timm = needed('timm')
    name = 'swin_tiny_patch4_window7_224' if version == 1 else 'swinv2_tiny_window8_256'
    sizes = {'img_size': IMAGE_SIZE, 'window_size': 2, 'embed_dim': 16, **SHAPE}
    return timm.create_model(name, **{**sizes, **options})


def torchvision_swin(version=1, window_size=2, **options):
    swin = needed('torchvision.models.swin_transformer')
    if version == 2:
        options.update(block=swin.SwinTransformerBlockV2, downsample_layer=swin.PatchMergingV2)
    return swin.SwinTransformer(
        [4, 4],
        16,
        *map(list, SHAPE.values()),
        [window_size] * 2,
        **options,
    )


def transformers_swin(version=1, kind='Backbone', **options):
    transformers = needed('transformers')
    family = 'Swin' if version == 1 else 'Swinv2'
    sizes = {
        'embed_dim': 16,
        'depths': list(SHAPE['depths']),
        'num_heads': list(SHAPE['num_heads']),
        'window_size': 2,
        'image_size': IMAGE_SIZE,
        'out_features': ['stage1', 'stage2', 'stage3', 'stage4'],
    }
    config = getattr(transformers, f'{family}Config')(**{**sizes, **options})
    return getattr(transformers, f'{family}{kind}')(config)


def mmpretrain_swin(version=1, **options):
    backbones = needed('mmpretrain.models.backbones')
    kind, more = backbones.SwinTransformer, {}
    if version == 2:
        kind, more = backbones.SwinTransformerV2, {'extra_norm_every_n_blocks': 0}
    return kind({'embed_dims': 16, **SHAPE, **more}, **{'window_size': 2, 'img_size': IMAGE_SIZE, **options})


def prepared(peer, seed):
    randomize(peer.double(), seed)
    peer.eval()  # returns None in mmpretrain
    return peer


def build(seed, **options):
    return randomize(SwinBackbone(**TINY, **options).double().eval(), seed)


def largest_difference(ours, theirs):
    """Return the largest difference between tensors of the same shapes; infinite values must be equal."""
    assert [one.shape for one in ours] == [one.shape for one in theirs]
    differences = []
    for a, b in zip(ours, theirs, strict=True):
        difference = (a - b).masked_fill(a == b, 0)
        differences.append(difference.abs().max().item())
    return max(differences)


def with_our_norms(backbone, maps):
    """Apply the output norms of a backbone to maps (B, H, W, C) of a peer, which has none; return (B, C, H, W)."""
    if len(maps) != len(backbone.out_indices):
        maps = [maps[stage] for stage in backbone.out_indices]
    norms = [getattr(backbone, f'norm{stage}') for stage in backbone.out_indices]
    return [norm(map).permute(0, 3, 1, 2) for norm, map in zip(norms, maps, strict=True)]
