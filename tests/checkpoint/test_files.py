"""Reading, fetching and writing checkpoint files: no code in a file runs, and errors name its defect."""

import argparse
import base64
import collections
import concurrent.futures
import contextlib
import datetime
import functools
import hashlib
import http.server
import json
import multiprocessing
import operator
import os
import pathlib
import pickle
import re
import shutil
import socket
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest
import torch

from swin_dense import SwinBackbone, create_backbone
from swin_dense.checkpoint import CheckpointError, export_state_dict, load_checkpoint, read
from swin_dense.checkpoint.export import write_file
from swin_dense.checkpoint.find import flatten
from swin_dense.checkpoint.read import file_digest, local_file, read_file
from tests.conftest import IfInstalled, needs, small_disk

mmengine_config, mmengine_logging = IfInstalled('mmengine.config'), IfInstalled('mmengine.logging')

ARCH = {'embed_dims': 8, 'depths': (1, 1), 'num_heads': (2, 4)}
needs_safe_globals = pytest.mark.skipif(torch.__version__ < '2.6', reason='needs torch 2.6')


@pytest.fixture
def source():
    return SwinBackbone(**ARCH)


@pytest.fixture
def backbone():
    return SwinBackbone(**ARCH)


def equal_weights(backbone, source):
    return all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in backbone.state_dict().items())


def load(backbone, source, **options):
    return load_checkpoint(backbone, source, log=None, **options)


@pytest.mark.parametrize(
    'name', ['a', 'a.pth', 'a.pt', 'a.bin', pytest.param('a.safetensors', marks=needs('safetensors')), 'with space.pth']
)
def test_files_of_every_ending(tmp_path, name, source, backbone):
    state = source.state_dict()
    path = write_file(tmp_path / name, state if name.endswith('safetensors') else {'model': state})
    report = load(backbone, str(path) if 'space' in name else path)
    assert equal_weights(backbone, source)
    assert report.source == str(path)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    content = path.read_bytes()
    write_file(path, state if name.endswith('safetensors') else {'model': state}, force=True)
    assert path.read_bytes() == content


def test_what_training_leaves_in_checkpoints_is_harmless(tmp_path, source, backbone):
    history = mmengine_logging.HistoryBuffer()
    history.update(0.5)
    checkpoint = {
        'state_dict': source.state_dict(),
        'message_hub': {'log_scalars': {'loss': history}, 'lr': np.float64(0.1), 'ids': np.arange(3)},
        'meta': {'cfg': mmengine_config.ConfigDict(a=1), 'time': np.datetime64('2020-01-01'), 'seed': np.int64(1)},
        'args': argparse.Namespace(lr=0.1, output=pathlib.Path('x')),
        'counts': collections.Counter('abc'),
        'ids': {1, 2},
    }
    torch.save(checkpoint, tmp_path / 'epoch_1.pth')
    load(backbone, tmp_path / 'epoch_1.pth')
    assert equal_weights(backbone, source)


def made(name, base=object, **attributes):
    """Make a class that pickles under a name, as that of a library which is not installed here."""
    module, _, short = name.rpartition('.')
    kind = type(short, (base,), {'__module__': module, '__qualname__': short})
    thing = kind()
    vars(thing).update(attributes)
    return thing


def omegaconf():
    node = made(
        'omegaconf.nodes.AnyNode', _val=3, _metadata=made('omegaconf.base.Metadata', ref_type=Any, optional=True)
    )
    content = {'lr': node, 'modes': collections.defaultdict(dict, a={})}
    return made('omegaconf.dictconfig.DictConfig', _content=content, _parent=None)


def yacs(name):
    config = made(name, dict)
    config['MODEL'] = made(name, dict)
    config['MODEL']['DEPTHS'] = [2, 2]
    vars(config)['__immutable__'] = True
    return config


# What training programs save beside the weights, by program.
TRAINING = {
    'Lightning': lambda: {
        'hyper_parameters': made('lightning.fabric.utilities.data.AttributeDict', dict, model=torch.nn.Linear(1, 1)),
        'callbacks': {'Timer': {'elapsed': datetime.timedelta(3)}, 'loss': functools.partial(torch.nn.Linear, 1)},
    },
    'DeepSpeed': lambda: {
        'ds_config': made('deepspeed.runtime.config.DeepSpeedConfig', zero=made('deepspeed.zero.ZeroStageEnum')),
        'loss_scaler': made('deepspeed.runtime.fp16.loss_scaler.LossScaler', cur_scale=1.0),
        'dtype': torch.float16,
    },
    'fvcore': lambda: {
        'config': yacs('fvcore.common.config.CfgNode'),
        'rng': np.random.default_rng(0).bit_generator.state,
    },
    'yacs': lambda: {'config': yacs('yacs.config.CfgNode')},
    'Hydra': lambda: {'cfg': omegaconf(), 'run_dir': made('pathlib._local.PosixPath')},
    'argparse': lambda: {'args': argparse.Namespace(lr=0.1, mode=re.compile('x'), log=collections.deque([1]))},
    'classes': lambda: {
        'kind': SwinBackbone,
        'call': torch.nn.functional.relu,
        'error': ValueError('x'),
    },
}


