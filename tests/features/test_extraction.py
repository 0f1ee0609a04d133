"""`swin-dense features`: what it writes, what it survives, and how it shares the work."""

import csv
import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from swin_dense import SwinBackbone
from swin_dense.__main__ import main
from swin_dense.commands import _backbone
from swin_dense.features.job import weights_digest
from swin_dense.features.pyramid import extract_pyramid
from swin_dense.features.sources import list_images
from swin_dense.features.storage import FeatureFolder
from tests.conftest import TINY, IfInstalled, photograph, randomize
from tests.features.test_storage import EVERY_FORMAT, in_format, load, tree

tifffile = IfInstalled('tifffile')
pytest.importorskip('rich')

WORKER = Path(__file__).with_name('extraction_worker.py')

PHOTOGRAPH = photograph(300, 451)


@pytest.fixture(scope='module')
def backbone():
    return randomize(SwinBackbone(**TINY)).eval()


@pytest.fixture
def run(backbone, monkeypatch, tmp_path):
    """Run the command line in this process with a toy backbone; returns the exit status."""
    monkeypatch.setitem(_backbone.BACKBONES, 'swin', lambda *args, **options: backbone)
    return lambda *args: main(['features', *map(str, args), '--out', str(tmp_path / 'out'), '--workers', '0'])


def make_images(folder, count, broken=True):
    """Write small photographs of a few sizes into nested folders, and two files that are no images."""
    generator = random.Random(0)
    paths = []
    for index in range(count):
        height, width = generator.choice([(40, 52), (33, 64), (52, 40)])
        top, left = generator.randrange(200), generator.randrange(300)
        path = folder / f'ordner {index % 3} ü' / f'x {index // 3}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(PHOTOGRAPH[top : top + height, left : left + width]).save(path)
        paths.append(path)
    if broken:
        (folder / 'empty.jpg').write_bytes(b'')
        (folder / 'text.png').write_text('text')
    return paths


def failures_in(folder):
    with (folder / 'failures.csv').open(newline='') as file:
        return [Path(row['image']).name for row in csv.DictReader(file)]


@pytest.mark.parametrize('file_format', EVERY_FORMAT)
def test_features_are_those_of_the_images(run, backbone, tmp_path, file_format):
    paths = make_images(tmp_path / 'photos', 5)
    assert run(tmp_path / 'photos', '--format', file_format, '--batch-size', 2) == 1
    assert failures_in(tmp_path / 'out') == ['empty.jpg', 'text.png']
    folder = FeatureFolder(tmp_path / 'out', file_format)
    for path in paths:
        maps, size = load(folder.path_of(path))
        expected = extract_pyramid(backbone, path)
        assert size == expected.image_size
        assert sorted(maps) == sorted(expected)
        for stride, level in expected.items():
            torch.testing.assert_close(maps[stride], level, rtol=1e-5, atol=1e-5)
    with (tmp_path / 'out' / 'index.csv').open(newline='') as file:
        rows = list(csv.DictReader(file))
    assert sorted(row['image'] for row in rows) == sorted(map(str, paths))
    assert not (tmp_path / 'out' / '.partial').exists()


def test_levels_dtype_and_pooling(run, backbone, tmp_path):
    (path,) = make_images(tmp_path / 'photos', 1, broken=False)
    level = extract_pyramid(backbone, path)[16].double()
    expected = {'avg': level.mean((1, 2)), 'gem': level.clamp(min=1e-6).pow(3).mean((1, 2)).pow(1 / 3)}
    for pool, vector in expected.items():
        args = (path, '--levels', 16, '--pool', pool, '--dtype', 'float16')
        assert run(*args) == 0
        out = tmp_path / 'out'
        maps, _ = load(FeatureFolder(out, 'safetensors').path_of(path))
        assert list(maps) == [16]
        assert maps[16].dtype == torch.float16
        torch.testing.assert_close(maps[16].double(), vector, rtol=2e-3, atol=2e-3)
        out.rename(tmp_path / f'done {pool}')


def test_autocast_computes_in_lower_precision(run, backbone, tmp_path):
    (path,) = make_images(tmp_path / 'photos', 1, broken=False)
    assert run(path, '--autocast', 'bfloat16') == 0
    maps, _ = load(FeatureFolder(tmp_path / 'out', 'safetensors').path_of(path))
    for stride, level in extract_pyramid(backbone, path).items():
        assert maps[stride].dtype == torch.float32
        assert 0 < (maps[stride] - level).norm() / level.norm() < 0.1


