"""The real huggingface_hub with a local server that implements its protocol."""

import contextlib
import hashlib
import http.server
import json
import os
import re
import sys
import threading

import pytest
from safetensors.torch import save

from swin_dense.checkpoint import CheckpointError, load_checkpoint
from tests.processes import completed

from .peer import build, needed

huggingface_hub = needed('huggingface_hub')
WITH_NETWORK = """
import sys, torch
from swin_dense.checkpoint import CheckpointError, load_checkpoint
from tests.peers.peer import build
for address in ('hf://me/swin', 'hf://me/swin@main/model.safetensors', 'hf://me/sharded', 'hf://me/sharded@main/sub/model.safetensors.index.json'):
    backbone = build(2)
    report = load_checkpoint(backbone, address, log=None)
    assert not report.missing
    assert torch.equal(backbone.norm2.weight, build(1).norm2.weight)
for address in ('hf://me/swin/none.bin', 'hf://me/none', 'hf://me/lacking', 'hf://swin'):
    try:
        load_checkpoint(backbone, address)
    except CheckpointError as error:
        print(error)
"""
COMMIT = 'a' * 40


@contextlib.contextmanager
def serve(files):
    """Serve {'owner/repository/file': bytes} with the Hub's protocol, and yield the address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            content = files.get(
                re.sub(
                    rf'/resolve/(main|{COMMIT})/',
                    '/',
                    self.path.strip('/'),
                )
            )
            self.send_response(404 if content is None else 200)
            self.send_header('X-Repo-Commit', COMMIT)
            self.send_header('ETag', f'"{hashlib.sha256(content or b"").hexdigest()}"')
            self.send_header('Content-Length', str(len(content or b'')))
            if content is None:
                self.send_header('X-Error-Code', 'EntryNotFound')
            self.end_headers()
            return content

        def do_GET(self):
            self.wfile.write(self.do_HEAD() or b'')

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}'
        server.shutdown()


@pytest.fixture(scope='module')
def files():
    state = build(1).state_dict()
    shards = {f'model-{number + 1:05}-of-00002.safetensors': list(state)[number::2] for number in range(2)}
    weight_map = {key: shard for shard, keys in shards.items() for key in keys}
    sharded = {shard: save({key: state[key] for key in keys}) for shard, keys in shards.items()}
    sharded['model.safetensors.index.json'] = json.dumps({'weight_map': weight_map}).encode()
    files = {f'me/sharded/{folder}{name}': content for name, content in sharded.items() for folder in ('', 'sub/')}
    files['me/lacking/model.safetensors.index.json'] = sharded['model.safetensors.index.json']
    files['me/swin/model.safetensors'] = save(state)
    return files


def run(program, address, cache):
    environment = {
        **os.environ,
        'HF_ENDPOINT': address,
        'HF_HOME': str(cache),
        'HF_HUB_DISABLE_XET': '1',
        'NO_PROXY': '127.0.0.1',
        'PYTHONPATH': os.pathsep.join(sys.path),
    }
    program = f"import sys; sys.modules['mmengine'] = None  # its import takes seconds\n{program}"
    return completed([sys.executable, '-c', program], env=environment).stdout


def test_checkpoints_are_loaded_from_the_hub(files, tmp_path):
    with serve(files) as address:
        output = run(WITH_NETWORK, address, tmp_path)
    assert 'hf://me/swin/none.bin: the repository has no file none.bin' in output
    assert 'hf://me/none: the repository has no file model.safetensors or ' in output
    assert 'hf://swin must be of the form hf://' in output
    assert 'hf://me/lacking cannot be fetched: ' in output
    assert 'model-00001-of-00002.safetensors' in output


def test_an_unreachable_hub_is_asked_for_one_file(monkeypatch):
    """Each attempt takes long. The error does not claim that the files are missing in the repository."""
    asked = []

    def download(*_, local_files_only, **options):
        asked.append(not local_files_only)
        raise huggingface_hub.errors.LocalEntryNotFoundError('check your connection')

    monkeypatch.setattr(huggingface_hub, 'hf_hub_download', download)
    with pytest.raises(CheckpointError, match=r'hf://me/swin .* check your connection'):
        load_checkpoint(build(2), 'hf://me/swin')
    assert asked == [True, False, False, False]
