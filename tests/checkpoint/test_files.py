"""Reading, fetching and writing files: nothing in them runs, and what is wrong with one is said."""

import argparse
import collections
import contextlib
import http.server
import operator
import os
import pathlib
import pickle
import sys
import threading
import types

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer

from swin_dense import SwinBackbone
from swin_dense.checkpoint import CheckpointError, load_checkpoint
from swin_dense.checkpoint.files import read_file, write_file

ARCH = {'embed_dims': 8, 'depths': (1, 1), 'num_heads': (2, 4)}


@pytest.fixture
def source():
    return SwinBackbone(**ARCH)


@pytest.fixture
def backbone():
    return SwinBackbone(**ARCH)


def arrived(backbone, source):
    return all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in backbone.state_dict().items())


def load(backbone, source, **options):
    return load_checkpoint(backbone, source, log=None, **options)


@pytest.mark.parametrize('name', ['a.pth', 'a.pt', 'a.bin', 'a.safetensors', 'with space.pth'])
def test_files_of_every_ending(tmp_path, name, source, backbone):
    state = source.state_dict()
    path = write_file(tmp_path / name, state if name.endswith('safetensors') else {'model': state})
    report = load(backbone, str(path) if 'space' in name else path)
    assert arrived(backbone, source)
    assert report.source == str(path)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_what_training_leaves_in_checkpoints_is_harmless(tmp_path, source, backbone):
    history = HistoryBuffer()
    history.update(0.5)
    checkpoint = {
        'state_dict': source.state_dict(),
        'message_hub': {'log_scalars': {'loss': history}, 'lr': np.float64(0.1), 'ids': np.arange(3)},
        'meta': {'cfg': ConfigDict(a=1), 'time': np.datetime64('2020-01-01'), 'seed': np.int64(1)},
        'args': argparse.Namespace(lr=0.1, output=pathlib.Path('x')),
        'counts': collections.Counter('abc'),
        'ids': {1, 2},
    }
    torch.save(checkpoint, tmp_path / 'epoch_1.pth')
    load(backbone, tmp_path / 'epoch_1.pth')
    assert arrived(backbone, source)


def test_official_training_files_hold_a_config_of_yacs(tmp_path, source, backbone, monkeypatch):
    module = types.ModuleType('yacs.config')
    module.CfgNode = type('CfgNode', (dict,), {'__module__': 'yacs.config'})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 'yacs', types.ModuleType('yacs'))
        patch.setitem(sys.modules, 'yacs.config', module)
        config = module.CfgNode(model=module.CfgNode(depths=[2, 2]))
        config.__dict__['__immutable__'] = True
        torch.save({'model': source.state_dict(), 'config': config}, tmp_path / 'ckpt_epoch_1.pth')
    load(backbone, tmp_path / 'ckpt_epoch_1.pth')
    assert arrived(backbone, source)


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
@pytest.mark.parametrize(
    ('tool', 'named'), enumerate(['(posix|nt).system', 'pathlib', 'eval', 'operator.methodcaller'])
)
def test_a_malicious_pickle_does_not_run(tmp_path, source, backbone, tool, named, zipped):
    trap, path = tmp_path / 'trap', tmp_path / 'evil.pth'
    evil = Malicious(_evil_tools(trap)[tool])
    torch.save({'model': source.state_dict(), 'x': evil}, path, _use_new_zipfile_serialization=zipped)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    with pytest.raises(CheckpointError, match=f'asks for .*{named}.*; nothing was run. .*load_checkpoint.*trust=True'):
        load(backbone, path)
    assert not trap.exists()
    assert all(torch.equal(tensor, before[name]) for name, tensor in backbone.state_dict().items())
    load(backbone, path, trust=True)
    assert trap.exists()
    assert arrived(backbone, source)


class Allowed:
    pass


