"""Fuzzed inputs: an invalid input raises the documented error, and any other input works.

The examples are the same in each run.
"""

import contextlib
import math
import os
import random
import re
import traceback
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import swin_dense
from swin_dense import SwinBackbone, SwinV2Backbone, export_state_dict, extract_pyramid, load_checkpoint
from swin_dense.checkpoint import CheckpointError
from swin_dense.commands._main import TRACEBACK, main
from swin_dense.utils.choices import FAMILIES
from swin_dense.utils.errors import is_out_of_memory
from tests.checkpoint.helpers import prefixed
from tests.conftest import TINY, needs

PACKAGE = os.path.dirname(swin_dense.__file__)
SMALLEST = {
    'embed_dims': 8,
    'depths': (1, 1),
    'num_heads': (2, 4),
    'strides': (4, 2),
    'out_indices': (0, 1),
}
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=2),
    st.lists(st.one_of(st.integers(-1, 5), st.none(), st.text(max_size=2)), max_size=5),
    st.dictionaries(st.sampled_from(['type', 'eps', 'x']), st.one_of(st.text(max_size=4), st.floats()), max_size=2),
)


def fuzzed(examples, **strategies):
    """Run a test on this number of examples."""
    return lambda test: settings(
        max_examples=examples,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )(given(**strategies)(test))


