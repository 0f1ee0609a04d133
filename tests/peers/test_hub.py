"""The real huggingface_hub, against a server on this machine that speaks its protocol."""

import hashlib
import http.server
import os
import subprocess
import sys
import threading

import pytest
from safetensors.torch import save

from .peer import build

pytest.importorskip('huggingface_hub', reason='see requirements/peers.txt')
PROGRAM = """
import sys, torch
from swin_dense.checkpoint import CheckpointError, load_checkpoint
from tests.peers.peer import build
backbone = build(2)
load_checkpoint(backbone, 'hf://me/swin', log=None)
assert torch.equal(backbone.norm2.weight, build(1).norm2.weight)
load_checkpoint(backbone, 'hf://me/swin@main/model.safetensors', log=None)
try:
    load_checkpoint(backbone, 'hf://me/swin/none.bin')
except CheckpointError as error:
    print(error)
"""


def test_files_of_the_hub(tmp_path):
    content = save(build(1).state_dict())

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            found = self.path.endswith('/model.safetensors')
            self.send_response(200 if found else 404)
            self.send_header('X-Repo-Commit', 'a' * 40)
            self.send_header('ETag', f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header('Content-Length', str(len(content) if found else 0))
            if not found:
                self.send_header('X-Error-Code', 'EntryNotFound')
            self.end_headers()
            return found

        def do_GET(self):
            if self.do_HEAD():
                self.wfile.write(content)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {
            **os.environ,
            'HF_ENDPOINT': f'http://127.0.0.1:{server.server_port}',
            'HF_HOME': str(tmp_path),
            'HF_HUB_DISABLE_XET': '1',
            'NO_PROXY': '127.0.0.1',
            'PYTHONPATH': os.pathsep.join(sys.path),
        }
        done = subprocess.run(
            [sys.executable, '-c', PROGRAM], env=environment, capture_output=True, text=True, check=False
        )
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert 'the repository has no file none.bin' in done.stdout
