"""Options and inputs of all kinds: what is wrong is a ValueError or a TypeError, and what is taken works."""

import contextlib
import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.recipes.settings import parse_settings
from tests.conftest import TINY, needs

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.text(max_size=4), st.binary(max_size=2),
    st.lists(st.one_of(st.integers(-1, 5), st.none(), st.text(max_size=2)), max_size=5),
    st.dictionaries(st.sampled_from(['type', 'eps', 'x']), st.one_of(st.text(max_size=4), st.floats()), max_size=2),
)  # fmt: skip
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
    'act_cfg': st.sampled_from([{'type': 'GELU'}, {'type': 'ReLU'}, {'type': 'Nothing'}]),
    'pretrain_img_size': st.integers(1, 64),
    'arch': st.sampled_from(['tiny', 'x', '', {}]),
}
OPTIONS = st.lists(st.sampled_from(sorted(LIKELY)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries(
        {name: st.one_of(LIKELY[name], LIKELY[name], LIKELY[name], ODD) for name in names}
    )
)


@settings(max_examples=200)
@given(
    kind=st.sampled_from([SwinBackbone, SwinV2Backbone]),
    options=OPTIONS,
    size=st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 40)),
)
def test_options_are_refused_or_work(kind, options, size):
    try:
        backbone = kind(**{**TINY, **options})
    except (ValueError, TypeError):
        return
    batch, height, width = size
    backbone.eval()
    try:
        outs = backbone(torch.zeros(batch, backbone.in_channels, height, width))
    except (ValueError, TypeError):
        assert 0 in (height, width)
        return
    assert [tuple(out.shape) for out in outs] == [
        (batch, channels, math.ceil(height / stride), math.ceil(width / stride))
        for channels, stride in zip(backbone.out_channels, backbone.out_strides, strict=True)
    ]


@settings(max_examples=100)
@given(shape=st.lists(st.integers(0, 9), max_size=5), dtype=st.sampled_from([torch.uint8, torch.int64, torch.bool]))
def test_images_of_another_form_are_refused(shape, dtype):
    backbone = SwinBackbone(**TINY)
    for image in (torch.zeros(shape, dtype=dtype), torch.zeros(shape)):
        try:
            backbone(image)
        except (ValueError, TypeError):
            pass
        else:
            assert image.is_floating_point()
            assert image.ndim == 4
            assert image.shape[1] == 3


@needs('mmengine')
@settings(max_examples=300)
@given(st.lists(st.text(alphabet='ab.=[](){},"\'1e-_ \\\n\x00', max_size=40), max_size=3))
def test_settings_are_read_or_refused(given_settings):
    with contextlib.suppress(ValueError):
        assert isinstance(parse_settings(given_settings), dict)
