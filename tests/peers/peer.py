"""Helpers for comparisons with the Swins of other libraries."""

import pytest
import torch

from swin_dense import SwinBackbone
from tests.conftest import randomize

# Map sides of 32, 16, 8 and 4 tokens are multiples of the window and larger, so that no peer pads or clamps windows.
TINY = {'embed_dims': 16, 'depths': (2, 2, 4, 2), 'num_heads': (1, 2, 4, 8), 'window_size': 2}
IMAGE_SIZE = 128
IMAGES = torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def needed(module):
    """Import a module of another library, or skip the tests that need it."""
    return pytest.importorskip(module, reason='see the group peers of pyproject.toml')


def build(seed, **options):
    return randomize(SwinBackbone(**TINY, **options).double().eval(), seed)


def largest_difference(ours, theirs):
    """Return the largest difference between tensors of the same shapes; infinite values must be equal."""
    assert [one.shape for one in ours] == [one.shape for one in theirs]
    return max((a - b).masked_fill(a == b, 0).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def with_our_norms(backbone, maps):
    """Apply the output norms of a backbone to maps (B, H, W, C) of a peer, which has none; return (B, C, H, W)."""
    if len(maps) != len(backbone.out_indices):
        maps = [maps[stage] for stage in backbone.out_indices]
    norms = [getattr(backbone, f'norm{stage}') for stage in backbone.out_indices]
    return [norm(map).permute(0, 3, 1, 2) for norm, map in zip(norms, maps, strict=True)]