@pytest.fixture
def importable(monkeypatch):
    """Let pickle find the classes of ``made``, which it looks up when it writes them."""
    monkeypatch.setattr(pickle._Pickler, 'save_global', _save_name)


def _save_name(self, thing, name=None):
    name = name or getattr(thing, '__qualname__', thing.__name__)
    self.write(f'c{thing.__module__}\n{name}\n'.encode())
    self.memoize(thing)


@pytest.mark.parametrize('kind', ['zip', 'legacy', 'plain'])
@pytest.mark.parametrize('program', TRAINING)
def test_files_of_training_programs_load(tmp_path, source, backbone, importable, program, kind):
    path, checkpoint = tmp_path / 'last.ckpt', {'state_dict': source.state_dict(), **TRAINING[program]()}
    writer = types.ModuleType('writer')
    vars(writer).update(Pickler=pickle._Pickler, dumps=pickle._dumps, dump=pickle._dump)
    if kind == 'plain':
        path.write_bytes(pickle._dumps(checkpoint, 2))
    else:
        torch.save(checkpoint, path, pickle_module=writer, _use_new_zipfile_serialization=kind == 'zip')
    report = load(backbone, path)
    assert equal_weights(backbone, source)
    assert report.unexpected == []
    assert not any(name.startswith(('omegaconf', 'deepspeed', 'fvcore')) for name in sys.modules)


def test_weights_in_a_dict_of_another_class_load(tmp_path, source, backbone, importable):
    state = made('a_library.StateDict', dict)
    state.update(source.state_dict())
    (tmp_path / 'a.pkl').write_bytes(pickle._dumps({'model': state}, 2))
    load(backbone, tmp_path / 'a.pkl')
    assert equal_weights(backbone, source)


def test_objects_that_are_not_read_are_named(tmp_path, source, backbone, importable):
    """Weights in the attributes of an object are not found, because attributes are not read."""
    (tmp_path / 'a.pkl').write_bytes(pickle._dumps({'state': made('a_library.State', w=source.state_dict())}, 2))
    with pytest.raises(CheckpointError, match=r'no tensors and objects of a_library\.State, which are not read'):
        load(backbone, tmp_path / 'a.pkl')


class Malicious:
    def __init__(self, tool):
        self.tool = tool

    def __reduce__(self):
        return self.tool


def _evil_tools(trap):
    return [
        (os.system, (f'touch {trap}',)),
        (pathlib.Path.touch, (pathlib.Path(trap),)),
        (eval, (f'open({str(trap)!r}, "w")',)),
        (operator.methodcaller('touch'), (pathlib.Path(trap),)),
    ]


@pytest.mark.parametrize('zipped', [True, False])
@pytest.mark.parametrize('tool', range(4))
def test_a_malicious_pickle_does_not_run(tmp_path, source, backbone, tool, zipped):
    """What it names is never called; the weights beside it load."""
    trap, path = tmp_path / 'trap', tmp_path / 'evil.pth'
    evil = Malicious(_evil_tools(trap)[tool])
    torch.save({'model': source.state_dict(), 'x': evil}, path, _use_new_zipfile_serialization=zipped)
    load(backbone, path)
    created = create_backbone(checkpoint=path)
    assert not trap.exists()
    assert equal_weights(backbone, source)
    assert equal_weights(created, source)
    load(backbone, path, trust=True)
    assert trap.exists()


def test_a_pickle_with_an_operation_of_no_training_program_is_refused(tmp_path, backbone):
    path = tmp_path / 'evil.pkl'
    path.write_bytes(b'\x80\x02ccollections\nOrderedDict\n)R)R.')
    with pytest.raises(CheckpointError, match=r'asks for .*; nothing was run\. .*load_checkpoint.*trust=True'):
        load(backbone, path)


@needs_safe_globals
def test_concurrent_loads_do_not_change_torch(tmp_path, source):
    """A concurrent or later torch.load returns mmengine's HistoryBuffer itself, not the inert stand-in for it."""
    history = mmengine_logging.HistoryBuffer()
    history.update(0.5)
    torch.save({'model': source.state_dict(), 'h': history, 'args': argparse.Namespace()}, tmp_path / 'a.pth')
    torch.save({'h': history}, tmp_path / 'plain.pth')
    torch.save({'args': argparse.Namespace()}, tmp_path / 'refused.pth')
    before = set(map(str, torch.serialization.get_safe_globals()))
    wrong = []

    def load_here():
        for _ in range(8):
            load(SwinBackbone(**ARCH), tmp_path / 'a.pth')

    def load_by_torch():
        for _ in range(40):
            if torch.load(tmp_path / 'plain.pth')['h'].mean() != 0.5:
                wrong.append('not the history')
            with contextlib.suppress(pickle.UnpicklingError):
                wrong.append(torch.load(tmp_path / 'refused.pth'))

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        for done in [*(pool.submit(load_here) for _ in range(4)), *(pool.submit(load_by_torch) for _ in range(2))]:
            done.result()
    assert not wrong
    assert set(map(str, torch.serialization.get_safe_globals())) == before
    assert torch.load(tmp_path / 'plain.pth')['h'].mean() == 0.5


