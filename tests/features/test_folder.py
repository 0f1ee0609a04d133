"""`swin-dense features`: its output, and the effect of a second run."""

import re
import signal

import pytest
import torch
from PIL import Image

from swin_dense.features.pyramid import extract_pyramid
from tests.conftest import assert_near, small_disk
from tests.features.helpers import (
    PHOTOGRAPH,
    close,
    command_line,
    in_a_process,
    make_images,
    parquet,
    pooled,
    rows_of,
    stored_maps,
    tree,
)

for package in ('tqdm', 'pyarrow', 'safetensors'):
    pytest.importorskip(package)
from swin_dense.features import folder as folders  # noqa: E402 (it needs pyarrow)
from swin_dense.features import runner  # noqa: E402


@pytest.fixture
def command(monkeypatch, tmp_path):
    return command_line(monkeypatch, tmp_path / 'out', '--workers', '0')


def test_maps_equal_extract_pyramid(command, tmp_path, capsys):
    run, backbone = command
    paths = make_images(tmp_path / 'photos', 5)
    assert run(tmp_path / 'photos', '--batch-size', 2) == 1
    printed = capsys.readouterr().err
    assert '5 of 7 images' in printed
    for name in ('empty.jpg', 'text.png'):
        assert len([line for line in printed.splitlines() if name in line]) == 1
    rows = rows_of(tmp_path / 'out')
    assert rows.keys() == set(map(str, paths))
    for path in paths:
        row = rows[str(path)]
        maps, size = stored_maps(tmp_path / 'out', path)
        expected = extract_pyramid(backbone, path)
        assert size == expected.image_size == (row['height'], row['width'])
        close({stride: maps[stride] for stride in sorted(maps)}, expected)


@pytest.mark.parametrize('dtype', ['float16', 'float32'])
@pytest.mark.parametrize('pool', ['avg', 'gem'])
@pytest.mark.parametrize('tile', [(), ('--tile', 224)])
def test_pooled_vectors_equal_the_pooled_pyramid(command, tmp_path, monkeypatch, pool, dtype, tile):
    monkeypatch.setattr(folders, 'ROWS_PER_PART', 2)
    run, backbone = command
    paths = make_images(tmp_path / 'photos', 5, broken=False)
    options = ['--levels', 32, 16, '--pool', pool, '--dtype', dtype]
    assert run(tmp_path / 'photos', *options, *tile) == 0
    assert len(list((tmp_path / 'out').glob('part-*.parquet'))) == 3
    assert parquet.read_table(tmp_path / 'out').num_rows == 5  # the folder is a data set for pyarrow and pandas
    for path in paths:
        row = rows_of(tmp_path / 'out')[str(path)]
        pyramid = extract_pyramid(backbone, path)
        assert (row['height'], row['width']) == pyramid.image_size
        for stride in (16, 32):
            vector = torch.tensor(row[f'level_{stride}'])
            assert_near(vector.double(), pooled(pyramid[stride], pool), 2e-3)


@pytest.mark.parametrize('options', [(), ('--pool', 'avg')])
def test_a_second_run_computes_only_missing_images(command, tmp_path, capsys, options):
    run, backbone = command
    paths = make_images(tmp_path / 'photos', 4)
    assert run(*paths[:3], *options) == 0
    before = tree(tmp_path / 'out')
    seen = []
    backbone.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    assert run(tmp_path / 'photos', *options) == 1
    assert sum(seen) == 1
    assert rows_of(tmp_path / 'out').keys() == set(map(str, paths))
    assert before.items() <= tree(tmp_path / 'out').items()
    assert run(tmp_path / 'photos', *options, '--levels', 32) == 2
    assert 'computed with other settings (levels' in capsys.readouterr().err


def test_a_signal_loses_no_finished_image(command, tmp_path, capfd):
    run, backbone = command
    paths = make_images(tmp_path / 'photos', 4, broken=False)
    hook = backbone.register_forward_pre_hook(lambda module, args: signal.raise_signal(signal.SIGTERM))

    def signalled():
        return run(tmp_path / 'photos', '--pool', 'avg', '--batch-size', 1)

    assert in_a_process(signalled) == 128 + signal.SIGTERM
    assert 'stopping after the image at hand; a second signal stops at once' in capfd.readouterr().err
    assert len(rows_of(tmp_path / 'out')) == 1
    hook.remove()
    assert run(tmp_path / 'photos', '--pool', 'avg') == 0
    assert rows_of(tmp_path / 'out').keys() == set(map(str, paths))


