"""`swin-dense features`: output, recovery from failures and signals, and shards."""

import os
import random
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from swin_dense.__main__ import main
from swin_dense.features.pyramid import extract_pyramid
from tests.conftest import IfInstalled, small_disk, some, tiny
from tests.features.helpers import (
    EVERY_FORMAT,
    PHOTOGRAPH,
    command_line,
    failures_in,
    features_in,
    finished_in,
    in_a_process,
    in_format,
    load,
    make_images,
    maps_of,
    rows_of,
    start,
    wait_for_images,
)
from tests.features.test_listing import write_tar

tifffile, fsspec = IfInstalled('tifffile'), IfInstalled('fsspec')
extraction = IfInstalled('swin_dense.features.extraction')  # which needs pyarrow
for package in ('tqdm', 'pyarrow', 'safetensors'):
    pytest.importorskip(package)

TORCHRUN = ('-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2')


@pytest.fixture
def command(monkeypatch, tmp_path):
    return command_line(monkeypatch, tmp_path / 'out', '--workers', '0')


@pytest.fixture
def run(command):
    return command[0]


@pytest.fixture
def backbone(command):
    return command[1]


@pytest.mark.parametrize('file_format', EVERY_FORMAT)
def test_maps_equal_extract_pyramid(run, backbone, tmp_path, file_format):
    paths = make_images(tmp_path / 'photos', 5)
    assert run(tmp_path / 'photos', '--format', file_format, '--batch-size', 2) == 1
    assert failures_in(tmp_path / 'out') == ['empty.jpg', 'text.png']
    for path in paths:
        maps, size = maps_of(tmp_path / 'out', path)
        expected = extract_pyramid(backbone, path)
        row = rows_of(tmp_path / 'out')[str(path)]
        assert size == expected.image_size == (row['height'], row['width'])
        assert sorted(maps) == sorted(expected)
        for stride, level in expected.items():
            torch.testing.assert_close(maps[stride], level, rtol=1e-5, atol=1e-5)
    assert finished_in(tmp_path / 'out') == set(map(str, paths))
    assert not list((tmp_path / 'out').glob('.partial*'))


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
@pytest.mark.parametrize('pool', ['avg', 'gem'])
def test_pooled_vectors_equal_the_pooled_pyramid(run, backbone, tmp_path, pool, dtype):
    paths = make_images(tmp_path / 'photos', 5)
    assert run(tmp_path / 'photos', '--levels', 32, 16, '--pool', pool, '--dtype', dtype, '--part-rows', 2) == 1
    rows = rows_of(tmp_path / 'out')
    assert len(rows) == 7
    for path in paths:
        row = rows[str(path)]
        pyramid = extract_pyramid(backbone, path)
        assert (row['height'], row['width']) == pyramid.image_size
        for stride in (16, 32):
            level = pyramid[stride].double()
            gem = level.clamp(min=1e-6).pow(3).mean((1, 2)).pow(1 / 3)
            vector = level.mean((1, 2)) if pool == 'avg' else gem
            torch.testing.assert_close(torch.tensor(row[f'level_{stride}']).double(), vector, rtol=2e-3, atol=2e-3)
    assert {Path(row['path']).name: row['level_32'] for row in rows.values() if row['error']} == {
        'empty.jpg': None,
        'text.png': None,
    }
    assert not (tmp_path / 'out' / 'features').exists()


def test_levels_dtype_and_autocast_of_maps(run, backbone, tmp_path):
    (path,) = make_images(tmp_path / 'photos', 1, broken=False)
    assert run(path, '--levels', 16, '--dtype', 'float16', '--autocast', 'bfloat16') == 0
    maps, _ = maps_of(tmp_path / 'out', path)
    assert list(maps) == [16]
    assert torch.equal(maps[16], extract_pyramid(backbone, path, autocast='bfloat16')[16].half())