@pytest.mark.filterwarnings('ignore:.*Couldn.t retrieve source code')
@pytest.mark.parametrize('zipped', [True, False])
@pytest.mark.parametrize('nested', [True, False])
def test_a_whole_model_needs_trust(tmp_path, source, backbone, zipped, nested):
    path = tmp_path / 'model.pth'
    torch.save({'net': source, 'epoch': 3} if nested else source, path, _use_new_zipfile_serialization=zipped)
    where = " under 'net'" if nested else ''
    with pytest.raises(CheckpointError) as raised:
        load(backbone, path)
    assert f'whole model, pickled as a swin_dense.models.swin.SwinBackbone{where}' in str(raised.value)
    assert 'torch.save(model.state_dict()' in str(raised.value)
    load(backbone, path, trust=True)
    assert equal_weights(backbone, source)


def test_a_whole_graph_is_named(tmp_path, backbone):
    torch.save(torch.fx.symbolic_trace(torch.nn.Linear(1, 1)), tmp_path / 'model.pth')
    with pytest.raises(CheckpointError, match=r'holds a whole model, pickled as a torch\.fx\.'):
        load(backbone, tmp_path / 'model.pth')


def test_a_model_beside_other_weights_is_not_blamed(tmp_path, backbone):
    torch.save({'state_dict': {'fc.weight': torch.ones(1)}, 'loss': torch.nn.GELU()}, tmp_path / 'resnet.ckpt')
    with pytest.raises(
        CheckpointError, match=r'no parameters of a Swin.* contains state_dict\.fc\.weight and objects of'
    ):
        load(backbone, tmp_path / 'resnet.ckpt')


@pytest.mark.parametrize('protocol', [2, 4, 5])
@pytest.mark.parametrize('whole', [True, False])
def test_a_plain_pickle_of_detectron2_loads(tmp_path, source, backbone, protocol, whole):
    arrays = {f'backbone.{name}': x.numpy() for name, x in export_state_dict(source, 'official').items()}
    arrays['backbone.num_batches_tracked'] = np.array(3)
    content = {'model': arrays, '__author__': 'third_party', 'matching_heuristics': True} if whole else arrays
    (tmp_path / 'model_final.pkl').write_bytes(pickle.dumps(content, protocol))
    report = load(backbone, tmp_path / 'model_final.pkl')
    assert report.family == 'official'
    assert equal_weights(backbone, source)


@needs_safe_globals
def test_a_weights_only_load_forced_by_the_environment_is_explained(tmp_path, source, backbone, monkeypatch):
    torch.save(source.state_dict(), tmp_path / 'a.pth')
    monkeypatch.setenv('TORCH_FORCE_WEIGHTS_ONLY_LOAD', '1')
    with pytest.raises(CheckpointError, match='unset it'):
        load(backbone, tmp_path / 'a.pth')


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
@pytest.mark.parametrize('ending', ['.pth', pytest.param('.safetensors', marks=needs('safetensors'))])
def test_files_that_are_no_checkpoints(tmp_path, backbone, content, message, ending):
    path = tmp_path / f'a{ending}'
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load(backbone, path)


@pytest.mark.parametrize('ending', ['.pth', pytest.param('.safetensors', marks=needs('safetensors'))])
@pytest.mark.parametrize('part', [0.01, 0.5, 0.99])
def test_a_truncated_file(tmp_path, source, backbone, ending, part):
    path = write_file(tmp_path / f'a{ending}', source.state_dict())
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(CheckpointError, match='damaged or cut short') as raised:
        load(backbone, path)
    assert not str(raised.value).endswith(']')  # a line of text, not a list of lines


def test_a_checkpoint_that_contains_itself(tmp_path, source, backbone):
    checkpoint = {'model': source.state_dict()}
    checkpoint['again'] = {'itself': checkpoint}
    torch.save(checkpoint, tmp_path / 'a.pth')
    load(backbone, tmp_path / 'a.pth')
    assert equal_weights(backbone, source)


def test_a_checkpoint_nested_deeper_than_the_recursion_limit(source, backbone):
    checkpoint = inner = {'model': source.state_dict()}
    for _ in range(5000):
        inner['deeper'] = inner = {}
    load(backbone, checkpoint)
    assert equal_weights(backbone, source)


def test_dicts_are_read_to_32_levels():
    weights = torch.ones(2)
    levels = {1: {'a': weights}}
    for level in range(2, 34):
        levels[level] = {'in': levels[level - 1]}
    assert torch.equal(flatten(levels[32])['in.' * 31 + 'a'], weights)
    assert not flatten(levels[33])


def test_values_that_are_not_finite(source, backbone):
    state = source.state_dict()
    state['stages.0.blocks.0.ffn.layers.0.0.weight'][3, 2] = float('nan')
    state['norm0.bias'][:2] = float('inf')
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    with pytest.raises(CheckpointError, match=r'Damaged: .*layers\.0\.0\.weight: 1 of its 256 values are NaN'):
        load(backbone, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())
    report = load(backbone, state, allow_partial=True)
    assert list(report.damaged) == ['stages.0.blocks.0.ffn.layers.0.0.weight', 'norm0.bias']
    assert 'damaged, not loaded: norm0.bias: 2 of its 8 values' in str(report)
    assert all(tensor.isfinite().all() for tensor in backbone.state_dict().values())


