"""Extraction with replaced or damaged files, too little memory, a concurrent run, or a second signal."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from swin_dense.utils import signals
from tests.conftest import photograph
from tests.features.helpers import (
    EVERY_FORMAT,
    command_line,
    failures_in,
    finished_in,
    in_a_process,
    make_images,
    maps_of,
    rows_of,
    start,
    wait_for_images,
)
from tests.processes import python

for package in ('tqdm', 'pyarrow', 'safetensors'):
    pytest.importorskip(package)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a function that runs the command line in this process with a tiny backbone and returns the exit status."""
    return command_line(monkeypatch, tmp_path / 'out')[0]


# In a fresh process, because heap memory freed by an earlier test would not count towards the limit.
WITH_LITTLE_MEMORY = """
import logging, resource, sys
from pathlib import Path
from swin_dense.__main__ import main
from swin_dense.commands import _backbone
from tests.conftest import tiny

small, photos, out, spare = sys.argv[1:]
toy = tiny()
_backbone.build_backbone = lambda args: toy
main(['features', small, '--pool', 'avg', '--workers', '0', '--out', out + '_before'])  # imports all modules in advance
records = []
logging.getLogger('swin_dense.features').addHandler(handler := logging.Handler())
handler.emit = lambda record: records.append(record.getMessage())
used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (int(spare) << 20),) * 2)
found = main(['features', photos, '--pool', 'avg', '--workers', '0', '--out', out])
sys.exit(found if any('too little memory for 8 images of 1024 x 1024' in record for record in records) else 9)
"""


def test_tables_hold_the_rows_of_all_runs_until_pruned(run, tmp_path):
    photos = tmp_path / 'photos'
    make_images(photos, 6)
    folders = sorted(path for path in photos.iterdir() if path.is_dir())
    for part in folders:
        assert run(part) == 0
    assert run(photos / 'empty.jpg') == 1
    assert run(folders[0], photos / 'text.png') == 1
    assert len(finished_in(tmp_path / 'out')) == 6
    assert failures_in(tmp_path / 'out') == ['empty.jpg', 'text.png']
    assert run(folders[0], '--prune') == 0
    assert len(rows_of(tmp_path / 'out')) == 2
    assert len(list(tmp_path.glob('out/features/*/*'))) == 2
    assert run(*folders, '--prune') == 0  # images of this run, whose rows are not yet written, stay
    assert len(finished_in(tmp_path / 'out')) == 6
    assert len(list(tmp_path.glob('out/features/*/*'))) == 6


def test_nothing_is_pruned_if_a_folder_cannot_be_read(run, tmp_path, monkeypatch, capsys):
    """As a disk that is not mounted: its images may still exist."""
    make_images(tmp_path / 'photos', 6, broken=False)
    assert run(tmp_path / 'photos', '--pool', 'avg') == 0
    scandir = os.scandir

    def denied(folder):
        if str(folder).endswith('ordner 1 ü'):
            raise PermissionError(13, 'Permission denied')
        return scandir(folder)

    with monkeypatch.context() as patched:
        patched.setattr('os.scandir', denied)
        assert run(tmp_path / 'photos', '--pool', 'avg', '--prune') == 1
    assert 'no features of other images removed, because' in capsys.readouterr().err
    assert len(finished_in(tmp_path / 'out')) == 6
    (tmp_path / 'photos' / 'ordner 0 ü' / 'x 0.png').unlink()
    assert run(tmp_path / 'photos', '--pool', 'avg', '--prune') == 0
    assert len(finished_in(tmp_path / 'out')) == 5


@pytest.mark.parametrize('file_format', EVERY_FORMAT)
@pytest.mark.parametrize('place', ['out', ''])
def test_maps_within_the_folder_of_the_images_are_no_images(monkeypatch, tmp_path, file_format, place):
    photos = tmp_path / 'photos'
    make_images(photos, 3, broken=False)
    run, _ = command_line(monkeypatch, photos / place, '--format', file_format)
    for _ in range(2):
        assert run(photos) == 0
        assert len(rows_of(photos / place)) == 3


