"""Options of the backbones, and tensors that they are called with."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.utils.errors import is_out_of_memory
from tests.conftest import TINY
from tests.fuzzing.common import ODD, TAKEN, Kind, refused, some_of, toy

LIKELY = {
    'embed_dims': st.sampled_from([8, 16, 24]),
    'depths': st.lists(st.integers(1, 2), min_size=1, max_size=5),
    'num_heads': st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=5),
    'in_channels': st.integers(1, 4),
    'patch_size': st.integers(1, 5),
    'window_size': st.one_of(st.integers(1, 9), st.tuples(st.integers(1, 5), st.integers(1, 5))),
    'mlp_ratio': st.sampled_from([0.5, 1, 4]),
    'strides': st.lists(st.integers(1, 4), min_size=4, max_size=4),
    'out_indices': st.lists(st.integers(0, 3), min_size=1, max_size=4),
    'frozen_stages': st.integers(-1, 4),
    'drop_path_rate': st.floats(0, 1),
    'drop_rate': st.floats(0, 1),
    'qk_scale': st.floats(-2, 2),
    'with_cp': st.booleans(),
    'patch_norm': st.booleans(),
    'qkv_bias': st.booleans(),
    'use_abs_pos_embed': st.booleans(),
    'clamp_window': st.booleans(),
    'norm_cfg': st.sampled_from([{'type': 'LN'}, {'type': 'LN', 'eps': 1e-3}, {'type': 'BN'}, {}]),
    'act_cfg': st.sampled_from([{'type': 'GELU'}, {'type': 'SiLU', 'inplace': True}, {'type': 'Nothing'}]),
    'pretrain_img_size': st.integers(1, 64),
    'arch': st.sampled_from(['tiny', 'x', '', {}]),
}


def try_options(example: Any) -> str:
    kind, options, (batch, height, width) = example
    try:
        backbone = kind(**{**TINY, **options})
    except (ValueError, TypeError, RuntimeError) as error:
        return refused(error)
    backbone.eval()
    try:
        outs = backbone(torch.zeros(batch, backbone.in_channels, height, width))
    except (ValueError, TypeError, RuntimeError) as error:
        if 0 not in (height, width) and not is_out_of_memory(error):
            raise
        return refused(error)
    for out, channels, stride in zip(outs, backbone.out_channels, backbone.out_strides, strict=True):
        assert out.shape == (batch, channels, math.ceil(height / stride), math.ceil(width / stride))
    return TAKEN


def try_tensors(example: Any) -> str:
    shape, dtype = example
    image = torch.zeros(shape, dtype=dtype)
    try:
        toy()(image)
    except (ValueError, TypeError) as error:
        return refused(error)
    assert image.is_floating_point()
    assert image.ndim == 4
    assert image.shape[1] == 3
    return TAKEN


KINDS = {
    'options of both versions, with an image': Kind(
        st.tuples(
            st.sampled_from([SwinBackbone, SwinV2Backbone]),
            some_of(LIKELY, ODD),
            st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 40)),
        ),
        try_options,
        12,
    ),
    'tensors of any shape and type': Kind(
        st.tuples(
            st.one_of(
                st.lists(st.integers(0, 9), max_size=5),
                st.tuples(st.integers(0, 2), st.just(3), st.integers(0, 40), st.integers(0, 40)),
            ),
            st.sampled_from([torch.uint8, torch.int64, torch.bool, torch.float32, torch.float64, torch.complex64]),
        ),
        try_tensors,
        10,
    ),
}
