"""Fuzzed inputs: an invalid input raises the documented error, and any other input works.

The examples are the same in each run.
"""

import contextlib
import inspect
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
# Values that most arguments refuse.
ODD = [None, True, -1, 0, 2, 1.5, math.nan, math.inf, '', 'x', b'x', (), [1], [None], ['x', 'y'], {}, {'type': 'x'}]


def fuzzed(examples, **strategies):
    """Run a test on this number of examples."""
    return lambda test: settings(
        max_examples=examples,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )(given(**strategies)(test))


def check_refusal(error, option=None):
    """Raise AssertionError unless a ``raise`` of this package, or lack of memory, caused an error.

    An error of the same type from Python or a library means that a check is missing.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_raised_here = last.filename.startswith(PACKAGE) and (last.line or '').startswith('raise ')
    if not is_raised_here and not is_out_of_memory(error):
        raise AssertionError(f'{option}: a check is missing') from error


def toy():
    torch.manual_seed(0)
    return SwinBackbone(**SMALLEST).eval()


def odd_options(function, *without):
    """Yield each option of a function with each odd value, alone."""
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in without and parameter.kind is not parameter.VAR_KEYWORD:
            for value in ODD:
                yield {name: value}


@pytest.mark.parametrize('kind', [SwinBackbone, SwinV2Backbone])
def test_odd_options_of_backbones(kind):
    for option in [*odd_options(SwinBackbone), *odd_options(SwinV2Backbone)]:
        try:
            backbone = kind(**{**TINY, **option}).eval()
        except (ValueError, TypeError, RuntimeError) as error:
            check_refusal(error, option)
            continue
        outs = backbone(torch.zeros(1, backbone.in_channels, 21, 34))
        for out, channels, stride in zip(outs, backbone.out_channels, backbone.out_strides, strict=True):
            assert out.shape == (1, channels, math.ceil(21 / stride), math.ceil(34 / stride)), option


def test_odd_options_of_extract_pyramid():
    for option in odd_options(extract_pyramid, 'backbone', 'images', 'out'):
        try:
            pyramid = extract_pyramid(toy(), torch.zeros(3, 21, 34), **option)
        except (ValueError, TypeError) as error:
            check_refusal(error, option)
        else:
            assert all(level.isfinite().all() for level in pyramid.values()), option


def test_odd_options_of_load_checkpoint():
    for option in odd_options(load_checkpoint, 'backbone', 'source', 'log'):
        try:
            load_checkpoint(toy(), toy().state_dict(), log=None, **option)
        except (ValueError, TypeError) as error:
            check_refusal(error, option)


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


@fuzzed(
    180,
    shape=st.one_of(
        st.lists(st.integers(0, 9), max_size=4),
        st.tuples(st.integers(1, 40), st.integers(1, 40), st.just(3)),
    ),
    dtype=st.sampled_from([*'?BHifdF', '>u2', 'object', 'U1']),
    value=st.sampled_from([0, 1, 0.5, -3, 255, math.nan, math.inf]),
    as_tensor=st.booleans(),
)
def test_arrays_for_extract_pyramid(shape, dtype, value, as_tensor):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # casts of NaN and infinity to integers
        image = np.full(shape, value).astype(dtype)
    if as_tensor:
        with contextlib.suppress(TypeError, ValueError):  # torch does not support every dtype of NumPy
            image = torch.from_numpy(image)
    try:
        pyramid = extract_pyramid(toy(), image)
    except (ValueError, TypeError) as error:  # ImageError is a ValueError
        return check_refusal(error)
    for single in pyramid if isinstance(pyramid, list) else [pyramid]:
        assert all(level.isfinite().all() for level in single.values())


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
)
def test_state_dicts_with_wrong_entries(family, seed, architecture):
    source, backbone = toy(), SwinBackbone(**architecture)
    state = source.state_dict() if family == 'ours' else export_state_dict(source, family=family)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            load_checkpoint(backbone, spoil(state, random.Random(seed)), log=None)
    except CheckpointError as error:
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
    with pytest.raises(AssertionError, match='a check is missing'):
        check_refusal(error_of(int, 'x'))
