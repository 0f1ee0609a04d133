"""Lists of settings, config files and command lines."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from PIL import Image

from swin_dense import SwinBackbone
from swin_dense.commands._main import TRACEBACK, command_names, main, parser_of
from swin_dense.export import formats
from tests.conftest import TINY
from tests.fuzzing.checkpoints import checkpoints
from tests.fuzzing.common import REFUSED, TAKEN, Kind, mostly, playground, refused
from tests.fuzzing.programs import words_of


def lines_of(text: str) -> Any:
    """Draw at most three lines of a text, in which they are separated by | too, with a tab and a NUL as in Python."""
    text = text.strip().replace(r'\t', '\t').replace(r'\x00', '\0')
    return st.lists(st.sampled_from(re.split(r' \| |\n    ', text)), max_size=3)


def try_settings(example: list[str]) -> str:
    from swin_dense.workbench.configs.settings import parse_settings

    try:
        parsed = parse_settings(example)
    except ValueError as error:
        return refused(error)
    assert isinstance(parsed, dict)
    return TAKEN


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


def try_config(example: Any) -> str:
    is_whole, lines, options, cut = example
    lines = [*WHOLE_CONFIG, *lines] if is_whole else lines
    text = '\n'.join(lines)
    with in_playground() as folder:
        Path(folder, 'config.py').write_text(text[: len(text) - cut] + '\n', encoding='utf-8')
        Path(folder, 'other.py').write_text("data_root = 'data/'\n")
        return run_command(['config', 'config.py', *options])


# `config` has a kind of its own, with config files.
COMMANDS = tuple(sorted({*command_names()} - {'config'}))
NUMBERS = st.sampled_from(['0', '1', '2', '3', '7', '-1', '8', '32', '56', '224', '1e3', 'x', '', '9' * 30])
WORDS = st.one_of(
    st.sampled_from(
        words_of("""
            image.png damaged.png images checkpoint.pth damaged.pth config.py broken.py list.txt empty.txt missing
            missing.pth new new.png new.pdf new.pth new.safetensors a.zarr new.onnx new.pt2 new.ts new.html
            folder/new.png swin_t swinv2_t swin_x upernet a=1 model.x=[1 *.png http://127.0.0.1:9/x.pth
            file:///nothing.pth hf://x s9://x cpu cuda:99 backbone .
        """)
    ),
    st.text(alphabet='ab.=[](){},"\'1e-_ *?\n\x7f\u00e9\udcff', max_size=8),
)
RIGHT = {
    'image': 'image.png',
    'images': 'image.png',
    'sources': 'images',
    'source': 'checkpoint.pth',
    'folder': 'images',
    'checkpoint': 'checkpoint.pth',
    'config': 'config.py',
    'out': 'new.png',
}


def command_lines() -> Any:
    """Draw a command, its required arguments and some options, with values of the right and of wrong types."""
    return st.sampled_from(COMMANDS).flatmap(lambda name: _arguments_of_kind(name, parser_of(name)))


def _arguments_of(parser: argparse.ArgumentParser) -> Any:
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    for action in actions:
        if isinstance(action, argparse._SubParsersAction):
            return st.one_of([_arguments_of_kind(kind, inner) for kind, inner in sorted(action.choices.items())])
    positional = [_occurrence(action) for action in actions if not action.option_strings]
    named = [_occurrence(action) for action in actions if action.option_strings]
    needed = [_occurrence(action) for action in actions if action.option_strings and action.required]
    # Usually each required argument is present, because a missing one ends the run before other errors are reached.
    parts = [mostly(part, st.just([])) for part in (*positional, *needed)]
    more = st.lists(st.one_of(named), max_size=4) if named else st.just([])
    return st.tuples(st.tuples(*parts), more).map(lambda found: list(chain(*chain(*found))))


def _arguments_of_kind(kind: str, parser: argparse.ArgumentParser) -> Any:
    return _arguments_of(parser).map(lambda found: [kind, *found])


def _occurrence(action: argparse.Action) -> Any:
    if action.dest in RIGHT:
        value = mostly(st.just(RIGHT[action.dest]), WORDS)
    elif action.choices is not None:
        value = st.sampled_from([*map(str, action.choices), 'nothing'])
    elif action.type in (int, float):
        value = mostly(NUMBERS, WORDS)
    else:
        value = mostly(WORDS, NUMBERS)
    counts = {
        None: (1, 1),
        0: (0, 0),
        '?': (0, 1),
        '+': (1, 3),
        '*': (0, 2),
    }
    least, most = counts.get(action.nargs, (action.nargs, action.nargs))
    return st.lists(value, min_size=least, max_size=most).map(lambda words: [*action.option_strings[:1], *words])


def try_command_line(example: list[str]) -> str:
    with in_playground() as folder:
        (folder / 'images').mkdir()
        for name in ('image.png', 'images/a.png', 'images/b.png'):
            Image.new('RGB', (40, 30)).save(folder / name)
        content = checkpoints()['bare.pth']
        (folder / 'damaged.png').write_bytes((folder / 'image.png').read_bytes()[:60])
        (folder / 'checkpoint.pth').write_bytes(content)
        (folder / 'damaged.pth').write_bytes(content[:1000])
        (folder / 'config.py').write_text("default_scope = 'mmseg'\nmodel = dict(type='SwinDense')\n")
        (folder / 'broken.py').write_text('model = [1\n')
        (folder / 'list.txt').write_text('image.png\nmissing\n')
        (folder / 'empty.txt').write_text('')
        with _in_moments():
            return run_command(example)


@contextlib.contextmanager
def _in_moments() -> Iterator[None]:
    """Make commands quick: models are small, `doctor` tries nothing, `export` writes and compares nothing."""
    with (
        mock.patch.dict('swin_dense.create.BACKBONES', {'swin': _in_small, 'swinv2': _in_small}),
        mock.patch('swin_dense.commands.doctor.PROBES', {'torch alone': ('torch', '')}),
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


KINDS = {
    'lists of KEY=VALUE': Kind(
        st.lists(st.text(alphabet='ab.=[](){},"\'1e-_ \\\n\x00', max_size=40), max_size=3),
        try_settings,
        10,
        ('mmengine',),
    ),
    'config files, with options of swin-dense config': Kind(
        st.tuples(st.booleans(), CONFIG_LINES, CONFIG_OPTIONS, st.sampled_from([0, 0, 0, 1, 5])),
        try_config,
        3,
        ('mmengine',),
    ),
    'command lines': Kind(
        st.deferred(command_lines),
        try_command_line,
        5,
        ('tqdm', 'pyarrow', 'mmengine', 'mmdet', 'mmseg'),
    ),
}