def test_what_the_user_allows_is_read(tmp_path, source, backbone):
    torch.save({'model': source.state_dict(), 'mine': Allowed()}, tmp_path / 'a.pth')
    with pytest.raises(CheckpointError, match='Allowed'):
        load(backbone, tmp_path / 'a.pth')
    with torch.serialization.safe_globals([Allowed]):
        load(backbone, tmp_path / 'a.pth')
    assert arrived(backbone, source)


def test_stand_ins_do_not_outlive_the_load(tmp_path, source, backbone):
    torch.save({'model': source.state_dict(), 'args': argparse.Namespace()}, tmp_path / 'a.pth')
    before = set(map(str, torch.serialization.get_safe_globals()))
    load(backbone, tmp_path / 'a.pth')
    assert set(map(str, torch.serialization.get_safe_globals())) == before


def test_a_whole_model_needs_trust(tmp_path, source, backbone):
    torch.save(source, tmp_path / 'model.pth')
    with pytest.raises(CheckpointError, match=r'asks for swin_dense\.model\.SwinBackbone'):
        load(backbone, tmp_path / 'model.pth')
    load(backbone, tmp_path / 'model.pth', trust=True)
    assert arrived(backbone, source)
    torch.save({'model': source}, tmp_path / 'model.pth')
    backbone.reset_parameters()
    load(backbone, tmp_path / 'model.pth', trust=True)
    assert arrived(backbone, source)


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (b'', 'is empty'),
        (b'version https://git-lfs.github.com/spec/v1\noid sha256:1', 'git lfs pull'),
        (b'\n<!DOCTYPE html><html>not found</html>', 'is a web page'),
        (b'hello world, this is text', r'\(25 bytes\) is not a checkpoint'),
        (b'\x00' * 1000, 'is not a checkpoint'),
        (pickle.dumps([1, 2]), 'is not a checkpoint'),
    ],
)
@pytest.mark.parametrize('ending', ['.pth', '.safetensors'])
def test_what_is_no_checkpoint(tmp_path, backbone, content, message, ending):
    path = tmp_path / f'a{ending}'
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load(backbone, path)


@pytest.mark.parametrize('ending', ['.pth', '.safetensors'])
@pytest.mark.parametrize('part', [0.01, 0.5, 0.99])
def test_a_truncated_file(tmp_path, source, backbone, ending, part):
    path = write_file(tmp_path / f'a{ending}', source.state_dict())
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(CheckpointError, match='damaged or cut short') as raised:
        load(backbone, path)
    assert not str(raised.value).endswith(']')  # a line of text, not a list of lines


def test_other_contents(tmp_path, backbone):
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
        assert path.name == f'swin-{hash_of(path)[:8]}.pth'
        load(backbone, path)
        wrong = path.rename(tmp_path / 'swin-0123abcd.pth')
        with pytest.raises(CheckpointError, match=f'begins with 0123abcd, but it begins with {hash_of(wrong)[:8]}'):
            load(backbone, wrong)

    @pytest.mark.parametrize('name', ['run-20240131.pth', 'swin-tiny.pth', 'swin_12345678.pth', 'a-b1234567-x.pth'])
    def test_other_names_are_not_taken_for_a_hash(self, tmp_path, source, backbone, name):
        load(backbone, write_file(tmp_path / name, source.state_dict()))


def hash_of(path):
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