def test_a_process_that_is_killed_loses_a_minute_at_most(tmp_path):
    """Rows are not closed here, as in a process that SIGKILL ends during the image after them."""
    seconds = 0
    names = [f'{number}.png' for number in range(6)]
    folder = folders.FeatureFolder(tmp_path, {}, names, clock=lambda: seconds)

    def add(name, at):
        nonlocal seconds
        seconds = at
        folder.add_vectors(name, (32, 32), {4: torch.zeros(2)}, torch.float32)

    for name, at in (('1.png', 20), ('0.png', 59)):
        add(name, at)
    assert rows_of(tmp_path) == {}
    add('2.png', 60)
    assert list(rows_of(tmp_path)) == ['0.png', '1.png', '2.png']
    add('3.png', 119)
    add('4.png', 3600)
    assert list(rows_of(tmp_path)) == names[:5]
    add('5.png', 3601)
    assert len(rows_of(tmp_path)) == 5
    assert folders.FeatureFolder(tmp_path, {}, names).finished == set(names[:5])


@pytest.mark.parametrize('options', [(), ('--pool', 'avg')])
def test_rows_are_in_the_order_of_the_images(command, tmp_path, options):
    """Images of equal size are computed together, those of the first size last."""
    run, _ = command
    sides = {'a': 33, 'b': 64, 'c': 40, 'd': 64, 'e': 40, 'f': 64}
    for name, side in sides.items():
        Image.fromarray(PHOTOGRAPH[:side, :side]).save(tmp_path / f'{name}.png')
    assert run(tmp_path, '--batch-size', 2, *options) == 0
    assert list(rows_of(tmp_path / 'out')) == [str(tmp_path / f'{name}.png') for name in sides]
    (tmp_path / 'list.txt').write_text(f'{tmp_path}/z.png\n{tmp_path}/y.png\n')
    for name, side in (('y', 64), ('z', 33)):
        Image.fromarray(PHOTOGRAPH[:side, :side]).save(tmp_path / f'{name}.png')
    assert run(tmp_path / 'list.txt', *options) == 0
    assert list(rows_of(tmp_path / 'out'))[6:] == [str(tmp_path / 'z.png'), str(tmp_path / 'y.png')]


def test_an_image_larger_than_a_batch_is_noted(command, tmp_path, monkeypatch, caplog):
    run, _ = command
    monkeypatch.setattr(runner, 'BATCH_PIXELS', 64 * 64)
    for side in (64, 65):
        Image.fromarray(PHOTOGRAPH[:side, :side]).save(tmp_path / f'{side}.png')
    assert run(tmp_path, '--pool', 'avg') == 0
    (note,) = [record.getMessage() for record in caplog.records if 'whole' in record.getMessage()]
    assert '65.png' in note
    assert 'has 65 x 65 pixels and is computed whole; tile= takes less memory, and max_side=' in note


def test_a_full_disk_is_named_in_one_line(command, tmp_path, capsys):
    run, _ = command
    Image.fromarray(PHOTOGRAPH).save(tmp_path / 'photo.png')
    (tmp_path / 'out').mkdir()
    with small_disk(tmp_path / 'out', '200k'):
        assert run(tmp_path / 'photo.png') == 2
        assert not list((tmp_path / 'out').rglob('*.safetensors'))
    printed = capsys.readouterr().err
    assert re.search(r'error: .*photo-\w+\.safetensors cannot be written: .*No space left', printed)
    assert 'Traceback' not in printed


@pytest.mark.parametrize(
    ('name', 'content'),
    [
        ('part-mine.parquet', b''),
        ('part-000000.parquet', b'no table'),
        ('_settings.json', b'{'),
        ('_settings.json', b'[1]'),
    ],
)
def test_a_file_of_another_program_is_named(command, tmp_path, capsys, name, content):
    run, _ = command
    paths = make_images(tmp_path / 'photos', 1, broken=False)
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / name).write_bytes(content)
    assert run(*paths, '--pool', 'avg') == 2
    assert f'{tmp_path / "out" / name} is damaged, or not of' in capsys.readouterr().err
    assert (tmp_path / 'out' / name).read_bytes() == content


def test_a_folder_in_use_is_refused(command, tmp_path, capsys):
    from filelock import FileLock

    run, _ = command
    paths = make_images(tmp_path / 'photos', 1, broken=False)
    (tmp_path / 'out').mkdir()
    with FileLock(tmp_path / 'out' / '.lock'):
        assert run(*paths) == 2
    assert 'another extraction is writing' in capsys.readouterr().err
