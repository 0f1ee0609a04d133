"""What extraction survives: replaced and damaged files, too little memory, a second run at once, a second signal."""

import contextlib
import csv
import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image

from swin_dense import SwinBackbone
from swin_dense.__main__ import main
from swin_dense.commands import _backbone
from swin_dense.features.extraction import Extraction
from swin_dense.features.inference import Inference
from swin_dense.features.job import run_extraction, stop_signals
from swin_dense.features.sources import list_images
from swin_dense.features.storage import FeatureFolder, check_settings, collect_failures, note_failure, write_index
from tests.conftest import ROOT, TINY, photograph, randomize
from tests.features.mutations import ORIGINALS, mutate
from tests.features.test_extraction import failures_in, make_images
from tests.features.test_storage import EVERY_FORMAT, load, tree

pytest.importorskip('rich')


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run the command line in this process with a toy backbone; returns the exit status."""
    toy = randomize(SwinBackbone(**TINY)).eval()
    monkeypatch.setitem(_backbone.BACKBONES, 'swin', lambda *args, **options: toy)
    return lambda *args: main(['features', *map(str, args), '--out', str(tmp_path / 'out')])


@contextlib.contextmanager
def process(function):
    """Run a function, whose value becomes the exit status, in a process of its own during the block."""
    started = multiprocessing.get_context('fork').Process(target=lambda: sys.exit(function()))
    started.start()
    try:
        yield started
    finally:
        started.kill()
        started.join()


def in_a_process(function):
    with process(function) as started:
        started.join()
        return started.exitcode


# In a fresh process, as memory that an earlier test left free in the heap would be no limit.
WITH_LITTLE_MEMORY = """
import logging, resource, sys
from pathlib import Path
from swin_dense import SwinBackbone
from swin_dense.__main__ import main
from swin_dense.commands import _backbone
from tests.conftest import TINY, randomize