@pytest.mark.parametrize('pool', ['none', 'avg'])
def test_tiles(run, backbone, tmp_path, pool):
    source = tmp_path / 'large.tif'
    tifffile.imwrite(source, PHOTOGRAPH[:250, :240], tile=(64, 64), photometric='rgb')
    (tmp_path / 'text.tif').write_text('text')
    tar = write_tar(tmp_path / 'a.tar', [('large.tif', source.read_bytes())])
    assert run(source, tmp_path / 'text.tif', tar, '--tile', 224, '--pool', pool) == 1
    assert failures_in(tmp_path / 'out') == ['text.tif']
    for name in (source, f'{tar}/large.tif'):
        row = rows_of(tmp_path / 'out')[str(name)]
        assert (row['height'], row['width']) == (250, 240)
        for stride, level in extract_pyramid(backbone, source).items():
            expected = level if pool == 'none' else level.mean((1, 2))
            found = load(tmp_path / 'out' / row['file'])[0][stride] if pool == 'none' else row[f'level_{stride}']
            torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-4, atol=1e-4)


def test_a_second_run_computes_only_missing_images(run, backbone, tmp_path):
    paths = make_images(tmp_path / 'photos', 6, broken=False)
    assert run(tmp_path / 'photos') == 0
    before = features_in(tmp_path / 'out')
    lost, kept = (tmp_path / 'out' / rows_of(tmp_path / 'out')[str(paths[index])]['file'] for index in (2, 0))
    lost.unlink()
    os.utime(kept, (1, 1))
    seen = []
    handle = backbone.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    try:
        assert run(tmp_path / 'photos') == 0
        assert seen == [1]
        assert run(tmp_path / 'photos') == 0
        assert seen == [1]
    finally:
        handle.remove()
    assert features_in(tmp_path / 'out').keys() == before.keys()
    assert len(finished_in(tmp_path / 'out')) == 6
    assert kept.stat().st_mtime == 1


def test_tar_files_and_object_storage(run, backbone, tmp_path):
    paths = make_images(tmp_path / 'photos', 6, broken=False)
    members = [(f'{index}.png', path.read_bytes()) for index, path in enumerate(paths)]
    tar = write_tar(tmp_path / 'a.tar', [*members[:3], ('broken.png', b'')])
    for name, content in members[3:]:
        fsspec.filesystem('memory').pipe_file(f'/bucket/{name}', content)
    seen = []
    handle = backbone.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    try:
        for _ in range(2):
            assert run(tar, 'memory://bucket') == 1
    finally:
        handle.remove()
    assert sum(seen) == 6
    names = [f'{tar}/{index}.png' for index in range(3)] + [f'memory:///bucket/{index}.png' for index in range(3, 6)]
    assert finished_in(tmp_path / 'out') == set(names)
    assert failures_in(tmp_path / 'out') == ['broken.png']
    for name, path in zip(names, paths, strict=True):
        level = extract_pyramid(backbone, path)[32]
        torch.testing.assert_close(maps_of(tmp_path / 'out', name)[0][32], level, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (('{folder}',), 'no images found'),
        (('{image}', '--tile', '100'), 'multiple of 224'),
        (('{image}', '--part-rows', '0'), '--part-rows must be at least 1'),
        (('{image}', '--dtype', 'bfloat16', '--format', 'zarr'), '--dtype bfloat16'),
        (('{image}', '--dtype', 'bfloat16', '--pool', 'avg'), '--dtype bfloat16'),
        (('{image}', '--format', 'safetensors', '--pool', 'avg'), '--pool writes Parquet'),
        (('{image}', '--overlap', '224'), '--overlap needs --tile'),
    ],
)
def test_wrong_usage(run, tmp_path, monkeypatch, capsys, args, message):
    (image,) = make_images(tmp_path / 'photos', 1, broken=False)
    (tmp_path / 'no images').mkdir()
    monkeypatch.chdir(tmp_path)
    assert run(*(arg.format(folder=tmp_path / 'no images', image=image) for arg in args)) == 2
    assert message in capsys.readouterr().err


