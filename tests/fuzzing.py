"""Kinds of fuzzed inputs: each has a strategy, and a function that tries one example and returns the outcome.

``test_fuzz.py`` tries a few examples of each kind. An attempt returns 'taken' or 'refused'; an exception is a defect.
An input is refused if a ``raise`` statement of this package rejects it, or memory runs out. An error of the same type
from Python or a library means that a check is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import math
import os
import pickle
import random
import shutil
import tempfile
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import strategies as st
from PIL import Image

import swin_dense
from swin_dense import SwinBackbone, SwinV2Backbone, export_state_dict
from swin_dense.__main__ import TRACEBACK, command_names, main
from swin_dense.checkpoint import CheckpointError, load_checkpoint
from swin_dense.doctor import Finding
from swin_dense.export import formats
from swin_dense.features.images import read_image
from swin_dense.features.pyramid import extract_pyramid
from swin_dense.features.regions import open_large_image
from swin_dense.utils.choices import FAMILIES
from swin_dense.utils.errors import is_out_of_memory
from swin_dense.utils.pixels import ImageError
from tests.conftest import TINY
from tests.features.mutations import ORIGINALS, mutate

PACKAGE = os.path.dirname(swin_dense.__file__)
TAKEN, REFUSED = 'taken', 'refused'
SMALLEST = {'embed_dims': 8, 'depths': (1, 1), 'num_heads': (2, 4), 'strides': (4, 2), 'out_indices': (0, 1)}
SEEDS = st.integers(0, 2**32)

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
    'act_cfg': st.sampled_from(
        [{'type': 'GELU'}, {'type': 'ReLU', 'inplace': True}, {'type': 'SiLU', 'inplace': True}, {'type': 'Nothing'}]
    ),
    'pretrain_img_size': st.integers(1, 64),
    'arch': st.sampled_from(['tiny', 'x', '', {}]),
}


def refused(error: Exception) -> str:
    """Return REFUSED if a ``raise`` of this package, or lack of memory, caused the error; raise it again otherwise."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if is_out_of_memory(error) or (last.filename.startswith(PACKAGE) and (last.line or '').startswith('raise ')):
        return REFUSED
    raise error


def some_of(likely: dict[str, Any], odd: Any) -> Any:
    """Draw at most four of the entries, each with a likely or an odd value."""
    return st.lists(st.sampled_from(sorted(likely)), max_size=4, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: mostly(likely[name], odd) for name in names})
    )


def mostly(usual: Any, other: Any) -> Any:
    """Draw from ``usual`` three times out of four. A repeated argument of st.one_of would count only once."""
    return st.integers(0, 3).flatmap(lambda number: usual if number else other)


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
    assert [tuple(out.shape) for out in outs] == [
        (batch, channels, math.ceil(height / stride), math.ceil(width / stride))
        for channels, stride in zip(backbone.out_channels, backbone.out_strides, strict=True)
    ]
    return TAKEN


@functools.cache
def toy() -> SwinBackbone:
    torch.manual_seed(0)
    return SwinBackbone(**SMALLEST).eval()


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


ARRAYS = st.tuples(
    st.one_of(st.lists(st.integers(0, 9), max_size=4), st.tuples(st.integers(1, 40), st.integers(1, 40), st.just(3))),
    st.sampled_from(['uint8', 'uint16', 'int32', 'float32', 'float64', 'bool', '>u2', 'complex64', 'object', 'U1']),
    st.sampled_from([0, 1, 0.5, -3, 255, math.nan, math.inf]),
    st.booleans(),
)
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


def try_arrays(example: Any) -> str:
    (shape, dtype, value, as_tensor), options = example
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # casts of NaN and infinity to integers
        image: Any = np.full(shape, value).astype(dtype)
    if as_tensor:
        with contextlib.suppress(TypeError, ValueError):  # torch does not support every dtype of NumPy
            image = torch.from_numpy(image)
    try:
        pyramid = extract_pyramid(toy(), image, **options)
    except (ValueError, TypeError) as error:  # ImageError is a ValueError
        return refused(error)
    for single in pyramid if isinstance(pyramid, list) else [pyramid]:
        assert all(level.isfinite().all() for level in single.values())
    return TAKEN


