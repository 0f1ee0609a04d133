"""Reading checkpoint files: no code in a file runs, and errors name its defect."""

import argparse
import collections
import datetime
import functools
import os
import pathlib
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch

from swin_dense import CheckpointError, SwinBackbone, create_backbone
from swin_dense.checkpoint.convert import flatten
from swin_dense.checkpoint.save import write_file
from swin_dense.checkpoint.unpickler import StandIn
from tests.checkpoint.helpers import (
    SAFETENSORS,
    SAVERS,
    Runs,
    edit_index,
    load,
    raises_and_keeps,
    save_legacy,
    save_plain,
    save_zipped,
    write_shards,
)
from tests.conftest import IfInstalled, equal_weights, needs

mmengine_config, mmengine_logging = IfInstalled('mmengine.config'), IfInstalled('mmengine.logging')


ENDINGS = ['.pth', pytest.param('.safetensors', marks=needs('safetensors'))]


@pytest.mark.parametrize('ending', ['', '.pt', '.bin', ' with space.pth', *ENDINGS])
def test_files_of_every_ending(tmp_path, ending, source, backbone):
    state = source.state_dict()
    content = state if ending == '.safetensors' else {'model': state}
    path = write_file(tmp_path / f'a{ending}', content)
    report = load(backbone, str(path))
    assert equal_weights(backbone, source)
    assert report.source == str(path)
    assert list(tmp_path.iterdir()) == [path]
    before = path.read_bytes()
    write_file(path, content, force=True)
    assert path.read_bytes() == before


class Settings(dict):
    """A dict of a training program, which the reader does not know."""