class TestWriting:
    def test_a_file_is_replaced_only_by_force(self, tmp_path, source):
        path = tmp_path / 'a.pth'
        path.write_text('precious')
        with pytest.raises(FileExistsError, match='--force'):
            write_file(path, source.state_dict())
        assert path.read_text() == 'precious'
        write_file(path, source.state_dict(), force=True)
        assert read_file(path).keys() == source.state_dict().keys()

    def test_a_failure_leaves_nothing(self, tmp_path, monkeypatch):
        def fail(checkpoint, path):
            pathlib.Path(path).write_text('half')
            raise OSError('disk full')

        monkeypatch.setattr(torch, 'save', fail)
        with pytest.raises(OSError, match='disk full'):
            write_file(tmp_path / 'a.pth', {})
        assert not list(tmp_path.iterdir())


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serve a folder over HTTP, with an empty download cache; yields the folder and its address."""
    (tmp_path / 'served').mkdir()
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'cache'))
    monkeypatch.setenv('no_proxy', '127.0.0.1')

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=tmp_path / 'served')

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield tmp_path / 'served', f'http://127.0.0.1:{httpd.server_port}'
        httpd.shutdown()


class TestAddresses:
    def test_http_downloads_once_to_the_cache_of_torch_hub(self, server, tmp_path, source, backbone):
        folder, address = server
        path = write_file(folder / 'swin.pth', source.state_dict(), add_hash=True)
        load(backbone, f'{address}/{path.name}?download=true')
        assert arrived(backbone, source)
        assert (tmp_path / 'cache/hub/checkpoints' / path.name).exists()
        path.unlink()
        backbone.reset_parameters()
        load(backbone, f'{address}/{path.name}?download=true')
        assert arrived(backbone, source)
        with pytest.raises(CheckpointError, match='holds another file of that name'):
            load(backbone, f'{address}/elsewhere/{path.name}')

    def test_http_failure(self, server, tmp_path, backbone):
        with pytest.raises(CheckpointError, match=r'cannot be fetched: .*404'):
            load(backbone, f'{server[1]}/none.pth')
        assert not list(tmp_path.glob('cache/hub/checkpoints/none.pth'))
        with pytest.raises(CheckpointError, match='cannot be fetched'):
            load(backbone, 'http://127.0.0.1:9/none.pth')

    def test_file(self, tmp_path, source, backbone):
        path = write_file(tmp_path / 'a b.pth', source.state_dict())
        load(backbone, path.as_uri())
        assert arrived(backbone, source)

    def test_hugging_face(self, tmp_path, source, backbone, monkeypatch):
        path = write_file(tmp_path / 'a.safetensors', source.state_dict())
        asked = []

        class EntryNotFoundError(Exception):
            pass

        def hf_hub_download(repository, file, revision=None):
            asked.append((repository, file, revision))
            if file == 'model.safetensors':
                raise EntryNotFoundError
            return str(path)

        hub = types.ModuleType('huggingface_hub')
        hub.hf_hub_download = hf_hub_download
        hub.errors = types.ModuleType('huggingface_hub.errors')
        hub.errors.EntryNotFoundError = EntryNotFoundError
        monkeypatch.setitem(sys.modules, 'huggingface_hub', hub)
        monkeypatch.setitem(sys.modules, 'huggingface_hub.errors', hub.errors)
        load(backbone, 'hf://me/swin')
        assert arrived(backbone, source)
        assert asked == [('me/swin', 'model.safetensors', None), ('me/swin', 'pytorch_model.bin', None)]
        load(backbone, 'hf://me/swin@v2/sub/a.bin')
        assert asked[-1] == ('me/swin', 'sub/a.bin', 'v2')
        with pytest.raises(CheckpointError, match='must be of the form hf://'):
            load(backbone, 'hf://swin')
        monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
        with pytest.raises(ImportError, match='pip install huggingface_hub'):
            load(backbone, 'hf://me/swin')

    def test_others_go_through_mmengine(self, tmp_path, source, backbone, monkeypatch):
        import mmengine.fileio

        path = write_file(tmp_path / 'a.pth', source.state_dict())
        monkeypatch.setattr(mmengine.fileio, 'get_local_path', lambda address: contextlib.nullcontext(str(path)))
        load(backbone, 's3://bucket/swin.pth')
        assert arrived(backbone, source)
        monkeypatch.undo()
        with pytest.raises(
            CheckpointError,
            match=r'cannot be fetched through mmengine.*there are also paths and addresses of file, http',
        ):
            load(backbone, 'gopher://swin.pth')
        monkeypatch.setitem(sys.modules, 'mmengine.fileio', None)
        with pytest.raises(ImportError, match='gopher:// needs mmengine'):
            load(backbone, 'gopher://swin.pth')