small, photos, out, spare = sys.argv[1:]
toy = randomize(SwinBackbone(**TINY)).eval()
_backbone.BACKBONES['swin'] = lambda *args, **options: toy
main(['features', small, '--pool', 'avg', '--workers', '0', '--out', out + '_before'])  # imports what it needs
records = []
logging.getLogger('swin_dense.features').addHandler(handler := logging.Handler())
handler.emit = lambda record: records.append(record.getMessage())
used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (int(spare) << 20),) * 2)
found = main(['features', photos, '--pool', 'avg', '--workers', '0', '--out', out])
sys.exit(found if any('too little memory for 8 images of 1024 x 1024' in record for record in records) else 9)
"""


ONE_BY_ONE = Extraction(Inference(), batch_size=1)


def index_of(folder):
    with (folder / 'index.csv').open(encoding='utf-8', newline='') as file:
        return [row['image'] for row in csv.DictReader(file)]


@pytest.mark.parametrize('file_format', EVERY_FORMAT)
def test_what_is_not_whole_or_out_of_date_is_done_again(run, tmp_path, file_format):
    paths = make_images(tmp_path / 'photos', 5, broken=False)
    args = (tmp_path / 'photos', '--format', file_format)
    assert run(*args) == 0
    folder = FeatureFolder(tmp_path / 'out', file_format)
    before = tree(tmp_path / 'out')
    damaged = [path for path in tmp_path.glob('out/features/**/*') if path.is_file()]
    for path in damaged[:3]:
        path.write_bytes(b'')
    assert run(*args) == 0
    assert tree(tmp_path / 'out') == before
    Image.fromarray(photograph(33, 64)).save(paths[0])
    Image.fromarray(photograph(70, 33)).save(paths[1])
    assert run(*args) == 0
    after = tree(tmp_path / 'out')
    assert load(folder.path_of(paths[1]))[1] == (70, 33)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    done_again = {folder.path_of(path).name for path in paths[:2]}
    of_features = {name for name in changed if name.startswith('features')}
    assert done_again == {next(part for part in Path(name).parts if part.endswith(file_format)) for name in of_features}


@pytest.mark.filterwarnings('ignore')
def test_damaged_images_cost_themselves_alone(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 1 << 16)  # damaged headers may promise much
    chance = random.Random(0)
    (tmp_path / 'photos').mkdir()
    for index in range(60):
        form = chance.choice(list(ORIGINALS))
        (tmp_path / 'photos' / f'{index}.tif').write_bytes(mutate(ORIGINALS[form](), chance))
    whole = make_images(tmp_path / 'photos', 3, broken=False)
    assert run(tmp_path / 'photos', '--pool', 'avg', '--max-side', 64) == 1
    done, failed = index_of(tmp_path / 'out'), failures_in(tmp_path / 'out')
    assert set(map(str, whole)) <= set(done)
    assert len(done) + len(failed) == 63
    assert failed


def test_tables_tell_of_all_calls_and_pruning_forgets(run, tmp_path):
    photos = tmp_path / 'photos'
    make_images(photos, 6)
    folders = sorted(path for path in photos.iterdir() if path.is_dir())
    for part in folders:
        assert run(part) == 0
    assert run(photos / 'empty.jpg') == 1
    assert run(folders[0], photos / 'text.png') == 1
    assert len(index_of(tmp_path / 'out')) == 6
    assert failures_in(tmp_path / 'out') == ['empty.jpg', 'text.png']
    assert run(folders[0], '--prune') == 0
    assert len(index_of(tmp_path / 'out')) == 2
    assert len(list(tmp_path.glob('out/features/*/*'))) == 2
    assert not (tmp_path / 'out' / 'failures.csv').exists()


def test_another_batch_size_goes_on_in_the_same_folder(run, tmp_path):
    make_images(tmp_path / 'photos', 3, broken=False)
    assert run(tmp_path / 'photos', '--batch-size', 2) == 0
    assert run(tmp_path / 'photos', '--batch-size', 1) == 0


@pytest.mark.parametrize(('spare', 'status'), [(230, 0), (110, 1)])
def test_too_little_memory_halves_the_batch(run, tmp_path, spare, status):
    """On a CPU torch says so only under such a limit; 230 MiB are for some of eight images at once, 110 for none."""
    (tmp_path / 'photos').mkdir()
    image = photograph(1024, 1024)
    for index in range(8):
        Image.fromarray(np.roll(image, index)).save(tmp_path / 'photos' / f'{index}.bmp')

    Image.fromarray(image[:64, :64]).save(tmp_path / 'small.bmp')
    paths = [tmp_path / name for name in ('small.bmp', 'photos', 'out')]
    command = [sys.executable, '-c', WITH_LITTLE_MEMORY, *paths, str(spare)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    done = index_of(tmp_path / 'out')
    assert len(done) == (8 if status == 0 else 0)
    if status:
        assert 'use tile= (--tile) or max_side= (--max-side)' in (tmp_path / 'out' / 'failures.csv').read_text()
        assert run(tmp_path / 'photos', '--pool', 'avg') == 0  # once there is memory


def test_two_runs_at_once(run, tmp_path, capsys):
    make_images(tmp_path / 'photos', 40)
    args = (tmp_path / 'photos', '--batch-size', 1)
    with process(lambda: run(*args)) as first:
        while not list(tmp_path.glob('out/features/*/*')):
            assert first.is_alive()
        before = sorted((tmp_path / 'out' / '.partial').iterdir())
        assert run(*args) == 2
        assert 'another extraction is writing into' in capsys.readouterr().err
        assert not before or (tmp_path / 'out' / '.partial').exists()
        first.join()
        assert first.exitcode == 1
    assert len(index_of(tmp_path / 'out')) == 40
    assert failures_in(tmp_path / 'out') == ['empty.jpg', 'text.png']


def test_where_the_first_rank_is_refused_the_others_write_nothing(tmp_path):
    paths = [str(path) for path in make_images(tmp_path / 'photos', 8, broken=False)]  # four for each rank
    folder = FeatureFolder(tmp_path / 'out', 'safetensors')
    check_settings(folder, {'pool': 'avg'})
    toy = randomize(SwinBackbone(**TINY)).eval()

    def as_rank(rank):
        dist.init_process_group('gloo', init_method=f'file://{tmp_path}/meeting', rank=rank, world_size=2)
        try:
            settings = {'pool': 'gem'}
            outcome = run_extraction(toy, paths, folder, ONE_BY_ONE, settings, rank=rank, world_size=2)
        except ValueError:
            return 2
        finally:
            dist.destroy_process_group()
        return outcome.is_deserted

    with process(lambda: as_rank(0)) as first, process(lambda: as_rank(1)) as second:
        first.join()
        second.join()
    assert (first.exitcode, second.exitcode) == (2, 1)
    assert not (tmp_path / 'out' / 'features').exists()


def test_a_killed_run_holds_nothing_and_its_failures_are_known(run, tmp_path):
    make_images(tmp_path / 'photos', 40)
    with process(lambda: run(tmp_path / 'photos', '--batch-size', 1)) as first:
        noted = tmp_path / 'out' / '.partial' / 'failures-0.csv'
        while not (noted.exists() and 'empty.jpg' in noted.read_text()):
            assert first.is_alive()
        os.kill(first.pid, signal.SIGKILL)
    assert not (tmp_path / 'out' / 'index.csv').exists()  # which it would have written at its end
    assert run(next(iter(sorted(tmp_path.glob('photos/*/*.png'))))) == 0
    assert 'empty.jpg' in failures_in(tmp_path / 'out')


@pytest.mark.parametrize('content', ['', '{"arch": ', '[]x', '["arch"]', '3'])
def test_damaged_settings(tmp_path, content):
    folder = FeatureFolder(tmp_path, 'npz')
    (tmp_path / 'settings.json').write_text(content)
    with pytest.raises(ValueError, match=r'settings\.json is damaged .*choose another folder'):
        check_settings(folder, {'arch': 'swin_t'})


def test_rows_of_tables_that_are_not_whole_are_left_out(tmp_path):
    folder = FeatureFolder(tmp_path, 'npz')
    folder.save('a.jpg', {4: torch.zeros(2, 3, 3)}, (12, 12))
    file = folder.path_of('a.jpg').relative_to(tmp_path)
    (tmp_path / 'index.csv').write_text(f'image,file,height\na.jpg,{file},3\n')
    (tmp_path / 'failures.csv').write_text('image;error\nb.jpg;it is broken\n')
    note_failure(folder, 0, 'c.jpg', 'it is empty')
    with (tmp_path / '.partial' / 'failures-0.csv').open('a') as noted:
        noted.write('d.jpg')  # where it was killed
    assert collect_failures(folder) == {'c.jpg': 'it is empty'}
    assert write_index(folder, ['b.jpg']) == 0


def test_the_second_signal_ends_what_the_first_has_asked_to_end():
    def twice():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
        with stop_signals() as received:
            os.kill(os.getpid(), signal.SIGINT)
            if received != [signal.SIGINT]:
                return 1
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                return 0
        return 2

    assert in_a_process(twice) == 0


def test_max_side_and_page(run, tmp_path):
    frames = [Image.fromarray(photograph(60, 90)), Image.fromarray(photograph(90, 60))]
    frames[0].save(tmp_path / 'pages.tif', save_all=True, append_images=frames[1:])
    assert run(tmp_path / 'pages.tif', '--page', 1, '--max-side', 45) == 0
    assert FeatureFolder(tmp_path / 'out', 'safetensors').image_size(tmp_path / 'pages.tif') == (45, 30)
    assert run(tmp_path / 'pages.tif', '--page', 0, '--max-side', 45) == 2
    assert run(tmp_path / 'pages.tif', '--page', 7, '--pool', 'avg') == 2  # made in another way


class TestSources:
    def test_nothing_is_passed_over_in_silence(self, tmp_path):
        make_images(tmp_path / 'photos', 3, broken=False)
        for name in ('notes.md', 'no-suffix', 'new.avif'):
            (tmp_path / 'photos' / name).write_text('x')
        skipped = {}
        found = list_images([tmp_path / 'photos'], skipped.__setitem__)
        assert {Path(path).name: reason for path, reason in skipped.items()} == {
            'notes.md': "is no image by its suffix '.md'",
            'no-suffix': "is no image by its suffix ''",
        }
        assert len(found) == 4

    def test_links_to_folders_are_followed_once(self, tmp_path):
        paths = make_images(tmp_path / 'elsewhere', 3, broken=False)
        (tmp_path / 'photos').mkdir()
        (tmp_path / 'photos' / 'link').symlink_to(tmp_path / 'elsewhere')
        (tmp_path / 'elsewhere' / 'circle').symlink_to(tmp_path / 'photos')
        found = list_images([tmp_path / 'photos'])
        assert sorted(map(os.path.realpath, found)) == sorted(map(str, paths))

    def test_a_folder_that_cannot_be_read_is_a_failure(self, run):
        """Others are done. Of root nothing is hidden, so it is another user who looks."""
        with tempfile.TemporaryDirectory() as folder:
            tmp_path = Path(folder)
            tmp_path.chmod(0o777)
            make_images(tmp_path / 'photos', 3, broken=False)
            for path in (tmp_path / 'photos').iterdir():
                path.chmod(0o755)
            closed = sorted((tmp_path / 'photos').iterdir())[0]
            closed.chmod(0)

            def as_nobody():
                if os.getuid() == 0:
                    os.setuid(65534)
                return main(['features', str(tmp_path / 'photos'), '--out', str(tmp_path / 'out'), '--pool', 'avg'])

            assert in_a_process(as_nobody) == 1
            closed.chmod(stat.S_IRWXU)
            assert failures_in(tmp_path / 'out') == [closed.name]
            assert len(index_of(tmp_path / 'out')) == 2

    def test_a_name_that_is_not_utf_8(self, run, tmp_path):
        name = os.fsdecode(os.fsencode(tmp_path) + b'/caf\xe9.png')
        Image.fromarray(photograph(33, 40)).save(name)
        assert run(tmp_path, '--pool', 'avg') == 0
        assert index_of(tmp_path / 'out') == [f'{tmp_path}/caf\\xe9.png']
        (tmp_path / 'out').rename(tmp_path / 'other')
        Path(name).write_bytes(b'')
        assert run(name, '--pool', 'avg') == 1
        assert failures_in(tmp_path / 'out') == ['caf\\xe9.png']
