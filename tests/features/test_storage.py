"""Feature files: readable by their own packages, the same bytes each time, whole or not there."""

import csv
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from swin_dense.features.storage import (
    FORMATS,
    FeatureFolder,
    check_settings,
    collect_failures,
    note_failure,
    prune,
    require_package,
    write_failures,
    write_index,
)
from tests.conftest import IfInstalled

pandas, zarr = IfInstalled('pandas'), IfInstalled('zarr')
safetensors = IfInstalled('safetensors.torch')

MAPS = {4: torch.randn(3, 10, 13), 8: torch.randn(6, 5, 7)}
SIZE = (37, 50)


def in_format(file_format, *values, marks=()):
    """Return a case of a parametrised test, which is skipped where the format cannot be written."""
    try:
        require_package(file_format)
    except ImportError as error:
        return pytest.param(file_format, *values, marks=pytest.mark.skip(str(error)))
    return pytest.param(file_format, *values, marks=marks)


EVERY_FORMAT = [in_format(name) for name in FORMATS]


def load(path):
    """Read a feature file with the package that its format belongs to: (maps, image size)."""
    if path.suffix == '.safetensors':
        with safetensors.safe_open(path, 'pt') as file:
            size = tuple(json.loads(file.metadata()['image_size']))
        return {int(name): level for name, level in safetensors.load_file(path).items()}, size
    if path.suffix == '.npz':
        with np.load(path) as file:
            maps = {int(name): torch.from_numpy(file[name]) for name in file.files if name != 'image_size'}
            return maps, tuple(file['image_size'].tolist())
    group = zarr.open_group(path, mode='r')
    return {int(name): torch.from_numpy(array[:]) for name, array in group.arrays()}, tuple(group.attrs['image_size'])