def test_a_value_that_overflows_in_the_dtype_of_the_model(source, backbone):
    state = {name: tensor.double() for name, tensor in source.state_dict().items()}
    state['norm0.bias'][1] = 1e300
    with pytest.raises(CheckpointError, match=r'norm0\.bias: 1 of its 8 values'):
        load(backbone, state)


SAFETENSORS = pytest.param('model.safetensors', marks=needs('safetensors'))


@pytest.mark.parametrize('name', [SAFETENSORS, 'pytorch_model.bin'])
def test_a_folder_of_save_pretrained(tmp_path, source, backbone, name):
    write_file(tmp_path / name, source.state_dict())
    load(backbone, tmp_path)
    assert equal_weights(backbone, source)


def write_shards(folder, state, name='model.safetensors', shards=3):
    """Write a state dict into shards and an index, as save_pretrained does; return the path of the index."""
    stem, _, suffix = name.rpartition('.')
    names = [f'{stem}-{number + 1:05}-of-{shards:05}.{suffix}' for number in range(shards)]
    for number, shard in enumerate(names):
        write_file(folder / shard, {key: state[key] for key in list(state)[number::shards]})
    weight_map = {key: names[number % shards] for number, key in enumerate(state)}
    (folder / f'{name}.index.json').write_text(json.dumps({'metadata': {'total_size': 1}, 'weight_map': weight_map}))
    return folder / f'{name}.index.json'


@pytest.mark.parametrize('name', [SAFETENSORS, 'pytorch_model.bin'])
@pytest.mark.parametrize('by_index', [False, True])
def test_a_sharded_checkpoint(tmp_path, source, backbone, name, by_index):
    index = write_shards(tmp_path, source.state_dict(), name)
    report = load(backbone, index if by_index else tmp_path)
    assert equal_weights(backbone, source)
    assert not report.missing


def edit_index(index, change):
    content = json.loads(index.read_text())
    first, *_ = content['weight_map']
    content['weight_map'][first] = change(content['weight_map'][first])
    index.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (lambda index: min(index.parent.glob('*-00002-*')).unlink(), 'lacks .*-00002-of-00003.* 3 files'),
        (lambda index: min(index.parent.glob('*-00002-*')).write_bytes(b''), '-00002-of-00003.* is empty'),
        (
            lambda index: edit_index(index, lambda shard: shard.replace('-00001-', '-00003-')),
            'lacks .*, which .* lists for it',
        ),
        (lambda index: edit_index(index, lambda shard: '../' + shard), 'which is not a shard in the same folder'),
        (
            lambda index: edit_index(index, lambda shard: str(index.parent / shard)),
            'which is not a shard in the same folder',
        ),
        (lambda index: edit_index(index, lambda shard: index.name), 'which is not a shard in the same folder'),
        (lambda index: edit_index(index, lambda shard: 3), 'is not an index'),
        (lambda index: edit_index(index, lambda shard: [shard]), 'is not an index'),
        (lambda index: edit_index(index, lambda shard: '..'), r'lacks \.\.'),
        (lambda index: index.write_text('{"weight_map": '), 'is not an index'),
        (lambda index: index.write_text('{"metadata": {}}'), "is not an index.*'weight_map'"),
        (lambda index: index.write_text('{"weight_map": {}}'), 'no parameters of a Swin'),
        (lambda index: index.write_bytes(b'\xff'), 'is not an index'),
    ],
)
def test_an_incomplete_sharded_checkpoint(tmp_path, source, backbone, damage, message):
    (tmp_path / 'in').mkdir()
    index = write_shards(tmp_path / 'in', source.state_dict(), 'pytorch_model.bin')
    for shard in index.parent.glob('*.bin'):  # shards in another folder, which an index must not reach
        write_file(tmp_path / shard.name, source.state_dict())
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    damage(index)
    with pytest.raises(CheckpointError, match=message):
        load(backbone, index.parent)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())


def test_contents_and_paths_without_a_checkpoint(tmp_path, backbone):
    (tmp_path / 'a.pkl').write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(CheckpointError, match='holds a list; a checkpoint is a dict'):
        load(backbone, tmp_path / 'a.pkl')
    torch.save(torch.zeros(3), tmp_path / 'a.pth')
    with pytest.raises(CheckpointError, match='holds a Tensor; a checkpoint is a dict'):
        load(backbone, tmp_path / 'a.pth')
    with pytest.raises(CheckpointError, match='is a folder'):
        load(backbone, tmp_path)
    with pytest.raises(FileNotFoundError, match='no checkpoint file at'):
        load(backbone, tmp_path / 'b.pth')