def test_the_output_is_a_folder(run, tmp_path, capsys):
    (path,) = make_images(tmp_path / 'photos', 1, broken=False)

    def into(name):
        return main(['features', str(path), '--pool', 'avg', '--out', str(tmp_path / name)])

    assert into('maps.npz') == 2
    assert f"--out must be a folder, to which many files are written, got '{tmp_path}/maps" in capsys.readouterr().err
    (tmp_path / 'maps.npz').mkdir()
    for name in ('maps.npz', 'vectors.parquet', 'version.2'):  # pandas reads a folder .parquet
        assert into(name) == 0
        assert finished_in(tmp_path / name) == {str(path)}


@pytest.mark.parametrize('options', [(), ('--tile', '224'), ('--pool', 'avg', '--workers', '1')])
def test_a_named_pipe_does_not_stop_the_run(tmp_path, options, monkeypatch, capfd):
    """A program that opens such a pipe waits for ever, so it is ended after a minute."""
    make_images(tmp_path / 'photos', 2, broken=False)
    os.mkfifo(tmp_path / 'photos' / 'pipe.jpg')
    os.mkfifo(tmp_path / 'photos' / 'pipe.sock')
    (tmp_path / 'photos' / 'link.png').symlink_to(tmp_path / 'photos' / 'pipe.jpg')
    run, _ = command_line(monkeypatch, tmp_path / 'out', *options)
    status = in_a_process(lambda: signal.alarm(60) or run(tmp_path / 'photos', tmp_path / 'photos' / '*.jpg'))
    errors = capfd.readouterr().err
    assert status == 1, errors
    assert '2 of 2 images' in errors
    assert f"skipped: '{tmp_path}/photos/pipe.jpg' is not a regular file" in errors
    assert 'link.png' in errors


def test_errors_are_named_and_libraries_are_silent(tmp_path):
    """A file of 4 bands, on which PIL reports an error, and one with a damaged tag, on which PIL warns."""
    (tmp_path / 'photos').mkdir()
    tifffile.imwrite(
        tmp_path / 'photos' / 'a.tif', np.zeros((9, 9, 4), np.uint8), photometric='minisblack', planarconfig='contig'
    )
    tifffile.imwrite(tmp_path / 'photos' / 'b.tif', PHOTOGRAPH, photometric='rgb', software='x' * 30)
    content = bytearray((tmp_path / 'photos' / 'b.tif').read_bytes())
    at = content.index((305).to_bytes(2, 'little'))
    content[at + 8 : at + 12] = b'\xff' * 4  # the tag Software points beyond the file
    (tmp_path / 'photos' / 'b.tif').write_bytes(content)
    process = start(tmp_path / 'photos', '--out', tmp_path / 'out', '--workers', '1')
    _, errors = process.communicate(timeout=60)
    lines = errors.splitlines()
    assert len(lines) == 2, errors
    assert lines[0].startswith(f"skipped: image '{tmp_path}/photos/a.tif': it has 4 channels")
    assert lines[1] == f'1 of 2 images are in {tmp_path}/out, 1 failed'


@pytest.mark.parametrize('options', [(), ('--tile', '224', '--overlap', '0')])
def test_progress_is_printed_as_lines_off_a_terminal(run, tmp_path, monkeypatch, capsys, options):
    monkeypatch.setattr('swin_dense.commands._progress._SECONDS', 0.0)
    for index in range(2):
        Image.fromarray(PHOTOGRAPH[index : 230 + index, :230]).save(tmp_path / f'{index}.png')
    assert run(tmp_path / '*.png', *options) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(', after 00:0')[0] for line in lines if 'after' in line] == (
        ['1 of 2 images', '2 of 2 images']
        if not options
        else [
            *(f'0 of 2 images, tile {number} of 4 of the next' for number in (1, 2, 3)),
            '1 of 2 images',
            *(f'1 of 2 images, tile {number} of 4 of the next' for number in (1, 2, 3)),
            '2 of 2 images',
        ]
    )
    monkeypatch.setattr('swin_dense.commands._progress._SECONDS', 30.0)
    assert run(tmp_path / '*.png', *options) == 0
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize('options', [(), ('--tile', '224', '--overlap', '0')])
def test_an_interrupted_run_counts_all_images(run, backbone, tmp_path, capsys, options):
    for index in range(5):
        Image.fromarray(PHOTOGRAPH[index : 230 + index, : 230 + index]).save(tmp_path / f'{index}.png')
    calls = []

    def interrupt(module, args):
        calls.append(0)
        if len(calls) == (6 if options else 2):
            signal.raise_signal(signal.SIGINT)

    handle = backbone.register_forward_hook(lambda module, args, out: interrupt(module, args))
    try:
        assert run(tmp_path / '*.png', *options, '--batch-size', 1) == 130
    finally:
        handle.remove()
    errors = capsys.readouterr().err
    count = 1 if options else 2
    assert f'{count} of 5 images are in {tmp_path}/out, 0 failed' in errors
    assert 'stopped before the end; run the same command again' in errors
    assert len(finished_in(tmp_path / 'out')) == len(list((tmp_path / 'out').glob('features/*/*'))) == count
    assert not list((tmp_path / 'out').glob('.partial*'))
    assert run(tmp_path / '*.png', *options) == 0
    assert '5 of 5 images' in capsys.readouterr().err


