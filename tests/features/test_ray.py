"""examples/features_ray.py equals extract_pyramid, resumes after a kill, and reads and writes object storage.

Ray listens on all interfaces, so each run has a network namespace of its own if the system permits it. Run them with
`make test-ray`.
"""

import functools
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from swin_dense import extract_pyramid
from tests.conftest import ROOT, IfInstalled, photograph, tiny

pytest.importorskip('ray')
dataset = IfInstalled('pyarrow.dataset')
pytestmark = pytest.mark.long

IMAGES = 40
# Ray generates a token only for a node that it starts itself, and stores it in the home directory.
AUTHENTICATION = {'RAY_AUTH_MODE': 'token', 'RAY_AUTH_TOKEN': secrets.token_hex(32)}


@functools.cache
def isolated_network():
    """Return a command prefix that leaves a program only the loopback interface, or nothing if not permitted."""
    command = ['unshare', '--net', 'sh', '-c', 'ip link set lo up && exec "$@"', 'sh']
    permitted = shutil.which('unshare') and subprocess.run([*command, 'true'], capture_output=True).returncode == 0
    return command if permitted else []


@pytest.fixture(scope='module')
def backbone():
    return tiny()


@pytest.fixture
def work(tmp_path, backbone):
    """Return the command of a run on 40 images and a broken one."""
    torch.save(backbone.state_dict(), tmp_path / 'tiny.pth')
    (tmp_path / 'photos').mkdir()
    for index in range(IMAGES):
        Image.fromarray(photograph(40, 40 + 4 * (index % 3))).rotate(index).save(tmp_path / 'photos' / f'{index}.png')
    (tmp_path / 'photos' / 'broken.jpg').write_text('text')
    example = [
        sys.executable,
        ROOT / 'examples' / 'features_ray.py',
        tmp_path / 'photos',
        '--out',
        tmp_path / 'out',
    ]
    return [*example, '--checkpoint', tmp_path / 'tiny.pth', '--levels', '32', '--blocks', '10', '--cpus', '3']


def start(command):
    path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
    return subprocess.Popen(
        [*isolated_network(), *map(str, command)],
        env={**os.environ, 'PYTHONPATH': path, 'OMP_NUM_THREADS': '1', **AUTHENTICATION},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process):
    try:
        output, _ = process.communicate(timeout=500)
    except subprocess.TimeoutExpired:  # Ray waits forever if a resource is missing
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return process.returncode, output


def rows_of(out):
    table = dataset.dataset(out / 'rows').to_table().to_pylist()
    return {os.path.basename(row['path']): row for row in table}, len(table)


def assert_complete(out, photos, backbone):
    rows, count = rows_of(out)
    assert count == len(rows) == IMAGES + 1  # no row is lost or duplicated
    assert 'not an image' in rows.pop('broken.jpg')['error']
    for name, row in rows.items():
        assert row['error'] == ''
        vector = extract_pyramid(backbone, photos / name)[32].mean((1, 2))
        np.testing.assert_allclose(row['level_32'], vector, rtol=1e-4, atol=1e-5)


def test_a_killed_driver_resumes(work, tmp_path, backbone):
    process = start(work)
    while process.poll() is None and len(list((tmp_path / 'out' / 'rows').glob('*'))) < 2:
        time.sleep(0.05)
    assert process.poll() is None, 'the run ended before it was killed'
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    kept = {path.name: path.read_bytes() for path in (tmp_path / 'out' / 'rows').glob('*')}
    status, output = finish(start(work))
    assert status == 1, output
    assert '41 rows, 1 with an error' in output
    assert_complete(tmp_path / 'out', tmp_path / 'photos', backbone)
    assert any(kept.get(path.name) == path.read_bytes() for path in (tmp_path / 'out' / 'rows').glob('*'))
    status, output = finish(start([*work, '--pool', 'gem']))
    assert status == 2
    assert 'rows of other settings' in output
    status, output = finish(start([*work, '--actors', '1000']))
    assert status == 2
    assert '1000 actors and the reading need 1002 CPUs' in output


def test_object_storage(work, tmp_path, backbone):
    """Serve a store on the loopback interface of the network namespace in which the example runs."""
    pytest.importorskip('moto')
    code = """
import os, subprocess, sys
from pathlib import Path
from moto.server import ThreadedMotoServer
from pyarrow import fs
store = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
store.start()
address = 's3://a:b@?scheme=http&region=us-east-1&allow_bucket_creation=true&endpoint_override=127.0.0.1%3A'
address += str(store.get_host_and_port()[1])
system, root = fs.FileSystem.from_uri(address)[0], Path(sys.argv[1])
system.create_dir('bucket')
fs.copy_files(str(root / 'photos'), 'bucket/photos', destination_filesystem=system)
example, photos, out, folder, *rest = sys.argv[2:]
command = [sys.executable, example, 'bucket/photos', '--out', 'bucket/out', *rest, '--filesystem', address]
statuses = [subprocess.run(command).returncode for _ in range(2)]  # the second finds all rows
assert statuses == [1, 1], statuses
fs.copy_files('bucket/out/rows', str(root / 'out' / 'rows'), source_filesystem=system)
"""
    (tmp_path / 'out' / 'rows').mkdir(parents=True)
    status, output = finish(
        start(
            [
                sys.executable,
                '-c',
                code,
                tmp_path,
                *work[1:],
            ]
        )
    )
    assert status == 0, output
    assert_complete(tmp_path / 'out', tmp_path / 'photos', backbone)