class TestHash:
    def test_the_suffix_is_written_and_verified(self, tmp_path, source, backbone):
        path = write_file(tmp_path / 'swin.pth', source.state_dict(), add_hash=True)
        assert re.fullmatch(r'swin-(\w{8,})\.pth', path.name)
        assert hash_of(path).startswith(path.stem.removeprefix('swin-'))
        load(backbone, path)
        wrong = path.rename(tmp_path / 'swin-0123abcd.pth')
        with pytest.raises(CheckpointError, match=f'begins with 0123abcd, but it begins with {hash_of(wrong)[:8]}'):
            load(backbone, wrong)

    @pytest.mark.parametrize(('digest', 'part'), [('1234567a8b', '1234567a'), ('123456789a8b', '123456789a')])
    def test_the_suffix_has_a_letter(self, tmp_path, source, monkeypatch, digest, part):
        monkeypatch.setattr('swin_dense.checkpoint.export.file_digest', lambda *_: digest)
        path = write_file(tmp_path / 'swin.pth', source.state_dict(), add_hash=True)
        assert path.name == f'swin-{part}.pth'

    @pytest.mark.parametrize(
        'name',
        [
            'run-20240131.pth',
            'step-00012345.pth',
            'swin-tiny.pth',
            'swin_12345678.pth',
            'a-b1234567-x.pth',
            f'git-{"0a" * 20}.pth',
        ],
    )
    def test_other_names_are_not_taken_for_a_hash(self, tmp_path, source, backbone, name):
        load(backbone, write_file(tmp_path / name, source.state_dict()))


def hash_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


class TestWriting:
    def test_a_file_is_replaced_only_by_force(self, tmp_path, source):
        path = tmp_path / 'a.pth'
        path.write_text('precious')
        with pytest.raises(FileExistsError, match='force=True replaces it'):
            write_file(path, source.state_dict())
        assert path.read_text() == 'precious'
        write_file(path, source.state_dict(), force=True)
        assert read_file(path).keys() == source.state_dict().keys()

    def test_a_failed_write_leaves_no_file(self, tmp_path, monkeypatch):
        def fail(checkpoint, file):
            file.write(b'half')
            raise OSError('disk full')

        monkeypatch.setattr(torch, 'save', fail)
        with pytest.raises(OSError, match='disk full'):
            write_file(tmp_path / 'a.pth', {})
        assert not list(tmp_path.iterdir())


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder, and cuts off a given number of responses.

    Attributes:
        folder: the served folder.
        hang_ups: number of responses still to cut off after half of their content.
        silences: number of responses still to stall after half of their content, with the connection open.
        announces_length: whether responses have a Content-Length.
        requests: the number of requests for existing files.
        authorization: the Authorization header of the last request.
    """

    def __init__(self, folder):
        super().__init__(('127.0.0.1', 0), Handler)
        self.folder = folder
        self.hang_ups = 0
        self.silences = 0
        self.announces_length = True
        self.requests = 0
        self.authorization = None
        self.address = f'http://127.0.0.1:{self.server_port}'


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        path = self.server.folder / self.path.partition('?')[0].lstrip('/')
        if not path.exists():
            return self.send_error(404)
        content = path.read_bytes()
        self.server.authorization = self.headers['Authorization']
        self.server.requests += 1
        self.send_response(200)
        if self.server.announces_length:
            self.send_header('Content-Length', len(content))
        self.end_headers()
        if self.server.hang_ups:
            self.server.hang_ups -= 1
            content = content[: len(content) // 2]
        if self.server.silences:
            self.server.silences -= 1
            self.wfile.write(content[: len(content) // 2])
            self.connection.recv(1)  # until the client closes the connection
            return None
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server with an empty folder, and an empty download cache."""
    (tmp_path / 'served').mkdir()
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'cache'))
    monkeypatch.setenv('no_proxy', '127.0.0.1')
    with Server(tmp_path / 'served') as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield httpd
        httpd.shutdown()


def cached(tmp_path):
    """Return all files in the download cache except locks."""
    return sorted(path for path in (tmp_path / 'cache').rglob('*') if path.is_file() and path.suffix != '.lock')