def test_an_output_folder_that_cannot_be_created(run, tmp_path, capsys):
    (path,) = make_images(tmp_path / 'photos', 1, broken=False)
    (tmp_path / 'out').write_text('a file is in the way')
    assert run(path) == 1
    assert 'cannot write' in capsys.readouterr().err


@pytest.fixture
def disk(tmp_path):
    """Return the output folder of `run`, on a file system of 600 KiB."""
    folder = tmp_path / 'out'
    folder.mkdir()
    with small_disk(folder, '600k'):
        yield folder


@pytest.mark.parametrize(
    ('file_format', 'options'),
    [in_format('safetensors', ()), in_format('zarr', ()), in_format('safetensors', ('--tile', '224'))],
)
def test_a_full_disk_ends_the_run_without_losing_results(run, disk, tmp_path, capsys, file_format, options):
    # The pyramid of a small image takes about 20 KiB, that of 225 x 225 pixels about 420 KiB.
    if options:
        for index in range(2):
            Image.fromarray(PHOTOGRAPH[index : 225 + index, :225]).save(tmp_path / f'{index}.png')
        sources = sorted(tmp_path.glob('*.png'))
    else:
        sources = make_images(tmp_path / 'photos', 45, broken=False)
    args = (*sources, '--format', file_format, *options, '--batch-size', 1)
    assert run(*args) == 1
    assert 'No space left' in capsys.readouterr().err
    finished = list(disk.glob('features/*/*'))
    assert 0 < len(finished) < len(sources)
    before = {path: load(path)[1] and path.stat().st_mtime_ns for path in finished}
    subprocess.run(['mount', '-o', 'remount,size=64m', str(disk)], check=True)
    assert run(*args) == 0
    assert finished_in(disk) == set(map(str, sources))
    assert {path: path.stat().st_mtime_ns for path in finished} == before


def test_a_full_disk_leaves_only_complete_parts(run, disk, tmp_path, capsys):
    """A part with one row takes about 7 KiB."""
    sources = make_images(tmp_path / 'photos', 100, broken=False)
    assert run(*sources, '--pool', 'avg', '--part-rows', 1) == 1
    assert 'No space left' in capsys.readouterr().err
    assert 0 < len(finished_in(disk)) < 100
    subprocess.run(['mount', '-o', 'remount,size=64m', str(disk)], check=True)
    assert run(*sources, '--pool', 'avg', '--part-rows', 1) == 0
    assert finished_in(disk) == set(map(str, sources))


def test_different_weights_have_different_digests(backbone):
    other = tiny()
    assert extraction.weights_digest(other) == extraction.weights_digest(backbone)
    other.norm0.bias.data[3] += 1e-6
    assert extraction.weights_digest(other) != extraction.weights_digest(backbone)


