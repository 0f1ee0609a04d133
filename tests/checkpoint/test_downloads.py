"""Writing files, hashes in their names, and fetching them from addresses."""

import base64
import dataclasses
import hashlib
import http.server
import multiprocessing
import re
import shutil
import sys
import threading
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from swin_dense import SwinBackbone, create_backbone
from swin_dense.archs import published as table
from swin_dense.archs.arch import resolve_arch
from swin_dense.checkpoint import CheckpointError
from swin_dense.checkpoint.read import read_file
from swin_dense.checkpoint.save import write_file
from swin_dense.images.presets import PRESETS
from swin_dense.utils import fetch
from swin_dense.utils.digest import file_digest
from swin_dense.utils.fetch import local_file
from tests.checkpoint.helpers import SMALL, load, write_shards
from tests.conftest import ROOT, equal_weights, needs

ZEROS = '0' * 64


def hash_of(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hashed(path):
    """Put the hash of a file into its name."""
    return path.rename(path.with_name(f'{path.stem}-{hash_of(path)}{path.suffix}'))


class TestHash:
    def test_the_suffix_is_written_and_verified(self, tmp_path, source, backbone):
        path = hashed(write_file(tmp_path / 'swin.pth', source.state_dict()))
        load(backbone, path)
        wrong = path.rename(tmp_path / 'swin-0123abcd.pth')
        with pytest.raises(CheckpointError, match=f'it begins with {hash_of(wrong)[:8]}:'):
            load(backbone, wrong)
        names = ['run-20240131', 'swin-tiny', 'swin_12345678', 'a-b1234567-x', f'git-{"0a" * 20}']
        for name in names:
            wrong = wrong.rename(tmp_path / f'{name}.pth')
            assert load(backbone, wrong).loaded


class TestWriting:
    def test_a_file_is_replaced_only_by_force(self, tmp_path, source):
        path = tmp_path / 'a.pth'
        path.write_text('precious')
        with pytest.raises(FileExistsError, match=r'force=True \(--force\) replaces it'):
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
        self.hang_ups = self.silences = self.requests = 0
        self.announces_length = True
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


@pytest.fixture
def address(server, source):
    """The address of a file 'swin.pth' with the weights of ``source``."""
    write_file(server.folder / 'swin.pth', source.state_dict())
    return f'{server.address}/swin.pth'


def cached(tmp_path):
    """Return all files in the download cache except locks."""
    return sorted(path for path in (tmp_path / 'cache').rglob('*') if path.is_file() and path.suffix != '.lock')


class TestDownloads:
    def test_an_incomplete_download_is_not_kept(self, server, address, tmp_path, source, backbone):
        server.hang_ups = 1
        with pytest.raises(CheckpointError, match=r'after \d+ of \d+ bytes; nothing was kept'):
            load(backbone, address)
        assert cached(tmp_path) == []
        load(backbone, address)
        assert equal_weights(backbone, source)

    def test_a_response_that_stalls(self, server, address, tmp_path, backbone, monkeypatch):
        monkeypatch.setattr(fetch, '_TIMEOUT', 0.5)
        server.silences = 1
        with pytest.raises(CheckpointError, match=r'timed out; nothing was kept'):
            load(backbone, address)
        assert cached(tmp_path) == []

    @pytest.mark.parametrize(
        'odd',
        [
            'http://[1/a.pth',
            'http://a b/x.pth',
            'http://127.0.0.1:x/a.pth',
            'http:///a',
        ],
    )
    def test_odd_addresses(self, server, backbone, odd):
        with pytest.raises(CheckpointError):
            load(backbone, odd)

    def test_a_file_of_another_origin_is_not_taken(self, server, address, tmp_path, source, backbone):
        """Another library may have left a file of the same name in the folder of torch.hub."""
        other = SwinBackbone(**SMALL).state_dict()
        for folder in (tmp_path / 'cache/hub/checkpoints', server.folder / 'second'):
            folder.mkdir(parents=True)
            write_file(folder / 'swin.pth', other)
        load(backbone, address)
        assert equal_weights(backbone, source)
        load(backbone, f'{server.address}/second/swin.pth')
        assert equal_weights(backbone, other)
        load(backbone, address)
        assert equal_weights(backbone, source)
        assert server.requests == 2

    def test_a_cached_file_is_verified(self, server, address, tmp_path, backbone):
        digest = hash_of(server.folder / 'swin.pth')
        load(backbone, f'{address}#sha256={digest}')
        load(backbone, f'{address}#sha256={digest}')
        assert server.requests == 1
        (held,) = cached(tmp_path)
        write_file(held, SwinBackbone(**SMALL).state_dict(), force=True)
        with pytest.raises(CheckpointError, match=rf'{digest}.*\n.*delete the file'):
            load(backbone, f'{address}#sha256={digest}')

    def test_a_hash_detects_truncation_without_a_content_length(self, server, address, tmp_path, source, backbone):
        server.announces_length = False
        server.hang_ups = 2
        path = hashed(server.folder / 'swin.pth')
        digest = hashlib.sha384(path.read_bytes()).hexdigest()
        shutil.copy(path, server.folder / 'swin.pth')
        for one in (f'{server.address}/{path.name}', f'{address}#sha384={digest}'):
            with pytest.raises(CheckpointError, match='sent a file with an unexpected digest'):
                load(backbone, one)
            assert cached(tmp_path) == []
        load(backbone, f'{server.address}/{path.name}#sha384={digest}')
        assert equal_weights(backbone, source)
        assert [held.name for held in cached(tmp_path)] == [path.name]
        with pytest.raises(CheckpointError, match=f'must have the sha256 digest {ZEROS}, but has'):
            load(backbone, f'{address}#sha256={ZEROS}')
        with pytest.raises(CheckpointError, match='the part after # must be sha256=DIGEST'):
            load(backbone, f'{address}#md5=0')

    def test_a_damaged_file_in_the_cache_is_reported(self, server, address, tmp_path, backbone):
        load(backbone, address)
        (damaged,) = cached(tmp_path)
        damaged.write_bytes(damaged.read_bytes()[:1000])
        with pytest.raises(CheckpointError, match=r'cut short.*\n.*delete the file'):
            load(backbone, address)
        damaged.unlink()
        load(backbone, address)

    def test_a_download_removes_the_leftover_of_a_killed_one(self, address, tmp_path, backbone):
        load(backbone, address)
        (held,) = cached(tmp_path)
        held.rename(held.with_name('.0123abcd-swin.pth'))
        load(backbone, address)
        assert cached(tmp_path) == [held]

    def test_several_processes_download_once(self, server, address):
        fork = multiprocessing.get_context('fork')
        processes = [fork.Process(target=_fetch_or_fail, args=(address,)) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
        assert server.requests == 1

    def test_secrets_stay_out_of_files_and_messages(self, server, address, tmp_path, backbone, capsys):
        messages = [load(backbone, f'{address}?download=true&X-Amz-Signature=SECRET')]
        load(backbone, f'{address}?token=SECRET')  # the same file by another address
        load(backbone, address)
        assert server.requests == 1
        shutil.copy(server.folder / 'swin.pth', server.folder / 'private.pth')
        private = server.address.replace('//', '//me:SECRET@')
        messages.append(load(backbone, f'{private}/private.pth'))
        assert server.authorization == f'Basic {base64.b64encode(b"me:SECRET").decode()}'
        with pytest.raises(CheckpointError, match=r'cannot be fetched: .*404.* and give its path') as raised:
            load(backbone, f'{private}/other.pth?token=SECRET')
        messages += [raised.value, capsys.readouterr(), *(tmp_path / 'cache').rglob('*')]
        assert 'SECRET' not in ' '.join(map(str, messages))

    def test_other_query_parameters_mean_another_file(self, server, address, backbone):
        load(backbone, f'{address}?version=1')
        load(backbone, f'{address}?version=1&download=1')
        assert server.requests == 1
        load(backbone, f'{address}?version=2')
        assert server.requests == 2


class TestNames:
    @pytest.fixture
    def name(self, address, monkeypatch):
        """The name of weights 'swin.pth' on the server."""
        one = dataclasses.replace(table.published()['swin_t.in1k'], address=address, digest='')
        monkeypatch.setattr(table, 'published', lambda: {'swin_t.in1k': one})
        return 'swin_t.in1k'

    def test_the_first_use_downloads_and_says_so(self, server, address, tmp_path, source, name, caplog):
        size = (server.folder / 'swin.pth').stat().st_size
        backbone = create_backbone(checkpoint=name, num_heads=SMALL['num_heads'])
        assert equal_weights(backbone, source)
        (said,) = [record for record in caplog.records if 'Downloading' in record.getMessage()]
        assert said.levelname == 'WARNING'
        assert f'{address} ({size / 1e6:.1f} MB) into {tmp_path}' in said.getMessage()
        load(backbone, name)
        assert server.requests == 1

    def test_a_published_digest_is_verified(self, backbone, name, monkeypatch):
        one = dataclasses.replace(table.published()[name], digest=f'sha256={ZEROS}')
        monkeypatch.setattr(table, 'published', lambda: {name: one})
        with pytest.raises(CheckpointError, match=f'must have the sha256 digest {ZEROS}'):
            load(backbone, name)

    def test_without_the_network(self, server, address, backbone, name):
        server.shutdown()
        server.server_close()
        with pytest.raises(CheckpointError, match='give its path, or copy it to') as raised:
            load(backbone, name)
        assert address in str(raised.value)
        place = Path(str(raised.value).rpartition('copy it to ')[2])
        write_file(place, backbone.state_dict())
        load(backbone, name)

    def test_a_file_of_this_name_is_preferred(self, server, tmp_path, backbone, name, monkeypatch):
        monkeypatch.chdir(tmp_path)
        write_file(tmp_path / name, SwinBackbone(**SMALL).state_dict())
        load(backbone, name)
        assert server.requests == 0

    @pytest.mark.parametrize(
        ('name', 'message'),
        [
            ('swin_t.in1kk', "no weights have this name; did you mean 'swin_t.in1k'"),
            ('swin_tiny', 'no weights have this name.*`swin-dense weights` lists them'),
            ('swin_t.pth', "no checkpoint file at 'swin_t.pth'$"),
        ],
    )
    def test_an_unknown_name(self, backbone, name, message):
        with pytest.raises(FileNotFoundError, match=message):
            load(backbone, name)


def test_the_table_of_weights():
    published = table.published()
    for name, one in published.items():
        assert resolve_arch(one.arch, one.arch.partition('_')[0])
        assert name == one.name
        assert one.address.startswith('https://')
        assert one.source.startswith('https://')
        assert one.licence
        assert one.normalization in PRESETS
        assert re.fullmatch(r'(sha256=[0-9a-f]{64}|sha384=[0-9a-f]{96})?', one.digest)
    addresses = {one.address for one in published.values()}
    digests = {one.digest for one in published.values()}
    assert len(addresses) == len(published)
    for path in (ROOT / 'configs/_base_/backbones').glob('*.py'):
        text = path.read_text()
        assert set(re.findall(r'https://[^\'"]+\.pth', text)) <= addresses
        assert set(re.findall(r'#(sha\d+=\w+)', text)) <= digests


def _fetch_or_fail(address):
    with local_file(address) as path:
        sys.exit(path.stat().st_size == 0)


class TestAddresses:
    def test_file(self, tmp_path, source, backbone):
        path = write_file(tmp_path / 'a b.pth', source.state_dict())
        load(backbone, path.as_uri())
        assert equal_weights(backbone, source)

    def test_hugging_face_needs_its_package(self, backbone, monkeypatch):
        """tests/peers/test_hub.py loads from a server with its protocol."""
        monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
        with pytest.raises(ImportError, match=r"hub, .* pip install '\.\[checkpoints\]'"):
            load(backbone, 'hf://me/swin')

    @needs('fsspec')
    def test_other_addresses_go_through_fsspec(self, tmp_path, source, backbone, monkeypatch):
        import fsspec

        path = write_file(tmp_path / 'a.pth', source.state_dict())
        fsspec.filesystem('memory').pipe_file('/bucket/swin.pth', path.read_bytes())
        load(backbone, f'memory://bucket/swin.pth#sha256={file_digest(path)}')
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

    def test_shards_of_hugging_face_are_fetched_into_one_folder(self, tmp_path, source, backbone, monkeypatch):
        """A stand-in for the hub's client; tests/peers/test_hub.py has the real one."""
        folders = {}

        def fetched(repository, name, **options):
            return tmp_path / folders.get(name, '.') / name

        errors = types.SimpleNamespace(LocalEntryNotFoundError=KeyError, EntryNotFoundError=IndexError)
        spec = ModuleSpec('huggingface_hub', None)  # as if it were installed
        hub = types.SimpleNamespace(hf_hub_download=fetched, errors=errors, __spec__=spec)
        monkeypatch.setitem(sys.modules, 'huggingface_hub', hub)
        index = write_shards(tmp_path, source.state_dict(), 'model.pth')
        load(backbone, f'hf://me/swin/{index.name}')
        assert equal_weights(backbone, source)
        folders['model-00002-of-00003.pth'] = 'newer'
        with pytest.raises(CheckpointError, match='changed during the download; load it again'):
            load(backbone, f'hf://me/swin/{index.name}')
        for incomplete in ('hf://me', 'hf:///swin'):
            with pytest.raises(CheckpointError, match='must be of the form'):
                load(backbone, incomplete)