class TestDownloads:
    def test_an_incomplete_download_is_not_kept(self, server, tmp_path, source, backbone):
        server.hang_ups = 1
        write_file(server.folder / 'swin.pth', source.state_dict())
        with pytest.raises(CheckpointError, match=r'ended after \d+ of \d+ bytes; nothing was kept'):
            load(backbone, f'{server.address}/swin.pth')
        assert cached(tmp_path) == []
        load(backbone, f'{server.address}/swin.pth')
        assert equal_weights(backbone, source)

    def test_without_tqdm(self, server, source, backbone, monkeypatch):
        class Bar:
            """What the stand-in of torch.hub, for environments without tqdm, has."""

            done = 0

            def __init__(self, total=None, disable=False, unit=None, *args, **kwargs):
                self.total = total

            def __enter__(self):
                return self

            def __exit__(self, *error):
                ended.append((self.done, self.total))

            def update(self, n):
                self.done += n

        ended = []
        monkeypatch.setattr(read, 'tqdm', Bar)
        write_file(server.folder / 'swin.pth', source.state_dict())
        load(backbone, f'{server.address}/swin.pth')
        size = (server.folder / 'swin.pth').stat().st_size
        assert ended == [(size, size)]
        assert equal_weights(backbone, source)

    def test_a_server_that_does_not_respond(self, server, tmp_path, backbone, monkeypatch):
        monkeypatch.setattr(read, '_TIMEOUT', 0.2)
        with socket.create_server(('127.0.0.1', 0)) as silent:
            address = f'http://127.0.0.1:{silent.getsockname()[1]}/swin.pth'
            with pytest.raises(CheckpointError, match=r'cannot be fetched: .*timed out; nothing was kept'):
                load(backbone, address)
        assert cached(tmp_path) == []

    def test_a_response_that_stalls(self, server, tmp_path, source, backbone, monkeypatch):
        monkeypatch.setattr(read, '_TIMEOUT', 0.5)
        server.silences = 1
        write_file(server.folder / 'swin.pth', source.state_dict())
        with pytest.raises(CheckpointError, match=r'cannot be fetched: .*timed out; nothing was kept'):
            load(backbone, f'{server.address}/swin.pth')
        assert cached(tmp_path) == []

    @pytest.mark.parametrize(
        'address', ['http://[1/a.pth', 'http://a b/x.pth', 'http://127.0.0.1:x/a.pth', 'http:///a']
    )
    def test_odd_addresses(self, server, backbone, address):
        with pytest.raises(CheckpointError):
            load(backbone, address)

    def test_a_file_of_another_origin_is_not_taken(self, server, tmp_path, source, backbone):
        """Another library may have left a file of the same name in the folder of torch.hub."""
        folder = tmp_path / 'cache/hub/checkpoints'
        folder.mkdir(parents=True)
        other = SwinBackbone(**ARCH)
        write_file(folder / 'best.pth', other.state_dict())
        write_file(server.folder / 'best.pth', source.state_dict())
        load(backbone, f'{server.address}/best.pth')
        assert equal_weights(backbone, source)
        (server.folder / 'second').mkdir()
        write_file(server.folder / 'second/best.pth', other.state_dict())
        load(backbone, f'{server.address}/second/best.pth')
        assert equal_weights(backbone, other)
        load(backbone, f'{server.address}/best.pth')
        assert equal_weights(backbone, source)
        assert server.requests == 2

    def test_a_cached_file_is_verified(self, server, tmp_path, source, backbone):
        path = write_file(server.folder / 'swin.pth', source.state_dict())
        address = f'{server.address}/swin.pth#sha256={hash_of(path)}'
        load(backbone, address)
        load(backbone, address)
        assert server.requests == 1
        (held,) = cached(tmp_path)
        write_file(held, SwinBackbone(**ARCH).state_dict(), force=True)
        with pytest.raises(CheckpointError, match=rf'must have the sha256 digest {hash_of(path)}.*\n.*delete the file'):
            load(backbone, address)

    def test_a_hash_detects_truncation_without_a_content_length(self, server, tmp_path, source, backbone):
        server.announces_length = False
        server.hang_ups = 2
        path = write_file(server.folder / 'swin.pth', source.state_dict(), add_hash=True)
        digest = hashlib.sha384(path.read_bytes()).hexdigest()
        shutil.copy(path, server.folder / 'plain.pth')
        for address in (f'{server.address}/{path.name}', f'{server.address}/plain.pth#sha384={digest}'):
            with pytest.raises(CheckpointError, match='sent a file with an unexpected digest'):
                load(backbone, address)
            assert cached(tmp_path) == []
        load(backbone, f'{server.address}/{path.name}#sha384={digest}')
        assert equal_weights(backbone, source)
        with pytest.raises(CheckpointError, match=f'must have the sha256 digest {"0" * 64}, but has'):
            load(backbone, f'{server.address}/{path.name}#sha256={"0" * 64}')
        with pytest.raises(CheckpointError, match='the part after # must be sha256=DIGEST'):
            load(backbone, f'{server.address}/{path.name}#md5=0')

    def test_a_damaged_file_in_the_cache_is_reported(self, server, tmp_path, source, backbone):
        content = write_file(server.folder / 'swin.pth', source.state_dict()).read_bytes()
        load(backbone, f'{server.address}/swin.pth')
        (damaged,) = cached(tmp_path)
        damaged.write_bytes(content[:1000])
        with pytest.raises(CheckpointError, match=r'cut short.*\n.*delete the file to fetch it again'):
            load(backbone, f'{server.address}/swin.pth')
        damaged.unlink()
        load(backbone, f'{server.address}/swin.pth')

    def test_a_download_removes_the_leftover_of_a_killed_one(self, server, tmp_path, source, backbone):
        write_file(server.folder / 'swin.pth', source.state_dict())
        load(backbone, f'{server.address}/swin.pth')
        (held,) = cached(tmp_path)
        held.rename(held.with_name('.0123abcd-swin.pth'))
        load(backbone, f'{server.address}/swin.pth')
        assert cached(tmp_path) == [held]

    def test_several_processes_download_once(self, server, source):
        write_file(server.folder / 'swin.pth', source.state_dict())
        processes = [
            multiprocessing.get_context('fork').Process(target=_fetch_or_fail, args=(f'{server.address}/swin.pth',))
            for _ in range(3)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0, 0, 0]
        assert server.requests == 1

    def test_secrets_stay_out_of_files_and_messages(self, server, tmp_path, source, backbone, capsys):
        write_file(server.folder / 'swin.pth', source.state_dict())
        report = load(backbone, f'{server.address}/swin.pth?download=true&X-Amz-Signature=SECRET')
        load(backbone, f'{server.address}/swin.pth?token=SECRET')  # the same file by another address
        load(backbone, f'{server.address}/swin.pth')
        assert server.requests == 1
        shutil.copy(server.folder / 'swin.pth', server.folder / 'private.pth')
        private = server.address.replace('//', '//me:SECRET@')
        report = f'{report}{load(backbone, f"{private}/private.pth")}'
        assert server.authorization == f'Basic {base64.b64encode(b"me:SECRET").decode()}'
        with pytest.raises(CheckpointError, match='cannot be fetched') as raised:
            load(backbone, f'{private}/other.pth?token=SECRET')
        messages = f'{report}{raised.value}{capsys.readouterr()}'
        names = ''.join(str(path) for path in (tmp_path / 'cache').rglob('*'))
        assert 'SECRET' not in messages + names

    def test_other_query_parameters_mean_another_file(self, server, source, backbone):
        write_file(server.folder / 'swin.pth', source.state_dict())
        load(backbone, f'{server.address}/swin.pth?version=1')
        load(backbone, f'{server.address}/swin.pth?version=1&download=1')
        assert server.requests == 1
        load(backbone, f'{server.address}/swin.pth?version=2')
        assert server.requests == 2

    def test_a_full_disk_is_reported(self, server, tmp_path, source, backbone):
        disk = tmp_path / 'cache/hub/checkpoints'
        disk.mkdir(parents=True)
        write_file(server.folder / 'swin.pth', source.state_dict())
        with small_disk(disk, '16k'):
            with pytest.raises(CheckpointError, match=r'cannot be fetched: .*No space left.*nothing was kept'):
                load(backbone, f'{server.address}/swin.pth')
            assert cached(tmp_path) == []