class TestShards:
    def test_each_shard_writes_its_own_images_once(self, run, tmp_path):
        paths = make_images(tmp_path / 'photos', 30)
        for index in (1, 0, 2):
            assert run(tmp_path / 'photos', '--pool', 'avg', '--shard', f'{index}/3') in (0, 1)
            assert len({part.name[:19] for part in (tmp_path / 'out').glob('part-*')}) == [2, 1, 3][index]
        assert finished_in(tmp_path / 'out') == set(map(str, paths))
        assert failures_in(tmp_path / 'out') == ['empty.jpg', 'text.png']

    def test_a_different_list_in_another_shard_is_reported(self, run, tmp_path, capsys):
        make_images(tmp_path / 'photos', 4, broken=False)
        assert run(tmp_path / 'photos', '--shard', '0/2') == 0
        Image.fromarray(PHOTOGRAPH[:40, :40]).save(tmp_path / 'photos' / 'new.png')
        assert run(tmp_path / 'photos', '--shard', '1/2') == 1
        assert '_shard-00000-of-00002.json has another list: 4 images' in capsys.readouterr().err
        assert run(tmp_path / 'photos', '--shard', '0/2') == 0
        assert len(finished_in(tmp_path / 'out')) == 5


# --- in separate processes --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize('options', some([('--pool', 'avg', '--part-rows', 5), (), ('--format', 'zarr')], every=3))
def test_killed_at_random_moments(tmp_path, options):
    pytest.importorskip(options[-1] if 'zarr' in options else 'safetensors')
    paths = make_images(tmp_path / 'photos', 60)
    args = (tmp_path / 'photos', *options, '--batch-size', 4, '--workers', 1, '--out', tmp_path / 'out')
    moments = random.Random(str(options))
    for _ in range(2):
        process = start(*args)
        wait_for_images(process, moments.randrange(1, 30))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        rows_of(tmp_path / 'out')  # every part is readable, and no image occurs twice
    final = start(*args)
    _, errors = final.communicate()
    assert final.returncode == 1, errors
    assert finished_in(tmp_path / 'out') == set(map(str, paths))
    assert failures_in(tmp_path / 'out') == ['empty.jpg', 'text.png']
    assert not list((tmp_path / 'out').glob('.partial*'))
    for row in rows_of(tmp_path / 'out').values():
        assert row['error'] or 'file' not in row or load(tmp_path / 'out' / row['file'])


@pytest.mark.slow
@pytest.mark.parametrize('number', some([signal.SIGINT, signal.SIGTERM], every=2))
def test_signals_stop_cleanly(tmp_path, number):
    make_images(tmp_path / 'photos', 200)
    out = tmp_path / 'out'
    process = start(tmp_path / 'photos', '--out', out, '--pool', 'avg', '--batch-size', 2, '--workers', 1)
    done = wait_for_images(process, 5)
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    more = process.stdout.read()  # communicate would lose the buffered lines
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert 'Traceback' not in errors
    assert sorted(rows_of(out)) == sorted([*map(str.strip, done), *more.split('\n')[:-1]])
    assert len(rows_of(out)) < 202
    assert not list(out.glob('.partial*'))


@pytest.mark.slow
@pytest.mark.long
def test_two_ranks_recover_after_one_is_killed(tmp_path):
    paths = make_images(tmp_path / 'photos', 60)
    args = (tmp_path / 'photos', '--batch-size', 3, '--workers', 0, '--out', tmp_path / 'out')
    process = start(*args, launcher=TORCHRUN)
    wait_for_images(process, 5)
    ranks = subprocess.run(['pgrep', '-P', str(process.pid)], capture_output=True, text=True).stdout.split()
    assert len(ranks) == 2
    os.kill(int(ranks[1]), signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0
    again = start(*args, launcher=TORCHRUN)
    _, errors = again.communicate(timeout=120)
    # A rank exits with 0 although images failed, because torchrun would otherwise kill the other rank.
    assert again.returncode == 0, errors
    assert finished_in(tmp_path / 'out') == set(map(str, paths))
    assert failures_in(tmp_path / 'out') == ['empty.jpg', 'text.png']
    assert '2 failed' in errors or errors.count('1 failed') == 2