@pytest.mark.skipif(torch.__version__ < '2.6', reason='the limits are for the memory that later versions take')
@pytest.mark.parametrize(('spare', 'status'), [(330, 0), pytest.param(80, 1, marks=pytest.mark.long)])
def test_too_little_memory_halves_the_batch(run, tmp_path, spare, status):
    """torch reports lack of CPU memory only under RLIMIT_AS; 330 MiB suffice for smaller batches, 80 for no image."""
    (tmp_path / 'photos').mkdir()
    image = photograph(1024, 1024)
    for index in range(8):
        Image.fromarray(np.roll(image, index)).save(tmp_path / 'photos' / f'{index}.bmp')

    Image.fromarray(image[:64, :64]).save(tmp_path / 'small.bmp')
    paths = [tmp_path / name for name in ('small.bmp', 'photos', 'out')]
    # Without the variable, malloc reserves 64 MiB for an arena per thread, but not in every run.
    python('-c', WITH_LITTLE_MEMORY, *paths, spare, status=status, MALLOC_ARENA_MAX='1')
    assert len(finished_in(tmp_path / 'out')) == (8 if status == 0 else 0)
    if status:
        errors = [row['error'] for row in rows_of(tmp_path / 'out').values()]
        assert all('use --tile or --max-side' in error for error in errors)
        assert run(tmp_path / 'photos', '--pool', 'avg') == 0  # with enough memory


def test_a_concurrent_run_of_the_same_shard_is_refused(run, tmp_path, capsys):
    make_images(tmp_path / 'photos', 40)
    args = (tmp_path / 'photos', '--batch-size', 1)
    first = start(*args, '--out', tmp_path / 'out')
    wait_for_images(first, 1)
    os.kill(first.pid, signal.SIGSTOP)
    try:
        assert run(*args) == 2
        assert 'another extraction is writing shard 0/1 of' in capsys.readouterr().err
    finally:
        os.kill(first.pid, signal.SIGCONT)
    first.communicate()
    assert first.returncode == 1
    assert len(finished_in(tmp_path / 'out')) == 40
    assert failures_in(tmp_path / 'out') == ['empty.jpg', 'text.png']


def test_the_second_signal_interrupts_at_once():
    def twice():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
        with signals.stop_signals() as received:
            signal.raise_signal(signal.SIGINT)
            if received != [signal.SIGINT]:
                return 1
            try:
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:
                return 0
        return 2

    assert in_a_process(twice) == 0


def test_max_side_and_page(run, tmp_path):
    frames = [Image.fromarray(photograph(60, 90)), Image.fromarray(photograph(90, 60))]
    frames[0].save(tmp_path / 'pages.tif', save_all=True, append_images=frames[1:])
    assert run(tmp_path / 'pages.tif', '--page', 1, '--max-side', 45) == 0
    assert maps_of(tmp_path / 'out', tmp_path / 'pages.tif')[1] == (45, 30)
    assert run(tmp_path / 'pages.tif', '--page', 0, '--max-side', 45) == 2  # other settings


class TestNames:
    def test_a_name_that_is_not_utf_8(self, run, tmp_path):
        name = os.fsdecode(os.fsencode(tmp_path) + b'/caf\xe9.png')
        Image.fromarray(photograph(33, 40)).save(name)
        assert run(tmp_path, '--pool', 'avg') == 0
        assert run(tmp_path, '--pool', 'avg') == 0
        assert list(rows_of(tmp_path / 'out')) == [f'{tmp_path}/caf\\xe9.png']
        (tmp_path / 'out').rename(tmp_path / 'other')
        Path(name).write_bytes(b'')
        assert run(name, '--pool', 'avg') == 1
        assert failures_in(tmp_path / 'out') == ['caf\\xe9.png']