def tree(folder):
    """Return every file below a folder with its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob('*')) if p.is_file()}


def assert_equal(maps, expected):
    assert sorted(maps) == sorted(expected)
    for stride, level in expected.items():
        assert maps[stride].dtype == level.dtype
        assert torch.equal(maps[stride], level)


@pytest.mark.parametrize('file_format', EVERY_FORMAT)
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_what_is_written_is_read(tmp_path, file_format, dtype):
    folder = FeatureFolder(tmp_path / 'out', file_format)
    maps = {stride: level.to(dtype) for stride, level in MAPS.items()}
    assert not folder.is_finished('a b/ü.jpg')
    folder.save('a b/ü.jpg', maps, SIZE)
    assert folder.is_finished('a b/ü.jpg')
    found, size = load(folder.path_of('a b/ü.jpg'))
    assert_equal(found, maps)
    assert size == folder.image_size('a b/ü.jpg') == SIZE


@pytest.mark.parametrize('file_format', EVERY_FORMAT)
def test_bytes_depend_on_the_features_alone(tmp_path, file_format, monkeypatch):
    for name, clock in (('one', 1e9), ('two', 1.7e9)):
        monkeypatch.setattr('time.time', lambda clock=clock: clock)
        FeatureFolder(tmp_path / name, file_format).save('/x.jpg', MAPS, SIZE)
    assert tree(tmp_path / 'one') == tree(tmp_path / 'two')


def test_a_format_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="did you mean 'safetensors'"):
        FeatureFolder(tmp_path / 'out', 'safetensor')
    monkeypatch.setattr('swin_dense.features.storage.find_spec', lambda name: None)
    with pytest.raises(ImportError, match='pip install zarr'):
        FeatureFolder(tmp_path / 'out', 'zarr')
    assert not (tmp_path / 'out').exists()


def test_a_zarr_that_is_too_old_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr('swin_dense.features.storage.find_spec', lambda name: True)
    monkeypatch.setattr('swin_dense.features.storage.version', lambda name: '2.18.3')
    with pytest.raises(ImportError, match=r'zarr 3, not 2\.18\.3: .*Python 3\.11'):
        FeatureFolder(tmp_path / 'out', 'zarr')
    assert not (tmp_path / 'out').exists()


def blocks_of(maps, tile):
    """Cut maps into blocks as a tiled extraction yields them."""
    for top in range(0, SIZE[0], tile):
        for left in range(0, SIZE[1], tile):
            bottom, right = min(top + tile, SIZE[0]), min(left + tile, SIZE[1])
            yield {
                s: (
                    slice(top // s, -(-bottom // s)),
                    slice(left // s, -(-right // s)),
                    level[:, top // s : -(-bottom // s), left // s : -(-right // s)],
                )
                for s, level in maps.items()
            }


@pytest.mark.parametrize(
    ('file_format', 'dtype'),
    [
        in_format(file_format, dtype)
        for file_format in ('safetensors', 'zarr')
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        if (file_format, dtype) != ('zarr', torch.bfloat16)
    ],
)
def test_written_in_pieces(tmp_path, file_format, dtype):
    folder = FeatureFolder(tmp_path, file_format)
    maps = {stride: level.to(dtype) for stride, level in MAPS.items()}
    with folder.save_in_pieces('x.tif', {4: 3, 8: 6}, SIZE, dtype, (16, 16)) as write:
        for blocks in blocks_of(maps, 16):
            assert not folder.is_finished('x.tif')
            write(blocks)
    found, size = load(folder.path_of('x.tif'))
    assert_equal(found, maps)
    assert size == folder.image_size('x.tif') == SIZE


@pytest.mark.parametrize('file_format', [in_format('safetensors'), in_format('zarr')])
def test_a_failure_leaves_nothing_behind(tmp_path, file_format):
    folder = FeatureFolder(tmp_path, file_format)

    def write_half():
        with folder.save_in_pieces('x.tif', {4: 3, 8: 6}, SIZE, torch.float32, (16, 16)) as write:
            write(next(blocks_of(MAPS, 16)))
            assert tree(tmp_path) != {}
            raise RuntimeError('in between')

    with pytest.raises(RuntimeError, match='in between'):
        write_half()
    assert tree(tmp_path) == {}


@pytest.mark.parametrize('file_format', EVERY_FORMAT)
def test_a_failing_rename_keeps_what_was_there(tmp_path, file_format, monkeypatch):
    folder = FeatureFolder(tmp_path, file_format)
    folder.save('first.jpg', MAPS, SIZE)
    before = tree(tmp_path)

    def fail(source, target):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(os, 'replace', fail)
    with pytest.raises(OSError, match='No space'):
        folder.save('second.jpg', MAPS, SIZE)
    assert tree(tmp_path) == before


def test_names_do_not_collide_and_can_be_written(tmp_path):
    folder = FeatureFolder(tmp_path, 'npz')
    images = [
        'a/x.jpg',
        'b/x.jpg',
        'x.jpg',
        'x.png',
        'X.jpg',
        'with space.jpg',
        'ü 图 🙂.jpg',
        'ü' * 120 + '.jpg',
        'a' * 240,
    ]
    images.append(os.fsdecode(b'not utf-8 \xff.jpg'))
    for image in images:
        folder.save(image, MAPS, SIZE)
    assert len({folder.path_of(image) for image in images}) == len(images)
    assert folder.path_of('a/../x.jpg') == folder.path_of('x.jpg') == folder.path_of(os.path.abspath('x.jpg'))
    assert write_index(folder, images) == len(images)
    with (tmp_path / 'index.csv').open(encoding='utf-8', newline='') as file:
        rows = list(csv.DictReader(file))
    assert [row['image'] for row in rows] == [*images[:-1], r'not utf-8 \xff.jpg']
    for row in rows:
        assert (tmp_path / row['file']).is_file()
        assert (int(row['height']), int(row['width'])) == SIZE


def test_index_lists_only_what_is_finished(tmp_path):
    folder = FeatureFolder(tmp_path, 'npz')
    folder.save('a.jpg', MAPS, SIZE)
    assert write_index(folder, ['missing.jpg', 'a.jpg']) == 1
    assert (tmp_path / 'index.csv').read_text().splitlines()[0] == 'image,file,height,width'


def test_index_as_parquet(tmp_path):
    pytest.importorskip('pyarrow')
    folder = FeatureFolder(tmp_path, 'npz')
    folder.save('ü.jpg', MAPS, SIZE)
    write_index(folder, ['ü.jpg'])
    file = folder.path_of('ü.jpg').relative_to(tmp_path).as_posix()
    assert pandas.read_parquet(tmp_path / 'index.parquet').to_dict('records') == [
        {'image': 'ü.jpg', 'file': file, 'height': 37, 'width': 50}
    ]


@pytest.mark.parametrize('file_format', EVERY_FORMAT)
@pytest.mark.parametrize('damage', ['empty', 'half', 'gone'])
def test_what_is_not_whole_is_not_finished(tmp_path, file_format, damage):
    folder = FeatureFolder(tmp_path, file_format)
    for image in ('a.jpg', 'b.jpg'):
        folder.save(image, MAPS, SIZE)
    path = folder.path_of('a.jpg')
    if file_format == 'zarr':  # of its files, the one of a chunk
        path = next(child for child in path.rglob('*') if child.is_file() and child.parent.name == '0')
    content = path.read_bytes()
    path.unlink()
    if damage != 'gone' and file_format != 'zarr':
        path.write_bytes(content[: len(content) // 2 if damage == 'half' else 0])
    assert not folder.is_finished('a.jpg')
    assert folder.is_finished('b.jpg')
    assert write_index(folder, ['a.jpg', 'b.jpg']) == 1
    folder.save('a.jpg', MAPS, SIZE)
    assert folder.is_finished('a.jpg')
    assert_equal(load(folder.path_of('a.jpg'))[0], MAPS)


@pytest.mark.parametrize('file_format', EVERY_FORMAT)
def test_a_replaced_image_is_not_finished(tmp_path, file_format):
    folder = FeatureFolder(tmp_path / 'out', file_format)
    image = tmp_path / 'a.jpg'
    image.write_bytes(b'12')
    folder.save(image, MAPS, SIZE)
    os.utime(image, ns=(0, 10**18))
    assert not folder.is_finished(image)
    folder.save(image, MAPS, SIZE)
    assert folder.is_finished(image)
    image.write_bytes(b'123')
    os.utime(image, ns=(0, 10**18))
    assert not folder.is_finished(image)
    image.unlink()
    assert folder.is_finished(image)


def test_the_index_keeps_what_other_calls_have_done(tmp_path):
    folder = FeatureFolder(tmp_path, 'npz')
    for image in ('a.jpg', 'b.jpg', 'c.jpg'):
        folder.save(image, MAPS, SIZE)
    assert write_index(folder, ['a.jpg', 'b.jpg']) == 2
    assert write_index(folder, ['c.jpg', 'b.jpg']) == 2
    with (tmp_path / 'index.csv').open(newline='') as file:
        assert [row['image'] for row in csv.DictReader(file)] == ['a.jpg', 'c.jpg', 'b.jpg']
    assert prune(folder, ['c.jpg', 'd.jpg']) == 2
    assert write_index(folder, ['c.jpg', 'd.jpg']) == 1
    with (tmp_path / 'index.csv').open(newline='') as file:
        assert [row['image'] for row in csv.DictReader(file)] == ['c.jpg']


def test_failures_of_killed_runs_and_of_other_ranks(tmp_path):
    folder = FeatureFolder(tmp_path, 'npz')
    for rank, image in enumerate(['a.jpg', 'b, "c".jpg', 'd.jpg']):
        note_failure(folder, rank, image, f'it is\n{image}')
    folder.save('d.jpg', MAPS, SIZE)
    expected = {image: f'it is\n{image}' for image in ('a.jpg', 'b, "c".jpg')}
    assert collect_failures(folder) == expected
    folder.remove_leftovers()
    assert collect_failures(folder) == expected
    folder.save('a.jpg', MAPS, SIZE)
    assert collect_failures(folder, {'e': 'closed'}) == {'b, "c".jpg': expected['b, "c".jpg'], 'e': 'closed'}


def test_one_at_a_time(tmp_path):
    folder = FeatureFolder(tmp_path, 'npz')
    with folder.alone(), pytest.raises(ValueError, match='another extraction is writing into'), folder.alone():
        pass
    with folder.alone():
        pass


def test_failures_come_and_go(tmp_path):
    folder = FeatureFolder(tmp_path, 'npz')
    write_failures(folder, {'b, "c".jpg': 'it is\nbroken', 'a.jpg': 'missing'})
    with (tmp_path / 'failures.csv').open(newline='') as file:
        assert list(csv.reader(file)) == [['image', 'error'], ['a.jpg', 'missing'], ['b, "c".jpg', 'it is\nbroken']]
    write_failures(folder, {})
    assert not (tmp_path / 'failures.csv').exists()


def test_settings(tmp_path):
    folder = FeatureFolder(tmp_path, 'npz')
    check_settings(folder, {'arch': 'swin_t', 'levels': (4, 8)})
    check_settings(folder, {'arch': 'swin_t', 'levels': (4, 8)})
    check_settings(folder, {'arch': 'swin_t', 'levels': (4, 8), 'batch_size': 2})  # which features do not depend on
    with pytest.raises(ValueError, match="arch 'swin_t' there, 'swin_s' now"):
        check_settings(folder, {'arch': 'swin_s', 'levels': (4, 8)})


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    folder = FeatureFolder(tmp_path, 'npz')
    (tmp_path / '.partial' / '123-x.zarr').mkdir(parents=True)
    (tmp_path / '.partial' / '123-y.npz').write_text('half')
    folder.remove_leftovers()
    assert tree(tmp_path) == {}


def test_npz_is_not_compressed_twice(tmp_path):
    """Features do not compress; stored members can be memory-mapped by those who want."""
    folder = FeatureFolder(tmp_path, 'npz')
    folder.save('a.jpg', MAPS, SIZE)
    with zipfile.ZipFile(folder.path_of('a.jpg')) as file:
        assert all(member.compress_type == zipfile.ZIP_STORED for member in file.infolist())