class Node:
    """An object of a training program, which the reader does not know."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def of_mmengine():
    history = mmengine_logging.HistoryBuffer()
    history.update(0.5)
    return {'loss': history, 'cfg': mmengine_config.ConfigDict(a=1)}


# What training programs save beside the weights.
BESIDE = {
    'mmengine': of_mmengine,
    'numpy': lambda: {
        'lr': np.float64(0.1),
        'ids': np.arange(3),
        'at': np.datetime64('2020'),
        'random': np.random.RandomState(0),
        'rng': np.random.default_rng(0).bit_generator.state,
    },
    'a library': lambda: {
        'lr': Settings(node=Node(value=3, kind=Any)),
        'modes': collections.defaultdict(dict, a={}),
        'nested': Node(inner=Node(), model=torch.nn.Linear(1, 1)),
    },
    'Python': lambda: {
        'args': argparse.Namespace(lr=0.1, mode=re.compile('x'), out=pathlib.Path('x')),
        'counts': collections.Counter('abc'),
        'queue': collections.deque([1, 2]),
        'elapsed': datetime.timedelta(3),
        'loss': functools.partial(torch.nn.Linear, 1),
        'error': ValueError('x'),
        datetime.date(2020, 1, 1): {datetime.date(2020, 1, 1), 2},
        ('layer', 1): 'a tuple as a key',
    },
    'names': lambda: {
        'kind': SwinBackbone,
        'call': torch.nn.functional.relu,
        'dtype': torch.float16,
    },
}


@pytest.mark.parametrize('save', SAVERS)
@pytest.mark.parametrize('beside', BESIDE)
def test_files_of_training_programs_load(tmp_path, source, backbone, beside, save):
    save({'state_dict': source.state_dict(), **BESIDE[beside]()}, tmp_path / 'last.ckpt')
    report = load(backbone, tmp_path / 'last.ckpt')
    assert equal_weights(backbone, source)
    assert report.unexpected == []


def test_weights_in_a_dict_of_another_class_load(tmp_path, source, backbone):
    save_plain({'model': Settings(source.state_dict())}, tmp_path / 'a.pkl')
    load(backbone, tmp_path / 'a.pkl')
    assert equal_weights(backbone, source)


def test_objects_that_are_not_read_are_named(tmp_path, source, backbone):
    """Weights in the attributes of an object are not found, because attributes are not read."""
    save_plain({'state': Node(w=source.state_dict())}, tmp_path / 'a.pkl')
    raises_and_keeps(backbone, tmp_path / 'a.pkl', r'objects of tests\.checkpoint\.test_files\.Node, which are')


@pytest.mark.parametrize('save', [save_zipped, save_legacy])
def test_a_malicious_pickle_does_not_run(tmp_path, source, backbone, save):
    """Nothing that it names is called; the weights beside it load."""
    trap, path = tmp_path / 'trap', tmp_path / 'evil.pth'
    save({'model': source.state_dict(), 'x': Runs(os.system, f'touch {trap}')}, path)
    load(backbone, path)
    created = create_backbone(checkpoint=path)
    assert not trap.exists()
    assert equal_weights(backbone, source)
    assert equal_weights(created, source)
    load(backbone, path, trust=True)
    assert trap.exists()


@pytest.mark.filterwarnings('ignore:.*Couldn.t retrieve source code')
@pytest.mark.parametrize('save', [save_zipped, save_legacy])
@pytest.mark.parametrize('nested', [True, False])
def test_a_whole_model_needs_trust(tmp_path, source, backbone, save, nested):
    path = tmp_path / 'model.pth'
    save({'net': source, 'epoch': 3} if nested else source, path)
    where = " under 'net'" if nested else ''
    message = raises_and_keeps(backbone, path, r'torch\.save\(model\.state_dict\(\)')
    assert f'whole model, pickled as a swin_dense.models.swin.SwinBackbone{where}' in message
    load(backbone, path, trust=True)
    assert equal_weights(backbone, source)


def test_a_whole_graph_is_named(tmp_path, backbone):
    torch.save(torch.fx.symbolic_trace(torch.nn.Linear(1, 1)), tmp_path / 'model.pth')
    raises_and_keeps(backbone, tmp_path / 'model.pth', r'a whole model, pickled as a torch\.fx\.')


def test_a_model_beside_other_weights_is_not_blamed(tmp_path, backbone):
    checkpoint = {'state_dict': {'fc.weight': torch.ones(1)}, 'loss': torch.nn.GELU()}
    torch.save(checkpoint, tmp_path / 'resnet.ckpt')
    raises_and_keeps(backbone, tmp_path / 'resnet.ckpt', r'state_dict\.fc\.weight and objects')


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (b'', 'is empty'),
        (b'version https://git-lfs.github.com/spec/v1\noid sha256:1', 'git lfs pull'),
        (b'\n<!DOCTYPE html><html>not found</html>', 'is a web page'),
        (b'hello world, this is text', r'\(25 bytes\) is not a checkpoint'),
        (b'\x00' * 1000, 'is not a checkpoint'),
        (b'\x80\x04]', 'is not a checkpoint'),
    ],
)
@pytest.mark.parametrize('ending', ENDINGS)
def test_files_that_are_no_checkpoints(tmp_path, backbone, content, message, ending):
    path = tmp_path / f'a{ending}'
    path.write_bytes(content)
    raises_and_keeps(backbone, path, message)


@pytest.mark.parametrize('ending', ENDINGS)
@pytest.mark.parametrize('part', [0.01, 0.5, 0.99])
def test_a_truncated_file(tmp_path, source, backbone, ending, part):
    path = write_file(tmp_path / f'a{ending}', source.state_dict())
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    message = raises_and_keeps(backbone, path, r'damaged or cut short: \w+ \w')
    assert not message.endswith(']')  # a line of text, not a list of lines


def test_what_is_read_of_nested_dicts():
    """Levels to the 32nd; keys that are text, or numbers of tensors; no dict in itself, and each in few places."""
    weights = torch.ones(2)
    levels = {1: {'a': weights}}
    for level in range(2, 34):
        levels[level] = {'in': levels[level - 1]}
    assert list(flatten(levels[32])) == ['in.' * 31 + 'a']
    assert not flatten(levels[33])
    # The text of an object can be far longer than its pickle.
    keys = ['a', 5, (1, 2), StandIn('a.Key')]
    assert list(flatten(dict.fromkeys(keys, weights))) == ['a', '5']
    checkpoint = {'a': weights}
    checkpoint['again'] = {'itself': checkpoint}
    assert list(flatten(checkpoint)) == ['a']
    for _ in range(30):
        checkpoint = {'left': checkpoint, 'right': checkpoint}
    assert 1 < len(flatten(checkpoint)) < 100
    shared = {'in': weights}
    assert len(flatten(dict.fromkeys('abcdefghij', shared))) == 8
    assert list(map(len, flatten({'a' * 2000: weights}))) == [1000]
    arrays = {'wide': np.zeros(2), 'complex': np.zeros(2, 'c8'), 'text': np.array('a')}
    assert list(flatten(arrays)) == ['wide']
    # State dicts of modules are temporary, so that Python gives several of them the same identity.
    layers = {str(number): torch.nn.Linear(1, 1) for number in range(40)}
    assert len(flatten(layers)) == 80


def test_values_that_are_not_finite(source, backbone):
    state = source.state_dict()
    state['stages.0.blocks.0.ffn.layers.0.0.weight'][3, 2] = float('nan')
    state['norm0.bias'][:2] = float('inf')
    raises_and_keeps(backbone, state, r'weight: 1 of its 256 values are NaN')
    report = load(backbone, state, allow_partial=True)
    assert list(report.damaged) == ['stages.0.blocks.0.ffn.layers.0.0.weight', 'norm0.bias']
    assert 'damaged, not loaded: norm0.bias: 2 of its 8 values' in str(report)
    assert all(tensor.isfinite().all() for tensor in backbone.state_dict().values())


def test_a_value_that_overflows_in_the_dtype_of_the_model(source, backbone):
    state = source.double().state_dict()
    state['norm0.bias'][1] = 1e300
    raises_and_keeps(backbone, state, r'norm0\.bias: 1 of its 8 values')


@pytest.mark.parametrize('name', [SAFETENSORS, 'pytorch_model.bin'])
@pytest.mark.parametrize('form', ['one file', 'shards', 'index'])
def test_a_folder_of_save_pretrained(tmp_path, source, backbone, name, form):
    path = tmp_path
    if form == 'one file':
        write_file(tmp_path / name, source.state_dict())
    else:
        index = write_shards(tmp_path, source.state_dict(), name)
        path = index if form == 'index' else tmp_path
    load(backbone, path)
    assert equal_weights(backbone, source)


def second_shard(index):
    (shard,) = index.parent.glob('*-00002-*')
    return shard


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (lambda index: second_shard(index).unlink(), 'lacks .*-00002-of-00003.* 3 files'),
        (lambda index: second_shard(index).write_bytes(b''), '-00002-of-00003.* is empty'),
        (lambda index: edit_index(index, lambda _: second_shard(index).name), 'lacks .*, which .* lists for it'),
        (lambda index: edit_index(index, lambda shard: '../' + shard), 'which is not a shard in the same folder'),
        (lambda index: edit_index(index, lambda shard: index.name), 'which is not a shard in the same folder'),
        (lambda index: edit_index(index, lambda shard: 3), 'is not an index'),
        (lambda index: edit_index(index, lambda shard: [shard]), 'is not an index'),
        (lambda index: edit_index(index, lambda shard: '..'), r'lacks \.\.'),
        (lambda index: index.write_text('{"metadata": {}}'), "is not an index.*'weight_map'"),
        (lambda index: index.write_text('{"weight_map": {}}'), 'no parameters of a Swin'),
    ],
)
def test_an_incomplete_sharded_checkpoint(tmp_path, source, backbone, damage, message):
    (tmp_path / 'in').mkdir()
    index = write_shards(tmp_path / 'in', source.state_dict(), 'pytorch_model.bin')
    for shard in index.parent.glob('*.bin'):  # shards in another folder, which an index must not reach
        write_file(tmp_path / shard.name, source.state_dict())
    damage(index)
    raises_and_keeps(backbone, index.parent, message)


@pytest.mark.parametrize('name', [SAFETENSORS, 'pytorch_model.bin'])
@pytest.mark.parametrize('part', ['*-00001-*', '*-00003-*'])
def test_one_of_several_files_asks_for_all(tmp_path, source, backbone, name, part):
    """It would be a smaller network, without an error."""
    index = write_shards(tmp_path, source.state_dict(), name)
    (shard,) = tmp_path.glob(part)
    message = raises_and_keeps(backbone, shard, rf'in 3 files. Give their folder, or {re.escape(index.name)} in it')
    assert str(shard) in message
    with pytest.raises(CheckpointError, match='Give their folder'):
        create_backbone(checkpoint=shard.as_uri())
    load(backbone, write_file(tmp_path / f'model-00001-of-00001.{name.rpartition(".")[2]}', source.state_dict()))
    assert equal_weights(backbone, source)


def test_contents_and_paths_without_a_checkpoint(tmp_path, backbone):
    (tmp_path / 'a.pkl').write_bytes(pickle.dumps([1, 2]))
    raises_and_keeps(backbone, tmp_path / 'a.pkl', 'holds a list; a checkpoint is a dict')
    torch.save(torch.zeros(3), tmp_path / 'a.pth')
    raises_and_keeps(backbone, tmp_path / 'a.pth', 'holds a Tensor; a checkpoint is a dict')
    raises_and_keeps(backbone, tmp_path, 'is a folder')
    with pytest.raises(FileNotFoundError, match='no checkpoint file at'):
        load(backbone, tmp_path / 'b.pth')