def try_settings(example: list[str]) -> str:
    from swin_dense.workbench.configs.settings import parse_settings

    try:
        parsed = parse_settings(example)
    except ValueError as error:
        return refused(error)
    assert isinstance(parsed, dict)
    return TAKEN


@functools.cache
def playground() -> Path:
    """Return a temporary folder that is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix='fuzz ')
    playground.folder = folder  # type: ignore[attr-defined]
    return Path(folder.name)


@functools.cache
def checkpoints() -> dict[str, bytes]:
    """Return the contents of small checkpoint files by file name: containers, families and both versions."""
    import safetensors.torch

    state = toy().state_dict()
    torch.manual_seed(0)
    v2 = SwinV2Backbone(**SMALLEST).state_dict()
    contents: dict[str, Any] = {
        'bare': state,
        'detector': {
            'meta': {'epoch': 1},
            'state_dict': {f'backbone.{key}': value for key, value in state.items()},
            'optimizer': {'param_groups': [{'lr': 0.1}]},
        },
        'v2': v2,
        **{family: export_state_dict(toy(), family=family) for family in FAMILIES},
    }
    files = {}
    for name, content in contents.items():
        stream = io.BytesIO()
        torch.save(content, stream)
        files[f'{name}.pth'] = stream.getvalue()
    stream = io.BytesIO()
    torch.save(state, stream, _use_new_zipfile_serialization=False)
    files['legacy.pth'] = stream.getvalue()
    files['bare.safetensors'] = safetensors.torch.save(state)
    return files


# Names that a pickle may ask for: dangerous ones, dotted ones, and those that weights need.
NAMES = (
    ('os', 'system'), ('posix', 'system'), ('nt', 'system'), ('subprocess', 'Popen'), ('builtins', 'eval'),
    ('__builtin__', 'eval'), ('builtins', 'exec'), ('builtins', '__import__'), ('builtins', 'getattr'),
    ('builtins', 'open'), ('builtins', 'object'), ('builtins', 'type'), ('builtins', 'bytearray'), ('io', 'open'),
    ('importlib', 'import_module'), ('pickle', 'loads'), ('_pickle', 'loads'), ('copyreg', '_reconstructor'),
    ('copyreg', '__newobj__'), ('functools', 'partial'), ('operator', 'attrgetter'), ('operator', 'methodcaller'),
    ('types', 'CodeType'), ('types', 'FunctionType'), ('ctypes', 'CDLL'), ('this', 's'), ('antigravity', 'webbrowser'),
    ('', ''), ('', 'eval'), ('torch', 'load'), ('torch', 'jit.load'), ('torch.jit', 'load'), ('torch', 'hub.load'),
    ('torch._utils', '_rebuild_wrapper_subclass'), ('torch._utils', '_rebuild_nested_tensor'),
    ('torch._utils', '_import_dotted_name'), ('torch.serialization', 'load'), ('torch.nn', 'Linear'),
    ('torch.storage', 'UntypedStorage.from_file'), ('torch', 'FloatStorage'), ('torch.storage', 'TypedStorage'),
    ('numpy', 'load'), ('numpy', 'fromfile'), ('numpy', 'memmap'), ('numpy', 'matrix'), ('numpy', 'ndarray.tofile'),
    ('numpy.core.multiarray', 'fromfile'), ('numpy.core', 'multiarray.scalar'),
    ('numpy.f2py.crackfortran', 'getlincoef'),
    ('collections', 'OrderedDict.update'), ('collections', 'OrderedDict.__init__.__globals__'),
    ('swin_dense.checkpoint.unpickler', 'load'), ('swin_dense.checkpoint.unpickler', 'sys.modules'),
    ('collections', 'OrderedDict'), ('torch', 'Size'), ('torch', 'float32'), ('torch._utils', '_rebuild_tensor_v2'),
    ('torch._utils', '_rebuild_tensor_v3'), ('torch._utils', '_rebuild_parameter'), ('numpy', 'dtype'),
    ('torch._tensor', '_rebuild_from_type_v2'), ('torch.storage', '_load_from_bytes'), ('numpy', 'ndarray'),
    ('torch.storage', 'UntypedStorage'), ('numpy.core.multiarray', '_reconstruct'), ('builtins', 'bytes'),
    ('numpy.core.multiarray', 'scalar'), ('numpy._core.numeric', '_frombuffer'), ('_codecs', 'encode'),
)  # fmt: skip
_TEXTS = ('f4', 'O', 'V8', '__class__', '_modules', 'storage', 'module', 'cpu', '0', 'C', '<', 'weight')


def pickle_program(chance: random.Random) -> bytes:
    """Return a pickle of random operations, which usually find enough arguments on the stack."""
    parts = [bytes([0x80, chance.choice([2, 4, 5])])]
    for _ in range(chance.choice([1, 2, 3, 5, 10, 40])):
        kind = chance.randrange(12)
        if kind < 3:
            module, name = chance.choice(NAMES)
            if chance.random() < 0.5 or not module or not name:
                parts.append(_pushed(module) + _pushed(name) + b'\x93')
            else:
                parts.append(f'{chance.choice("cci")}{module}\n{name}\n'.encode())
        elif kind < 6:
            numbers = [bytes([0x4B, chance.randrange(256)]), b'J\xff\xff\xff\x7f', b'J\xff\xff\xff\xff', b'N', b'\x88']
            containers = [b'}', b']', b')', b'\x8f', b'C\x04abcd', b'G?\xf0\x00\x00\x00\x00\x00\x00']
            parts.append(chance.choice([*numbers, *containers, _pushed(chance.choice(_TEXTS))]))
        elif kind < 9:  # build a tuple and call, make or change something with it
            parts.append(
                chance.choice([b'\x85', b'\x86', b'\x87', b')']) + chance.choice([b'R', b'\x81', b'}\x92', b'b'])
            )
        else:
            operations = (
                b'(', b't', b'l', b'd', b'e', b'u', b's', b'a', b'\x90', b'\x91', b'0', b'1', b'2', b'\x94', b'q\x00',
                b'h\x00', b'b', b'R', b'o', b'Q', b'P0\n', b'\x82\x01', b'\x97', b'\x98', b'\x93',
                b'\x95\xff\xff\xff\xff\0\0\0\0',
                b'B\xff\xff\xff\x7f', b'\x96\xff\xff\xff\xff\xff\xff\xff\x7f', b'r\xff\xff\xff\x7f',
            )  # fmt: skip
            parts.append(chance.choice(operations))
    return b''.join([*parts, b'.'])


@functools.cache
def _pickled_weights() -> bytes:
    return pickle.dumps({name: tensor.numpy() for name, tensor in toy().state_dict().items()}, 2)[2:-1]


def _pushed(text: str) -> bytes:
    return b'\x8c' + bytes([len(text)]) + text.encode()


def try_pickle(example: Any) -> str:
    seed, zipped, receiver = example
    path = playground() / 'program.pth'
    program = pickle_program(random.Random(seed))
    # The program makes the value of one more key of a dict of weights: {'model': {...}, 'x': value}.
    program = b'\x80\x02}' + _pushed('model') + _pickled_weights() + b's' + _pushed('x') + program[2:-1] + b's.'
    if zipped:
        with zipfile.ZipFile(path, 'w') as archive:
            archive.writestr('a/data.pkl', program)
            archive.writestr('a/data/0', bytes(16))
            archive.writestr('a/version', '3\n')
            archive.writestr('a/byteorder', 'little')
    else:
        path.write_bytes(program)
    return _try_to_load(receiver, path, {})


LOADING_OPTIONS = {
    'prefix': st.sampled_from(['', 'backbone', 'x']),
    'ema': st.booleans(),
    'allow_partial': st.booleans(),
    'final_norm': st.booleans(),
    'table_resize': st.sampled_from(['bicubic', 'geometric', 'x']),
    'in_channels': st.sampled_from(['repeat', 'mean', 'x']),
    'window_size': st.integers(-1, 9),
    'trust': st.just(False),
}


@functools.cache
def receivers() -> dict[str, SwinBackbone]:
    return {'v1': SwinBackbone(**SMALLEST), 'v2': SwinV2Backbone(**SMALLEST), 'other': SwinBackbone(**TINY)}


def try_checkpoint_file(example: Any) -> str:
    name, damaged, seed, receiver, options = example
    content = checkpoints()[name]
    path = playground() / f'checkpoint{Path(name).suffix}'
    path.write_bytes(mutate(content, random.Random(seed)) if damaged else content)
    return _try_to_load(receiver, path, options)


def _try_to_load(receiver: str, source: Any, options: dict[str, Any]) -> str:
    backbone = receivers()[receiver]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            load_checkpoint(backbone, source, log=None, **options)
    except (ValueError, TypeError) as error:
        if not options and not isinstance(error, CheckpointError):  # without options, only the file can be wrong
            raise
        return refused(error)
    assert all(parameter.isfinite().all() for parameter in backbone.parameters())
    return TAKEN


def spoil(state: dict[str, Any], chance: random.Random) -> dict[Any, Any]:
    """Drop, rename, reshape, retype and replace entries of a state dict, and wrap it."""
    state = dict(state)
    for _ in range(chance.choice([1, 1, 2, 5])):
        name = chance.choice(sorted(state))
        kind = chance.choice(['drop', 'rename', 'reshape', 'type', 'value', 'other', 'copy', 'prefix'])
        value = state.pop(name)
        if kind == 'rename':
            state[name.replace(*chance.choice([('0', '7'), ('weight', 'bias'), ('.', ''), ('norm', 'x')]))] = value
        elif kind == 'reshape' and isinstance(value, torch.Tensor) and value.ndim:
            state[name] = chance.choice([value[:1], value[None], value[..., None], value[:0], value.flatten()])
        elif kind == 'type' and isinstance(value, torch.Tensor):
            state[name] = value.to(chance.choice([torch.int64, torch.bool, torch.complex64, torch.float16]))
        elif kind == 'value' and isinstance(value, torch.Tensor):
            state[name] = torch.full_like(
                value, chance.choice([0, 1, 1e4, math.nan]) if value.is_floating_point() else 10**6
            )
        elif kind == 'other':
            state[name] = chance.choice([None, 1, 'x', [1], {'a': 1}, {'a': value}, np.zeros(3)])
        elif kind == 'copy':
            state[name] = state[f'ema.{name}'] = value
        elif kind == 'prefix':
            state = {f'module.{key}': item for key, item in {**state, name: value}.items()}
    return {chance.choice(['model', 'state_dict', 'x', 1]): state} if chance.random() < 0.2 else state


def try_state_dict(example: Any) -> str:
    family, seed, receiver, options = example
    state = toy().state_dict() if family == 'ours' else export_state_dict(toy(), family=family)
    return _try_to_load(receiver, spoil(state, random.Random(seed)), options)


def try_image_file(example: Any) -> str:
    form, seed, by_parts = example
    path = playground() / 'image'
    path.write_bytes(mutate(_original(form), random.Random(seed)))
    try:
        with mock.patch.object(Image, 'MAX_IMAGE_PIXELS', 1 << 20), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            if by_parts:
                with open_large_image(path) as image:
                    assert image.read(0, 0, *image.size).shape[:2] == image.size
            else:
                assert read_image(path, 5 if '5' in form else 3).isfinite().all()
    except ImageError as error:
        if str(path) not in str(error):
            raise
        return refused(error)
    return TAKEN


@functools.cache
def _original(form: str) -> bytes:
    return ORIGINALS[form]()


WHOLE_CONFIG = (
    "default_scope = 'mmseg'",
    "data_root = 'data/'",
    "model = dict(type='EncoderDecoder', backbone=dict(type='SwinDense'), decode_head=dict(num_classes=2))",
    "train_dataloader = dict(dataset=dict(type='ADE20KDataset', data_root='data/', "
    "data_prefix=dict(img_path='x', seg_map_path='y')))",
)
CONFIG_LINES = st.lists(
    st.sampled_from(
        [
            "model = dict(type='SwinDense', embed_dims=8, depths=(1, 1), num_heads=(1, 1))",
            "model = dict(type='EncoderDecoder', backbone=dict(type='SwinDense'), decode_head=dict(num_classes=3))",
            "model = dict(type='MaskRCNN', roi_head=dict(bbox_head=dict(num_classes=80)))",
            'model = None', 'model = [1', "model['x'] = 1", 'model = {}',
            "default_scope = 'mmdet'", "default_scope = 'mmseg'", 'default_scope = 3',
            "data_root = 'data/'", 'data_root = None', "data_root = 'missing/'",
            "train_dataloader = dict(dataset=dict(type='CocoDataset', data_root='data/', ann_file='a.json'))",
            "val_dataloader = dict(dataset=dict(type='ADE20KDataset', data_root='data/', data_prefix={'img_path': 3}))",
            "test_dataloader = dict(dataset=[dict(data_root='data/'), None])",
            'train_dataloader = 3', 'train_cfg = dict(max_epochs=2)', 'visualizer = None',
            "_base_ = 'missing.py'", "_base_ = ['other.py']", "_base_ = 'mmdet::missing.py'", '_base_ = 3',
            'import no_such_package', 'import math', 'value = 1 / 0', "raise ValueError('no')",
            'x = undefined', 'x = {{fileDirname}}', "x = '{{_base_.model}}'", "x = '{{$HOME:none}}'", 'x = lambda: 1',
            "custom_imports = dict(imports=['swin_dense'])", "custom_imports = dict(imports=['no_such'])",
            'def f():', '\tif x', '\x00', 'é = "ü"', '# a comment',
        ]
    ),
    max_size=3,
)  # fmt: skip
CONFIG_OPTIONS = st.lists(
    st.sampled_from(
        [
            ('--set', 'model.backbone.depths=[2,2]'), ('--set', 'model.x.y.z=1'), ('--set', 'train_cfg=3'),
            ('--set', 'model=[1'), ('--set', 'x'), ('--set', 'train_dataloader.dataset.0.x=1'), ('--set', '=1'),
            ('--set', 'default_scope=mmseg'), ('--set', 'model.0=1'), ('--set', "visualizer={'a':1}"),
            ('--classes', 'a,b'), ('--classes', 'a,a'), ('--classes', ''), ('--data-root', 'mine'),
            ('--train-images', 'x'), ('--val-masks', '.'), ('--val-ann', 'other.py'), ('--ignore', '11'),
            ('--data-root', ''), ('--out', 'written.py'), ('--out', 'x.txt'), ('--out', 'no/x.py'), ('--force',),
        ]
    ),
    max_size=3,
)  # fmt: skip


def try_config(example: Any) -> str:
    is_whole, lines, options, cut = example
    lines = [*WHOLE_CONFIG, *lines] if is_whole else lines
    text = '\n'.join(lines)
    with in_playground() as folder:
        Path(folder, 'config.py').write_text(text[: len(text) - cut] + '\n', encoding='utf-8')
        Path(folder, 'other.py').write_text("data_root = 'data/'\n")
        return run_command(['config', 'config.py', *(part for option in options for part in option)])


# `config` has a kind of its own, with config files.
COMMANDS = tuple(sorted({*command_names()} - {'config'}))
NUMBERS = st.sampled_from(['0', '1', '2', '3', '7', '-1', '8', '32', '56', '224', '1e3', 'x', '', '9' * 30])
WORDS = st.one_of(
    st.sampled_from(
        [
            'image.png', 'damaged.png', 'images', 'checkpoint.pth', 'damaged.pth', 'config.py', 'broken.py', 'list.txt',
            'empty.txt', 'missing', 'missing.pth', 'new', 'new.png', 'new.pdf', 'new.pth', 'new.safetensors', 'a.zarr',
            'new.onnx', 'new.pt2', 'new.ts', 'new.html',
            'in a folder/new.png', 'swin_t', 'swinv2_t', 'swin_x', 'upernet', 'a=1', 'model.x=[1', '*.png',
            'http://127.0.0.1:9/x.pth', 'file:///nothing.pth', 'hf://x', 's9://x', 'cpu', 'cuda:99', 'backbone', '.',
        ]
    ),
    st.text(alphabet='ab.=[](){},"\'1e-_ *?\n\x7f\u00e9\udcff', max_size=8),
)  # fmt: skip


RIGHT = {
    'image': 'image.png', 'images': 'image.png', 'sources': 'images', 'source': 'checkpoint.pth', 'folder': 'images',
    'checkpoint': 'checkpoint.pth', 'config': 'config.py', 'out': 'new.png',
}  # fmt: skip


def command_lines() -> Any:
    """Draw a command, its required arguments and some options, with values of the right and of wrong types."""
    return st.sampled_from(COMMANDS).flatmap(
        lambda name: _arguments_of(_parser_of(name)).map(lambda found: [name, *found])
    )


def _parser_of(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    importlib.import_module(f'swin_dense.commands.{name}').add_arguments(parser)
    return parser


def _arguments_of(parser: argparse.ArgumentParser) -> Any:
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    inner = [action for action in actions if isinstance(action, argparse._SubParsersAction)]
    if inner:
        return st.sampled_from(sorted(inner[0].choices)).flatmap(
            lambda kind: _arguments_of(inner[0].choices[kind]).map(lambda found: [kind, *found])
        )
    named = [_occurrence(action) for action in actions if action.option_strings]
    needed = [_occurrence(action) for action in actions if action.option_strings and action.required]
    positional = [_occurrence(action) for action in actions if not action.option_strings]
    # Usually each required argument is present, because a missing one ends the run before other errors are reached.
    parts = [mostly(part, st.just([])) for part in (*positional, *needed)]
    more = st.lists(st.one_of(named), max_size=4) if named else st.just([])
    return st.tuples(st.tuples(*parts), more).map(lambda found: [word for words in chain(*found) for word in words])


def _occurrence(action: argparse.Action) -> Any:
    if action.dest in RIGHT:
        value = mostly(st.just(RIGHT[action.dest]), WORDS)
    elif action.choices is not None:
        value = st.sampled_from([*map(str, action.choices), 'nothing'])
    elif action.type in (int, float):
        value = mostly(NUMBERS, WORDS)
    else:
        value = mostly(WORDS, NUMBERS)
    counts = {None: (1, 1), 0: (0, 0), '?': (0, 1), '+': (1, 3), '*': (0, 2)}
    least, most = counts.get(action.nargs, (action.nargs, action.nargs))
    return st.lists(value, min_size=least, max_size=most).map(lambda words: [*action.option_strings[:1], *words])


def try_command_line(example: list[str]) -> str:
    with in_playground() as folder:
        Image.new('RGB', (40, 30)).save(folder / 'image.png')
        (folder / 'damaged.png').write_bytes((folder / 'image.png').read_bytes()[:60])
        (folder / 'images').mkdir()
        for name in ('a.png', 'b.png'):
            shutil.copy(folder / 'image.png', folder / 'images' / name)
        content = checkpoints()['bare.pth']
        (folder / 'checkpoint.pth').write_bytes(content)
        (folder / 'damaged.pth').write_bytes(content[:1000])
        (folder / 'config.py').write_text("default_scope = 'mmseg'\nmodel = dict(type='SwinDense')\n")
        (folder / 'broken.py').write_text('model = [1\n')
        (folder / 'list.txt').write_text('image.png\nmissing\n')
        (folder / 'empty.txt').write_text('')
        with (
            mock.patch.dict('swin_dense.models.create.BACKBONES', {'swin': _in_small, 'swinv2': _in_small}),
            _in_moments(),
        ):
            return run_command(example)


@contextlib.contextmanager
def _in_moments() -> Iterator[None]:
    """Make commands quick: `doctor` returns fixed findings, and `export` writes an empty file and compares nothing."""
    found = [Finding('check', status, status, 'text', 'cure') for status in ('ok', 'broken')]
    with (
        mock.patch('swin_dense.commands.doctor.examine', return_value=found),
        mock.patch.dict(formats.FORMATS, dict.fromkeys(formats.FORMATS, _write_nothing)),
        mock.patch('swin_dense.export.verify._errors', return_value={}),
    ):
        yield


def _write_nothing(model: torch.nn.Module, img: torch.Tensor, free: Any, opset: int | None, path: Path) -> int:
    path.write_bytes(b'')
    return 0


def _in_small(*args: Any, **options: Any) -> SwinBackbone:
    """Build a backbone on 'meta' to check its options; if it is large, return a small one instead."""
    with torch.device('meta'):
        requested = SwinBackbone(*args, **options)
    if sum(parameter.numel() for parameter in requested.parameters()) > 10**5:
        return SwinBackbone(**TINY, window_size=requested.window_size, in_channels=requested.in_channels)
    return SwinBackbone(*args, **options)


@contextlib.contextmanager
def in_playground() -> Iterator[Path]:
    """Create an empty folder and make it the working directory."""
    folder = playground() / 'current'
    folder.mkdir()
    before = os.getcwd()
    os.chdir(folder)
    try:
        with mock.patch.dict(os.environ, {'TORCH_HOME': str(folder / 'home'), 'HF_HUB_OFFLINE': '1'}):
            yield folder
    finally:
        os.chdir(before)
        shutil.rmtree(folder)


def run_command(arguments: list[str]) -> str:
    """Run ``swin-dense`` in this process; argparse or a ``raise`` of this package must reject invalid arguments."""
    printed, errors = io.StringIO(), io.StringIO()
    limit = Image.MAX_IMAGE_PIXELS
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
        warnings.catch_warnings(),
        mock.patch.dict(os.environ, {TRACEBACK: '1'}),
    ):
        warnings.simplefilter('ignore')
        try:
            status = main(arguments)
        except SystemExit as stopped:  # argparse
            status = stopped.code
        except Exception as error:
            return refused(error)
        finally:
            Image.MAX_IMAGE_PIXELS = limit
    assert status in (0, 1, 2), status
    assert 'Traceback' not in errors.getvalue()
    if status == 2:
        assert 'error: ' in errors.getvalue()
        return REFUSED
    return TAKEN


@dataclass(frozen=True)
class Kind:
    """A kind of fuzzed input.

    Attributes:
        strategy: strategy that generates the examples.
        attempt: function that tries one example.
        share: percentage of all examples that are of this kind; smaller if an example takes long.
        needs: optional packages that the kind needs.
    """

    strategy: Any
    attempt: Callable[[Any], str]
    share: int
    needs: tuple[str, ...] = ()


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
    'arrays for extract_pyramid, with options': Kind(st.tuples(ARRAYS, some_of(PYRAMID_OPTIONS, ODD)), try_arrays, 18),
    'lists of KEY=VALUE': Kind(
        st.lists(st.text(alphabet='ab.=[](){},"\'1e-_ \\\n\x00', max_size=40), max_size=3),
        try_settings,
        10,
        ('mmengine',),
    ),
    'checkpoint files, whole and damaged': Kind(
        st.deferred(
            lambda: st.tuples(
                st.sampled_from(sorted(checkpoints())),
                st.sampled_from([True, True, True, False]),
                SEEDS,
                st.sampled_from(['v1', 'v1', 'v2', 'other']),
                some_of(LOADING_OPTIONS, ODD),
            )
        ),
        try_checkpoint_file,
        13,
        ('safetensors',),
    ),
    'pickles of random operations': Kind(
        st.tuples(SEEDS, st.booleans(), st.sampled_from(['v1', 'v2'])), try_pickle, 10
    ),
    'state dicts with wrong entries': Kind(
        st.tuples(
            st.sampled_from(['ours', *FAMILIES]), SEEDS, st.sampled_from(['v1', 'other']), some_of(LOADING_OPTIONS, ODD)
        ),
        try_state_dict,
        10,
    ),
    'damaged image files, whole or by parts': Kind(
        st.tuples(st.sampled_from(sorted(ORIGINALS)), SEEDS, st.booleans()),
        try_image_file,
        9,
        ('tifffile', 'cv2'),
    ),
    'config files, with options of swin-dense config': Kind(
        st.tuples(st.booleans(), CONFIG_LINES, CONFIG_OPTIONS, st.sampled_from([0, 0, 0, 1, 5])),
        try_config,
        3,
        ('mmengine',),
    ),
    'command lines': Kind(
        st.deferred(command_lines), try_command_line, 5, ('matplotlib', 'tqdm', 'pyarrow', 'mmengine', 'mmdet', 'mmseg')
    ),
}
