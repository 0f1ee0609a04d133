"""Other people's Swins, the oracles of checkpoint conversion. They live in an environment of their own.

Run with ``.venv-peers/bin/python -m pytest tests/peers``; see ``requirements/peers.txt``.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import randomize

from swin_dense import SwinBackbone

# Maps of 32, 16, 8 and 4 tokens are multiples of the window and larger, so that all peers follow the official rules.
TINY = {'embed_dims': 16, 'depths': (2, 2, 4, 2), 'num_heads': (1, 2, 4, 8), 'window_size': 2}
IMAGE_SIZE = 128


def _define_missing_torchvision_operators():
    """Stand in for the compiled operators of torchvision where they do not fit the installed torch.

    Its models do not use them, but it cannot be imported without.
    """
    spec = find_spec('torchvision')
    if spec is None:
        return None
    try:
        torch.ops.load_library(Path(spec.origin).parent / '_C.so')
    except OSError:
        library = torch.library.Library('torchvision', 'DEF')
        forward = ('qnms', 'nms', 'roi_align', 'deform_conv2d', 'ps_roi_align', 'ps_roi_pool', 'roi_pool')
        backward = ('roi_align', 'deform_conv2d', 'ps_roi_align', 'ps_roi_pool', 'roi_pool')
        for name in (*forward, *(f'_{name}_backward' for name in backward)):
            library.define(f'{name}(Tensor input) -> Tensor')
        return library
    return None


# Operators are forgotten with the object that defined them.
_LIBRARY = _define_missing_torchvision_operators()


@pytest.fixture
def images():
    return torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.float64)


@pytest.fixture
def backbone():
    return randomize(SwinBackbone(**TINY).double().eval(), seed=1)


def largest_difference(ours, theirs):
    assert [map.shape for map in ours] == [map.shape for map in theirs]
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def with_our_norms(backbone, maps):
    """Apply our output norms to maps (B, H, W, C) of a peer that has none."""
    return [getattr(backbone, f'norm{stage}')(map).permute(0, 3, 1, 2) for stage, map in enumerate(maps)]
