"""Feature folders: complete files that the package of their format reads, and one row per image in complete parts."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from swin_dense.features.inference import whole_image
from swin_dense.features.listing import Item, version_of
from swin_dense.features.shards import FORMAT, Shard
from swin_dense.features.sinks import MapSink, in_memory, map_sink
from tests.conftest import IfInstalled
from tests.features.helpers import EVERY_FORMAT, failures_in, finished_in, in_format, load, rows_of, tree

pytest.importorskip('pyarrow')
pandas, zarr, parquet = IfInstalled('pandas'), IfInstalled('zarr'), IfInstalled('pyarrow.parquet')
folders = IfInstalled('swin_dense.features.folder')  # which needs pyarrow

MAPS = {4: torch.randn(3, 10, 13), 8: torch.randn(6, 5, 7)}
SIZE = (37, 50)


def blocks_of(maps, tile):
    """Yield blocks of the maps as a tiled extraction does."""
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


def folder_of(root, file_format='safetensors', **options):
    return folders.FeatureFolder(root, MAPS, file_format=file_format, **options)


def save(folder, name, maps=MAPS, version='1-1'):
    with folder.receive(Item(name, version), SIZE) as sink:
        sink.write(whole_image(maps))


def assert_equal(maps, expected):
    assert sorted(maps) == sorted(expected)
    for stride, level in expected.items():
        assert maps[stride].dtype == level.dtype
        assert torch.equal(maps[stride], level)


class TestSinks:
    @pytest.mark.parametrize(
        ('file_format', 'dtype'),
        [
            in_format(file_format, dtype)
            for file_format in ('safetensors', 'zarr')
            for dtype in (torch.float32, torch.float16, torch.bfloat16)
            if (file_format, dtype) != ('zarr', torch.bfloat16)
        ],
    )
    @pytest.mark.parametrize('tile', [16, 64])
    def test_maps_written_in_tiles_are_read_back(self, tmp_path, file_format, dtype, tile):
        maps = {stride: level.to(dtype) for stride, level in MAPS.items()}
        path = tmp_path / f'x.{file_format}'
        sink, memory = map_sink(path, SIZE, {'image_size': SIZE}, (tile, tile)), MapSink(SIZE, in_memory)
        for blocks in blocks_of(maps, tile):
            sink.write(blocks)
            memory.write(blocks)
        assert_equal(memory.levels(), maps)
        found, size = load(path)
        assert_equal(found, maps)
        assert size == SIZE

    def test_chunks_have_the_size_of_a_tile(self, tmp_path):
        pytest.importorskip('zarr', '3')
        sink = map_sink(tmp_path / 'x.zarr', SIZE, {}, (16, 16))
        for blocks in blocks_of(MAPS, 16):
            sink.write(blocks)
        assert zarr.open_group(tmp_path / 'x.zarr')['4'].chunks == (3, 4, 4)


@pytest.mark.parametrize('file_format', EVERY_FORMAT)
class TestMaps:
    def test_file_contents_do_not_depend_on_the_time(self, tmp_path, file_format, monkeypatch):
        for name, clock in (('one', 1e9), ('two', 1.7e9)):
            monkeypatch.setattr('time.time', lambda clock=clock: clock)
            save(folder_of(tmp_path / name, file_format), '/x.jpg')
        assert tree(tmp_path / 'one') == tree(tmp_path / 'two')

    def test_a_failed_write_leaves_no_files(self, tmp_path, file_format):
        folder = folder_of(tmp_path, file_format)

        def write_half():
            with folder.receive(Item('x.tif', '1-1'), SIZE, (16, 16)) as sink:
                sink.write(next(blocks_of(MAPS, 16)))
                assert tree(tmp_path) != {}
                raise RuntimeError('in between')

        with pytest.raises(RuntimeError, match='in between'):
            write_half()
        assert tree(tmp_path) == {}

    @pytest.mark.parametrize('damage', ['empty', 'half', 'gone'])
    def test_damaged_maps_are_not_finished(self, tmp_path, file_format, damage):
        folder = folder_of(tmp_path, file_format)
        for image in ('a.jpg', 'b.jpg'):
            save(folder, image)
        path = folder.path_of('a.jpg')
        if file_format == 'zarr':  # damage the file of a chunk
            path = next(child for child in path.rglob('*') if child.is_file() and child.parent.name == '0')
        content = path.read_bytes()
        path.unlink()
        if damage != 'gone' and file_format != 'zarr':
            path.write_bytes(content[: len(content) // 2 if damage == 'half' else 0])
        assert not folder.is_finished('a.jpg', '1-1')
        assert folder.is_finished('b.jpg', '1-1')
        save(folder, 'a.jpg')
        assert folder.is_finished('a.jpg', '1-1')
        assert_equal(load(folder.path_of('a.jpg'))[0], MAPS)

    def test_a_map_file_without_a_row_gets_one_row(self, tmp_path, file_format):
        save(folder_of(tmp_path, file_format), 'a.jpg')  # does not write the row
        folder = folder_of(tmp_path, file_format)
        assert folder.is_finished('a.jpg', '1-1')
        folder.without_maps(Item('a.jpg', '1-1'), None)
        folder.close()
        again = folder_of(tmp_path, file_format)
        again.without_maps(Item('a.jpg', '1-1'), None)
        again.close()
        (row,) = rows_of(tmp_path).values()
        assert (row['path'], row['height'], row['width'], row['version']) == ('a.jpg', *SIZE, '1-1')
        assert load(tmp_path / row['file'])[1] == SIZE


def test_maps_of_a_later_format_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr('swin_dense.features.folder.FORMAT', FORMAT + 1)
    save(folder_of(tmp_path), 'a.jpg')
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r'safetensors has the format 2 of a later'):
        folder_of(tmp_path).is_finished('a.jpg', '1-1')


@pytest.mark.parametrize('pool', ['none', 'avg'])
def test_a_replaced_image_is_not_finished_and_a_deleted_one_is(tmp_path, pool):
    image = tmp_path / 'a.jpg'
    image.write_bytes(b'12')
    root, name = tmp_path / 'out', str(image)

    def finish():
        folder = folder_of(root, pool=pool)
        save(folder, name, version=version_of(name))
        folder.close()

    def is_finished():
        return folder_of(root, pool=pool).is_finished(name, version_of(name))

    finish()
    assert is_finished()
    os.utime(image, ns=(0, 10**18))
    assert not is_finished()
    finish()
    assert is_finished()
    image.write_bytes(b'123')
    os.utime(image, ns=(0, 10**18))
    assert not is_finished()
    image.unlink()
    assert is_finished()
    assert len(rows_of(root)) == 1


class TestParts:
    def test_pandas_reads_all_parts_as_one_table(self, tmp_path):
        folder = folder_of(tmp_path, pool='avg', rows_per_part=2, dtype=torch.float16)
        for index in range(5):
            save(folder, f'{index}.jpg')
        folder.without_maps(Item('x.jpg', None), 'it is\nbroken')
        folder.close()
        table = pandas.read_parquet(tmp_path)
        assert [len(parquet.read_table(path)) for path in sorted(tmp_path.glob('*.parquet'))] == [2, 2, 2]
        assert list(table.columns) == ['path', 'error', 'height', 'width', 'version', 'level_4', 'level_8']
        assert table['path'].tolist() == [*(f'{index}.jpg' for index in range(5)), 'x.jpg']
        assert table['level_8'][3].dtype == 'float16'
        torch.testing.assert_close(torch.tensor(table['level_8'][3]), MAPS[8].mean((1, 2)).half())
        assert table['error'][5] == 'it is\nbroken'
        assert table['level_8'][5] is None

    def test_a_new_row_replaces_the_previous_one(self, tmp_path):
        names = [f'{index}.jpg' for index in range(6)]
        for version in ('1-1', '2-2'):
            folder = folder_of(tmp_path, pool='avg', rows_per_part=4)
            for name in names:
                if version == '1-1' and name in names[1:3]:
                    folder.without_maps(Item(name, version), 'broken')
                elif not folder.is_finished(name, version if name in names[4:] else '1-1'):
                    save(folder, name, version=version)
            folder.close()
        found = {name: (row['version'], row['error']) for name, row in rows_of(tmp_path).items()}
        assert found == {name: ('2-2' if name in (*names[1:3], *names[4:]) else '1-1', None) for name in names}

    def test_parts_are_written_atomically(self, tmp_path, monkeypatch):
        folder = folder_of(tmp_path, pool='avg', rows_per_part=2)
        save(folder, 'a.jpg')
        with monkeypatch.context() as patch:
            patch.setattr(os, 'replace', lambda source, target: (_ for _ in ()).throw(OSError(28, 'No space left')))
            with pytest.raises(OSError, match='No space'):
                save(folder, 'b.jpg')
        assert tree(tmp_path) == {}
        folder.close()  # writes it, as os.replace works again
        assert finished_in(tmp_path) == {'a.jpg', 'b.jpg'}

    @pytest.mark.parametrize('length', [0, 10, 200])
    def test_a_damaged_part_is_named(self, tmp_path, length):
        folder = folder_of(tmp_path, pool='avg')
        save(folder, 'a.jpg')
        folder.close()
        (part,) = tmp_path.glob('*.parquet')
        part.write_bytes(part.read_bytes()[:length])
        with pytest.raises(ValueError, match=f'{part.name} is damaged .*remove it'):
            folder_of(tmp_path, pool='avg')

    def test_the_format_in_a_part(self, tmp_path):
        folder = folder_of(tmp_path, pool='avg', rows_per_part=2)
        for name in ('a.jpg', 'b.jpg'):
            save(folder, name)
        (part,) = tmp_path.glob('*.parquet')
        assert json.loads(parquet.read_schema(part).metadata[b'swin_dense']) == {'format': FORMAT}
        save(folder, 'a.jpg', version='2-2')  # removes its row from the first part, which is written anew
        folder.close()
        assert json.loads(parquet.read_schema(part).metadata[b'swin_dense']) == {'format': FORMAT}
        table = parquet.read_table(part)
        parquet.write_table(table.replace_schema_metadata(None), part)  # as before the format was written
        assert not folder_of(tmp_path, pool='avg').is_finished('b.jpg', '2-2')
        assert folder_of(tmp_path, pool='avg').is_finished('b.jpg', '1-1')
        later = json.dumps({'format': FORMAT + 1})
        parquet.write_table(table.replace_schema_metadata({'swin_dense': later}), part)
        with pytest.raises(ValueError, match=rf'{part.name} has the format 2 '):
            folder_of(tmp_path, pool='avg')


def test_any_image_name_has_a_file_of_its_own(tmp_path):
    folder = folder_of(tmp_path)
    images = [
        '/a/x.jpg',
        '/b/x.jpg',
        '/x.jpg',
        '/x.png',
        '/X.jpg',
        '/ü 图 🙂.jpg',
        '/' + 'ü' * 120 + '.jpg',
        '/' + 'a' * 240,
    ]
    images += ['s3://bucket/x.jpg', '/x.tar/x.jpg', os.fsdecode(b'/not utf-8 \xff.jpg')]
    for image in images:
        save(folder, image)
    folder.close()
    assert len({folder.path_of(image) for image in images}) == len(images)
    rows = rows_of(tmp_path)
    assert list(rows) == [*images[:-1], r'/not utf-8 \xff.jpg']
    assert all((tmp_path / row['file']).is_file() for row in rows.values())
    assert folder_of(tmp_path).is_finished(images[-1], '1-1')


@pytest.mark.parametrize('file_format', EVERY_FORMAT)
def test_pruning_removes_only_images_of_its_shard(tmp_path, file_format):
    names = [f'/{index}.jpg' for index in range(8)] + ['/a.tar/1.jpg', '/b.tar/1.jpg']
    folders = [folder_of(tmp_path, file_format, shard=Shard(index, 2)) for index in range(2)]
    shards = [[name for name in names if Shard(i, 2).owns(Path(folders[0].path_of(name)).stem[-16:])] for i in range(2)]
    for folder, share in zip(folders, shards, strict=True):
        for name in share:
            save(folder, name)
        folder.close()
    kept = ['/0.jpg', '/a.tar']
    gone = [name for name in shards[0] if name not in ('/0.jpg', '/a.tar/1.jpg')]
    assert folder_of(tmp_path, file_format, shard=Shard(0, 2)).prune(kept) == len(gone) > 0
    assert finished_in(tmp_path) == {*names} - {*gone}
    assert len(list(tmp_path.glob('features/*/*'))) == len(names) - len(gone)


def test_partial_files_of_a_killed_run_are_removed(tmp_path):
    folder_of(tmp_path, shard=Shard(0, 2))
    for shard in range(2):
        (tmp_path / f'.partial-0000{shard}-of-00002' / 'x.zarr').mkdir(parents=True, exist_ok=True)
    folder_of(tmp_path, shard=Shard(0, 2)).close()
    assert [path.name for path in tmp_path.iterdir()] == ['.partial-00001-of-00002']
    shutil.rmtree(tmp_path / '.partial-00001-of-00002')


def test_rows_of_failed_images_hold_the_error(tmp_path):
    folder = folder_of(tmp_path)
    folder.without_maps(Item('/b, "c".jpg', '1-1'), 'it is\nbroken')
    folder.without_maps(Item(os.fsdecode(b'/\xff.jpg'), None), os.fsdecode(b'\xff is missing'))
    folder.close()
    assert failures_in(tmp_path) == ['\\xff.jpg', 'b, "c".jpg']
    assert rows_of(tmp_path)['/\\xff.jpg']['error'] == '\\xff is missing'
    assert not folder_of(tmp_path).is_finished('/b, "c".jpg', '1-1')  # the next run tries it again


def test_metadata_of_a_map_file_is_json(tmp_path):
    folder = folder_of(tmp_path)
    save(folder, 'a.jpg')
    header = folder.path_of('a.jpg').read_bytes()
    length = int.from_bytes(header[:8], 'little')
    assert json.loads(header[8 : 8 + length])['__metadata__'] == {
        'format': '1',
        'image_size': '[37, 50]',
        'version': '"1-1"',
    }