def _fetch_or_fail(address):
    with local_file(address) as path:
        sys.exit(path.stat().st_size == 0)


class Hub(types.ModuleType):
    """Stand-in for huggingface_hub, with a folder for each repository.

    Attributes:
        requests: (repository, file, revision) of each request.
        is_reachable: whether the hub can be reached, so that a missing file is known not to exist.
        attempts: number of requests to the unreachable hub, each of which is slow.
        later: folder of the files once the PyTorch index was requested, as if the repository had changed; or None.
    """

    def __init__(self, folder):
        super().__init__('huggingface_hub')
        self.folder = folder
        self.requests = []
        self.is_reachable = True
        self.attempts = 0
        self.later = None
        self.errors = types.ModuleType('huggingface_hub.errors')
        self.errors.EntryNotFoundError = type('EntryNotFoundError', (Exception,), {})
        self.errors.LocalEntryNotFoundError = type('LocalEntryNotFoundError', (self.errors.EntryNotFoundError,), {})

    def hf_hub_download(self, repository, file, revision=None, local_files_only=False):
        self.attempts += not (self.is_reachable or local_files_only)
        has_changed = self.later is not None and any(name.endswith('.json') for _, name, _ in self.requests[2:])
        self.requests.append((repository, file, revision))
        path = (self.later if has_changed else self.folder / repository) / file
        if path.exists():
            return str(path)
        if self.is_reachable:
            raise self.errors.EntryNotFoundError(f'404: {file}')
        raise self.errors.LocalEntryNotFoundError('check your connection')


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with the empty repository me/swin."""
    (tmp_path / 'me/swin').mkdir(parents=True)
    hub = Hub(tmp_path)
    monkeypatch.setitem(sys.modules, 'huggingface_hub', hub)
    monkeypatch.setitem(sys.modules, 'huggingface_hub.errors', hub.errors)
    return hub


class TestAddresses:
    def test_http_downloads_once_to_the_cache_of_torch_hub(self, server, tmp_path, source, backbone):
        path = write_file(server.folder / 'swin.pth', source.state_dict(), add_hash=True)
        load(backbone, f'{server.address}/{path.name}?download=true')
        assert equal_weights(backbone, source)
        assert [held.name for held in cached(tmp_path)] == [path.name]
        path.unlink()
        backbone.reset_parameters()
        load(backbone, f'{server.address}/{path.name}?download=true')
        assert equal_weights(backbone, source)
        with pytest.raises(CheckpointError, match=r'cannot be fetched: .*404'):
            load(backbone, f'{server.address}/elsewhere/{path.name}')

    def test_http_failure(self, server, tmp_path, backbone):
        with pytest.raises(
            CheckpointError,
            match=r'cannot be fetched: .*404.*Without a network connection, download .* and give its path',
        ):
            load(backbone, f'{server.address}/none.pth')
        assert not cached(tmp_path)
        with pytest.raises(CheckpointError, match='cannot be fetched'):
            load(backbone, 'http://127.0.0.1:9/none.pth')

    def test_file(self, tmp_path, source, backbone):
        path = write_file(tmp_path / 'a b.pth', source.state_dict())
        load(backbone, path.as_uri())
        assert equal_weights(backbone, source)

    @needs('safetensors')
    def test_hugging_face(self, tmp_path, source, backbone, hub, monkeypatch):
        write_file(tmp_path / 'me/swin/pytorch_model.bin', source.state_dict())
        load(backbone, 'hf://me/swin')
        assert equal_weights(backbone, source)
        assert hub.requests == [
            ('me/swin', name, None)
            for name in ('model.safetensors', 'model.safetensors.index.json', 'pytorch_model.bin')
        ]
        (tmp_path / 'me/swin/sub').mkdir()
        write_file(tmp_path / 'me/swin/sub/a.safetensors', source.state_dict())
        load(backbone, 'hf://me/swin@v2/sub/a.safetensors')
        assert hub.requests[-1] == ('me/swin', 'sub/a.safetensors', 'v2')
        (tmp_path / 'me/swin/pytorch_model.bin').unlink()
        with pytest.raises(CheckpointError, match=r'hf://me/swin: .* no file .*model\.safetensors or .*pytorch_model'):
            load(backbone, 'hf://me/swin')
        with pytest.raises(CheckpointError, match='must be of the form hf://'):
            load(backbone, 'hf://swin')
        monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
        with pytest.raises(ImportError, match='pip install huggingface_hub'):
            load(backbone, 'hf://me/swin')

    @pytest.mark.parametrize('name', [SAFETENSORS, 'pytorch_model.bin'])
    @pytest.mark.parametrize('by_index', [False, True])
    def test_a_sharded_checkpoint_of_hugging_face(self, tmp_path, source, backbone, hub, name, by_index):
        index = write_shards(tmp_path / 'me/swin', source.state_dict(), name)
        load(backbone, f'hf://me/swin@v2/{index.name}' if by_index else 'hf://me/swin@v2')
        assert equal_weights(backbone, source)
        shards = sorted(path.name for path in index.parent.glob('*-of-*'))
        assert hub.requests[-3:] == [('me/swin', shard, 'v2') for shard in shards]

    def test_a_sharded_checkpoint_in_a_folder_of_hugging_face(self, tmp_path, source, backbone, hub):
        (tmp_path / 'me/swin/sub').mkdir()
        index = write_shards(tmp_path / 'me/swin/sub', source.state_dict(), 'pytorch_model.bin')
        load(backbone, f'hf://me/swin/sub/{index.name}')
        assert equal_weights(backbone, source)

    @pytest.mark.parametrize(
        ('damage', 'message'),
        [
            (lambda index: min(index.parent.glob('*-00002-*')).unlink(), 'cannot be fetched: .*-00002-of-00003.bin'),
            (lambda index: edit_index(index, lambda shard: '../' + shard), 'which is not a shard in the same folder'),
            (lambda index: index.write_text('{}'), 'is not an index'),
        ],
    )
    def test_an_incomplete_sharded_checkpoint_of_hugging_face(self, tmp_path, source, backbone, hub, damage, message):
        damage(write_shards(tmp_path / 'me/swin', source.state_dict(), 'pytorch_model.bin'))
        with pytest.raises(CheckpointError, match=message):
            load(backbone, 'hf://me/swin')
        assert not any('..' in name for _, name, _ in hub.requests)

    def test_hugging_face_without_a_connection(self, tmp_path, source, backbone, hub):
        """Cached files load. The error for other files does not claim that they are missing in the repository."""
        hub.is_reachable = False
        with pytest.raises(CheckpointError, match=r'hf://me/swin cannot be fetched: check your connection'):
            load(backbone, 'hf://me/swin')
        assert hub.attempts == 1
        write_file(tmp_path / 'me/swin/pytorch_model.bin', source.state_dict())
        load(backbone, 'hf://me/swin')
        assert equal_weights(backbone, source)

    def test_a_repository_that_changes_during_the_download(self, tmp_path, source, backbone, hub):
        write_shards(tmp_path / 'me/swin', source.state_dict(), 'pytorch_model.bin')
        shutil.copytree(tmp_path / 'me/swin', tmp_path / 'later')
        hub.later = tmp_path / 'later'
        with pytest.raises(CheckpointError, match='hf://me/swin changed during the download; load it again'):
            load(backbone, 'hf://me/swin')

    @needs('fsspec')
    def test_other_addresses_go_through_fsspec(self, tmp_path, source, backbone, monkeypatch):
        import fsspec

        path = write_file(tmp_path / 'a.pth', source.state_dict())
        fsspec.filesystem('memory').pipe_file('/bucket/swin.pth', path.read_bytes())
        load(backbone, f'memory://bucket/swin.pth#sha256={file_digest(path, "sha256")}')
        assert equal_weights(backbone, source)
        for address, message in (
            ('memory://bucket/swin.pth#sha256=00', 'must have the sha256 digest 00'),
            ('memory://user:secret@bucket/none.pth', 'memory://bucket/none.pth cannot be fetched'),
            ('gopher://swin.pth', 'gopher://swin.pth cannot be fetched: .*The address must begin with http'),
        ):
            with pytest.raises(CheckpointError, match=message) as raised:
                load(backbone, address)
            assert 'secret' not in str(raised.value)
        monkeypatch.setitem(sys.modules, 'fsspec', None)
        with pytest.raises(ImportError, match='fsspec'):
            load(backbone, 'gopher://swin.pth')