@pytest.mark.parametrize('pool', ['none', 'avg'])
def test_tiles(run, backbone, tmp_path, pool):
    source = tmp_path / 'large.tif'
    tifffile.imwrite(source, PHOTOGRAPH[:250, :240], tile=(64, 64), photometric='rgb')
    (tmp_path / 'text.tif').write_text('text')
    assert run(source, tmp_path / 'text.tif', '--tile', 224, '--pool', pool) == 1
    assert failures_in(tmp_path / 'out') == ['text.tif']
    maps, size = load(FeatureFolder(tmp_path / 'out', 'safetensors').path_of(source))
    assert size == (250, 240)
    for stride, level in extract_pyramid(backbone, source).items():
        expected = level if pool == 'none' else level.mean((1, 2))
        torch.testing.assert_close(maps[stride], expected, rtol=1e-4, atol=1e-4)


def test_a_second_run_does_only_what_is_missing(run, backbone, tmp_path):
    paths = make_images(tmp_path / 'photos', 6, broken=False)
    assert run(tmp_path / 'photos') == 0
    before = tree(tmp_path / 'out')
    folder = FeatureFolder(tmp_path / 'out', 'safetensors')
    folder.path_of(paths[2]).unlink()
    kept = folder.path_of(paths[0])
    os.utime(kept, (1, 1))
    seen = []
    handle = backbone.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    try:
        assert run(tmp_path / 'photos') == 0
        assert sum(seen) < len(paths)
        seen.clear()
        assert run(tmp_path / 'photos') == 0
        assert seen == []
    finally:
        handle.remove()
    assert tree(tmp_path / 'out') == before
    assert kept.stat().st_mtime == 1


def test_an_image_that_cannot_be_read_does_not_end_a_tiled_run(run, tmp_path, monkeypatch, capsys):
    paths = make_images(tmp_path / 'photos', 3, broken=False)
    really_open = Path.open

    def fail_for_one(path, *args, **options):
        if path == paths[1]:
            raise OSError(errno.EIO, 'Input/output error')
        return really_open(path, *args, **options)

    monkeypatch.setattr(Path, 'open', fail_for_one)
    assert run(tmp_path / 'photos', '--tile', 224) == 1
    assert failures_in(tmp_path / 'out') == [paths[1].name]
    assert '2 of 3 images' in capsys.readouterr().err.replace('\n', ' ')


def test_a_repaired_image_leaves_the_failures(run, tmp_path):
    make_images(tmp_path / 'photos', 1)
    assert run(tmp_path / 'photos') == 1
    for name in ('empty.jpg', 'text.png'):
        Image.fromarray(PHOTOGRAPH[:40, :40]).save(tmp_path / 'photos' / name)
    assert run(tmp_path / 'photos') == 0
    assert not (tmp_path / 'out' / 'failures.csv').exists()


def test_other_settings_need_another_folder(run, tmp_path, capsys):
    (path,) = make_images(tmp_path / 'photos', 1, broken=False)
    assert run(path) == 0
    before = tree(tmp_path / 'out')
    assert run(path, '--dtype', 'float16') == 2
    assert 'made in another way' in capsys.readouterr().err
    assert tree(tmp_path / 'out') == before


def test_random_weights_are_announced(run, tmp_path, capsys):
    (path,) = make_images(tmp_path / 'photos', 1, broken=False)
    run(path)
    assert 'RANDOM' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (('missing.jpg',), 'no file, folder or pattern'),
        (('{folder}',), 'no images found'),
        (('{image}', '--levels', '5'), 'every entry of levels'),
        (('{image}', '--tile', '100'), 'multiple of 224'),
        (('{image}', '--batch-size', '0'), 'batch_size must be at least 1'),
    ],
)
def test_wrong_usage(run, tmp_path, capsys, args, message):
    (image,) = make_images(tmp_path / 'photos', 1, broken=False)
    (tmp_path / 'no images').mkdir()
    assert run(*(arg.format(folder=tmp_path / 'no images', image=image) for arg in args)) == 2
    assert message in capsys.readouterr().err.replace('\n', ' ')