def check_refusal(error):
    """Raise an error again unless a ``raise`` of this package, or lack of memory, caused it.

    An error of the same type from Python or a library means that a check is missing.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_raised_here = last.filename.startswith(PACKAGE) and (last.line or '').startswith('raise ')
    if not is_raised_here and not is_out_of_memory(error):
        raise error


def some_of(likely, odd):
    """Draw at most four of the entries, each with a likely or an odd value."""

    def entries(names):
        return st.fixed_dictionaries({name: mostly(likely[name], odd) for name in names})

    return st.lists(st.sampled_from(sorted(likely)), max_size=4, unique=True).flatmap(entries)


def mostly(usual, other):
    """Draw from ``usual`` three times out of four. A repeated argument of st.one_of would count only once."""
    return st.integers(0, 3).flatmap(lambda number: usual if number else other)


def toy():
    torch.manual_seed(0)
    return SwinBackbone(**SMALLEST).eval()


BACKBONE_OPTIONS = {
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


@fuzzed(
    120,
    kind=st.sampled_from([SwinBackbone, SwinV2Backbone]),
    options=some_of(BACKBONE_OPTIONS, ODD),
    batch=st.integers(0, 2),
    height=st.integers(0, 40),
    width=st.integers(0, 40),
)
def test_options_of_backbones(kind, options, batch, height, width):
    try:
        backbone = kind(**{**TINY, **options}).eval()
    except (ValueError, TypeError, RuntimeError) as error:
        return check_refusal(error)
    try:
        outs = backbone(torch.zeros(batch, backbone.in_channels, height, width))
    except (ValueError, TypeError, RuntimeError) as error:
        if 0 not in (height, width) and not is_out_of_memory(error):
            raise
        return check_refusal(error)
    for out, channels, stride in zip(outs, backbone.out_channels, backbone.out_strides, strict=True):
        assert out.shape == (batch, channels, math.ceil(height / stride), math.ceil(width / stride))


@fuzzed(
    100,
    shape=st.one_of(
        st.lists(st.integers(0, 9), max_size=5),
        st.tuples(st.integers(0, 2), st.just(3), st.integers(0, 40), st.integers(0, 40)),
    ),
    dtype=st.sampled_from([torch.uint8, torch.int64, torch.bool, torch.float32, torch.float64, torch.complex64]),
)
def test_tensors_for_a_backbone(shape, dtype):
    image = torch.zeros(shape, dtype=dtype)
    try:
        toy()(image)
    except (ValueError, TypeError) as error:
        return check_refusal(error)
    assert image.is_floating_point()
    assert image.shape[1:2] == (3,)
    assert image.ndim == 4


PYRAMID_OPTIONS = {
    'levels': st.lists(st.sampled_from([4, 8, 16]), max_size=2),
    'mean': st.sampled_from([None, 0.5, (0.5, 0.5, 0.5), (100, 100, 100)]),
    'std': st.sampled_from([None, 0.5, (0.5, 0.5, 0.5), 0]),
    'bgr': st.booleans(),
    'batch_size': st.integers(-1, 3),
    'tile': st.one_of(st.sampled_from([56, 112]), st.integers(-1, 60)),
    'overlap': st.one_of(st.sampled_from([0, 56]), st.integers(-1, 60)),
    'page': st.integers(-1, 2),
    'max_side': st.integers(-1, 9),
    'device': st.sampled_from(['cpu', 'meta0', '']),
    'dtype': st.sampled_from(['float16', 'float64', 'int8', 'x', torch.float32, torch.int8]),
    'autocast': st.sampled_from(['bfloat16', 'float64', torch.bfloat16]),
    'gradients': st.booleans(),
}


@fuzzed(
    180,
    shape=st.one_of(
        st.lists(st.integers(0, 9), max_size=4),
        st.tuples(st.integers(1, 40), st.integers(1, 40), st.just(3)),
    ),
    dtype=st.sampled_from([*'?BHifdF', '>u2', 'object', 'U1']),
    value=st.sampled_from([0, 1, 0.5, -3, 255, math.nan, math.inf]),
    as_tensor=st.booleans(),
    options=some_of(PYRAMID_OPTIONS, ODD),
)
def test_arrays_for_extract_pyramid(shape, dtype, value, as_tensor, options):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # casts of NaN and infinity to integers
        image = np.full(shape, value).astype(dtype)
    if as_tensor:
        with contextlib.suppress(TypeError, ValueError):  # torch does not support every dtype of NumPy
            image = torch.from_numpy(image)
    try:
        pyramid = extract_pyramid(toy(), image, **options)
    except (ValueError, TypeError) as error:  # ImageError is a ValueError
        return check_refusal(error)
    for single in pyramid if isinstance(pyramid, list) else [pyramid]:
        assert all(level.isfinite().all() for level in single.values())


LOADING_OPTIONS = {
    'prefix': st.sampled_from(['', 'backbone', 'x']),
    'ema': st.booleans(),
    'allow_partial': st.booleans(),
    'final_norm': st.booleans(),
    'window_size': st.integers(-1, 9),
    'trust': st.just(False),
}


def spoil(state, chance):
    """Drop, rename, reshape, retype and replace entries of a state dict, and wrap it."""
    state = dict(state)
    for _ in range(chance.choice([1, 1, 2, 5])):
        name = chance.choice(sorted(state))
        value = state.pop(name)
        kind = chance.choice(['drop', 'rename', 'copy', 'prefix', 'other', 'tensor', 'tensor', 'tensor'])
        if kind == 'rename':
            part, other = chance.choice(
                [
                    ('0', '7'),
                    ('weight', 'bias'),
                    ('.', ''),
                    ('norm', 'x'),
                ]
            )
            state[name.replace(part, other)] = value
        elif kind == 'copy':
            state[name] = state[f'ema.{name}'] = value
        elif kind == 'prefix':
            state = prefixed('module.', {**state, name: value})
        elif kind == 'other':
            state[name] = chance.choice(
                [
                    None,
                    1,
                    'x',
                    [1],
                    {'a': 1},
                    {'a': value},
                    np.zeros(3),
                ]
            )
        elif kind == 'tensor' and isinstance(value, torch.Tensor):
            state[name] = _spoiled(value, chance)
    return {chance.choice(['model', 'state_dict', 'x', 1]): state} if chance.random() < 0.2 else state


def _spoiled(tensor, chance):
    """Return a tensor of another shape, type or value."""
    filled = chance.choice([0, 1, 1e4, math.nan]) if tensor.is_floating_point() else 10**6
    changed = [
        tensor.to(chance.choice([torch.int64, torch.bool, torch.complex64, torch.float16])),
        torch.full_like(tensor, filled),
    ]
    if tensor.ndim:
        shapes = [
            tensor[:1],
            tensor[None],
            tensor[..., None],
            tensor[:0],
            tensor.flatten(),
        ]
        changed.append(chance.choice(shapes))
    return chance.choice(changed)


@fuzzed(
    140,
    family=st.sampled_from(['ours', *FAMILIES]),
    seed=st.integers(0, 2**32),
    architecture=st.sampled_from([SMALLEST, TINY]),
    options=some_of(LOADING_OPTIONS, ODD),
)
def test_state_dicts_with_wrong_entries(family, seed, architecture, options):
    source, backbone = toy(), SwinBackbone(**architecture)
    state = source.state_dict() if family == 'ours' else export_state_dict(source, family=family)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            load_checkpoint(backbone, spoil(state, random.Random(seed)), log=None, **options)
    except (ValueError, TypeError) as error:
        if not options and not isinstance(error, CheckpointError):  # without options, only the state dict can be wrong
            raise
        return check_refusal(error)
    assert all(parameter.isfinite().all() for parameter in backbone.parameters())


@needs('mmengine')
@fuzzed(100, words=st.lists(st.text(alphabet='ab.=[](){},"\'1e-_ \\\n\x00', max_size=40), max_size=3))
def test_lists_of_settings(words):
    from swin_dense.workbench.configs.settings import parse_settings

    try:
        parsed = parse_settings(words)
    except ValueError as error:
        return check_refusal(error)
    assert isinstance(parsed, dict)


def lines_of(text):
    """Draw at most three lines of a text, in which they are separated by | too, with a tab and a NUL as in Python."""
    text = text.strip().replace(r'\t', '\t').replace(r'\x00', '\0')
    return st.lists(st.sampled_from(re.split(r' \| |\n    ', text)), max_size=3)


WHOLE_CONFIG = (
    "default_scope = 'mmseg'",
    "data_root = 'data/'",
    "model = dict(type='EncoderDecoder', backbone=dict(type='SwinDense'), decode_head=dict(num_classes=2))",
    "train_dataloader = dict(dataset=dict(type='ADE20KDataset', data_root='data/', "
    "data_prefix=dict(img_path='x', seg_map_path='y')))",
)
CONFIG_LINES = lines_of(r"""
    model = dict(type='SwinDense', embed_dims=8, depths=(1, 1), num_heads=(1, 1))
    model = dict(type='EncoderDecoder', backbone=dict(type='SwinDense'), decode_head=dict(num_classes=3))
    model = dict(type='MaskRCNN', roi_head=dict(bbox_head=dict(num_classes=80))) | model = None | model = [1
    model['x'] = 1 | model = {} | default_scope = 'mmdet' | default_scope = 'mmseg' | default_scope = 3
    data_root = 'data/' | data_root = None | data_root = 'missing/'
    train_dataloader = dict(dataset=dict(type='CocoDataset', data_root='data/', ann_file='a.json'))
    val_dataloader = dict(dataset=dict(type='ADE20KDataset', data_root='data/', data_prefix={'img_path': 3}))
    test_dataloader = dict(dataset=[dict(data_root='data/'), None]) | train_dataloader = 3
    train_cfg = dict(max_epochs=2) | visualizer = None | _base_ = 'missing.py' | _base_ = ['other.py']
    _base_ = 'mmdet::missing.py' | _base_ = 3 | import no_such_package | import math | value = 1 / 0
    raise ValueError('no') | x = undefined | x = {{fileDirname}} | x = '{{_base_.model}}' | x = '{{$HOME:none}}'
    x = lambda: 1 | custom_imports = dict(imports=['swin_dense']) | custom_imports = dict(imports=['no_such'])
    def f(): | \tif x | \x00 | é = "ü" | # a comment
""")
CONFIG_OPTIONS = lines_of("""
    --set=model.backbone.depths=[2,2] | --set=model.x.y.z=1 | --set=train_cfg=3 | --set=model=[1 | --set=x
    --set=train_dataloader.dataset.0.x=1 | --set==1 | --set=default_scope=mmseg | --set=model.0=1
    --set=visualizer={'a':1} | --classes=a,b | --classes=a,a | --classes= | --data-root=mine | --data-root=
    --train-images=x | --val-masks=. | --val-ann=other.py | --ignore=11 | --out=written.py | --out=x.txt
    --out=no/x.py | --force
""")


@needs('mmengine')
@fuzzed(
    30,
    is_whole=st.booleans(),
    lines=CONFIG_LINES,
    options=CONFIG_OPTIONS,
    cut=st.sampled_from([0, 0, 0, 1, 5]),
)
def test_config_files(tmp_path_factory, monkeypatch, capsys, is_whole, lines, options, cut):
    folder = tmp_path_factory.mktemp('config')
    monkeypatch.chdir(folder)
    monkeypatch.setenv(TRACEBACK, '1')
    text = '\n'.join([*WHOLE_CONFIG, *lines] if is_whole else lines)
    (folder / 'config.py').write_text(text[: len(text) - cut] + '\n', encoding='utf-8')
    (folder / 'other.py').write_text("data_root = 'data/'\n")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            status = main(['config', 'config.py', *options])
    except SystemExit as stopped:  # of argparse
        status = stopped.code
    except Exception as error:
        return check_refusal(error)
    assert status in (0, 1, 2)
    assert status != 2 or 'error: ' in capsys.readouterr().err


def test_only_raise_statements_of_this_package_are_refusals():
    def error_of(function, *arguments):
        with pytest.raises((ValueError, TypeError)) as caught:
            function(*arguments)
        return caught.value

    check_refusal(error_of(SwinBackbone, 'no arch'))
    with pytest.raises(ValueError, match='invalid literal'):
        check_refusal(error_of(int, 'x'))