@pytest.mark.parametrize(
    'args',
    [('--format', 'npz', '--dtype', 'bfloat16'), ('--format', 'npz', '--tile', '224'), ('--overlap', '224')],
)
def test_options_that_contradict(run, args, capsys):
    assert run('x.jpg', *args) == 2
    assert args[0] in capsys.readouterr().err


def test_a_missing_package_is_one_line(run, tmp_path, monkeypatch, capsys):
    def create_backbone(*args, **options):
        raise ImportError('install huggingface_hub')

    monkeypatch.setitem(_backbone.BACKBONES, 'swin', create_backbone)
    assert run(*make_images(tmp_path / 'photos', 1, broken=False)) == 2
    assert capsys.readouterr().err.endswith('error: install huggingface_hub\n')


def test_an_output_folder_that_cannot_be(run, tmp_path, capsys):
    (path,) = make_images(tmp_path / 'photos', 1, broken=False)
    (tmp_path / 'out').write_text('a file is in the way')
    assert run(path) == 1
    assert 'cannot write' in capsys.readouterr().err


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 600 KiB, where the user may mount one."""
    disk = tmp_path / 'out'
    disk.mkdir()
    mount = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=600k', 'tmpfs', str(disk)], capture_output=True)
    if mount.returncode:
        pytest.skip('mounting a tmpfs is not permitted here')
    yield disk
    subprocess.run(['umount', str(disk)], check=True)


@pytest.mark.parametrize(
    ('file_format', 'options'),
    [in_format('safetensors', ()), in_format('zarr', ()), ('safetensors', ('--tile', '224'))],
)
def test_a_full_disk_ends_the_run_and_loses_nothing(run, small_disk, tmp_path, capsys, file_format, options):
    # A small pyramid of the toy takes about 20 KiB, one of 225 x 225 pixels about 420 KiB.
    if options:
        for index in range(2):
            Image.fromarray(PHOTOGRAPH[index : 225 + index, :225]).save(tmp_path / f'{index}.png')
        sources = sorted(tmp_path.glob('*.png'))
    else:
        sources = make_images(tmp_path / 'photos', 45, broken=False)
    args = (*sources, '--format', file_format, *options, '--batch-size', 1)
    assert run(*args) == 1
    assert 'No space left' in capsys.readouterr().err
    folder = FeatureFolder(small_disk, file_format)
    finished = [path for path in sources if folder.is_finished(path)]
    assert 0 < len(finished) < len(sources)
    for path in finished:
        load(folder.path_of(path))
    subprocess.run(['mount', '-o', 'remount,size=64m', str(small_disk)], check=True)
    assert run(*args) == 0
    assert all(folder.is_finished(path) for path in sources)


def test_sources(tmp_path):
    paths = make_images(tmp_path / 'photos', 4)
    photos = str(tmp_path / 'photos')
    everything = sorted([*map(str, paths), f'{photos}/empty.jpg', f'{photos}/text.png'])
    (tmp_path / 'photos' / 'notes.md').write_text('not an image')
    assert sorted(list_images([photos])) == everything
    assert list_images([photos]) == list_images([photos, paths[0], photos])
    assert sorted(list_images([f'{photos}/**/*.png'])) == [path for path in everything if path.endswith('.png')]
    (tmp_path / 'list.txt').write_text(f'{paths[1]}\n\n{tmp_path}/missing.jpg\n')
    assert list_images([tmp_path / 'list.txt']) == [str(paths[1]), f'{tmp_path}/missing.jpg']
    with pytest.raises(FileNotFoundError, match='pattern'):
        list_images([f'{photos}/*.gif'])


def test_digest_tells_weights_apart(backbone):
    other = randomize(SwinBackbone(**TINY)).eval()
    assert weights_digest(other) == weights_digest(backbone)
    other.norm0.bias.data[3] += 1e-6
    assert weights_digest(other) != weights_digest(backbone)


# --- as programs of their own -----------------------------------------------------------------------------------------


def start(*args, ranks=1):
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ['-m', 'torch.distributed.run', '--standalone', f'--nproc-per-node={ranks}']
    environment = {
        **os.environ,
        'PYTHONPATH': os.pathsep.join([str(WORKER.parents[2]), os.environ.get('PYTHONPATH', '')]),
    }
    return subprocess.Popen(
        [*launcher, str(WORKER), *map(str, args)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished_files(out):
    return sum(1 for _ in (out / 'features').glob('*/*'))


def wait_for_files(process, out, count):
    """Wait until so many features exist or the process ends."""
    while process.poll() is None and finished_files(out) < count:
        time.sleep(0.002)


def ranks_of(process):
    """Return the processes of the two ranks of a launcher, in their order."""
    ranks = subprocess.run(['pgrep', '-P', str(process.pid)], capture_output=True, text=True).stdout.split()
    assert len(ranks) == 2
    return sorted(map(int, ranks))


@pytest.mark.slow
@pytest.mark.parametrize('file_format', [in_format('safetensors'), in_format('zarr', marks=pytest.mark.long)])
def test_killed_at_random_moments(tmp_path, file_format):
    make_images(tmp_path / 'photos', 120)
    args = (tmp_path / 'photos', '--format', file_format, '--batch-size', 4, '--workers', 1)
    undisturbed = start(*args, '--out', tmp_path / 'undisturbed')
    _, errors = undisturbed.communicate()
    assert undisturbed.returncode == 1, errors

    out = tmp_path / 'out'
    moments = random.Random(file_format)
    for _ in range(3):
        process = start(*args, '--out', out)
        wait_for_files(process, out, finished_files(out) + moments.randrange(1, 30))
        time.sleep(moments.random() * 0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert 0 < finished_files(out) < 120
    final = start(*args, '--out', out)
    _, errors = final.communicate()
    assert final.returncode == 1, errors
    assert tree(out) == tree(tmp_path / 'undisturbed')


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_cleanly(tmp_path, number):
    make_images(tmp_path / 'photos', 200)
    out = tmp_path / 'out'
    process = start(tmp_path / 'photos', '--out', out, '--batch-size', 2, '--workers', 1)
    wait_for_files(process, out, 5)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert 'Traceback' not in errors
    with (out / 'index.csv').open(newline='') as file:
        assert len(list(csv.DictReader(file))) == finished_files(out) < 200
    assert not (out / '.partial').exists()


@pytest.mark.slow
def test_two_ranks_and_one_that_dies(tmp_path):
    make_images(tmp_path / 'photos', 90)
    args = (tmp_path / 'photos', '--batch-size', 3, '--workers', 0)
    alone = start(*args, '--out', tmp_path / 'alone')
    alone.communicate()
    assert alone.returncode == 1

    out = tmp_path / 'out'
    process = start(*args, '--out', out, ranks=2)
    wait_for_files(process, out, 10)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert 0 < finished_files(out) < 90

    again = start(*args, '--out', out, ranks=2)
    _, errors = again.communicate(timeout=120)
    assert again.returncode == 1, errors
    assert tree(out) == tree(tmp_path / 'alone')


@pytest.mark.slow
@pytest.mark.parametrize('number', [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_the_tables_do_not_depend_on_a_rank_that_is_waited_for(tmp_path, number):
    """The first rank, done with its image, waits for the second, which has many tiles left when it is ended."""
    for name, side in (('0.png', 40), ('1.png', 3000)):
        Image.new('RGB', (side, side)).save(tmp_path / name)
    args = (tmp_path / '0.png', tmp_path / '1.png', '--tile', 224, '--levels', 32, '--out', tmp_path / 'out')
    process = start(*args, ranks=2)
    wait_for_files(process, tmp_path / 'out', 1)
    _, second = ranks_of(process)
    time.sleep(0.5)
    os.kill(second, number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert 'job.py' not in errors  # a traceback of ours, as the launcher has its own
    assert finished_files(tmp_path / 'out') == 1
    assert '0.png' in (tmp_path / 'out' / 'index.csv').read_text()


@pytest.mark.slow
def test_two_ranks_do_every_image_once(tmp_path):
    make_images(tmp_path / 'photos', 30)
    process = start(tmp_path / 'photos', '--out', tmp_path / 'out', '--batch-size', 2, '--workers', 0, ranks=2)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    assert finished_files(tmp_path / 'out') == 30
    with (tmp_path / 'out' / 'index.csv').open(newline='') as file:
        assert len(list(csv.DictReader(file))) == 30  # though a rank had a failed image, and torchrun ends the others
    assert failures_in(tmp_path / 'out') == ['empty.jpg', 'text.png']
