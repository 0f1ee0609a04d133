"""Sources of images: folders, lists, patterns and tar files, on a disk, on a server and in object storage."""

import io
import os
import tarfile
from pathlib import Path

import pytest
import torch

from swin_dense.features.images import read_image
from swin_dense.features.listing import iterate, list_images, tar_of, version_of
from swin_dense.features.regions import open_large_image
from swin_dense.utils.addresses import read_bytes
from tests.conftest import IfInstalled
from tests.features.helpers import make_images

fsspec = IfInstalled('fsspec')


def write_tar(path, files, **options):
    """Write a tar file from (name, content) pairs, in order."""
    with tarfile.open(path, 'w', **options) as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 1234
            archive.addfile(member, io.BytesIO(content))
    return path


def test_sources(tmp_path):
    paths = make_images(tmp_path / 'photos', 4)
    photos = str(tmp_path / 'photos')
    everything = sorted([*map(str, paths), f'{photos}/empty.jpg', f'{photos}/text.png'])
    (tmp_path / 'photos' / 'notes.md').write_text('not an image')
    assert sorted(list_images([photos])) == everything
    assert list_images([photos]) == list_images([photos, paths[0], photos])
    assert sorted(list_images([f'{photos}/**/*.png'])) == [path for path in everything if path.endswith('.png')]
    (tmp_path / 'list.txt').write_text(f'{paths[1]}\n\n{tmp_path}/missing.jpg\ns3://bucket/a.jpg\n')
    assert list(list_images([tmp_path / 'list.txt'])) == [str(paths[1]), f'{tmp_path}/missing.jpg', 's3://bucket/a.jpg']
    with pytest.raises(FileNotFoundError, match='pattern'):
        list_images([f'{photos}/*.gif'])


@pytest.mark.parametrize('encoding', ['utf-8-sig', 'utf-16', 'utf-16-le'])
def test_lists_as_windows_writes_them(tmp_path, encoding):
    names = [str(tmp_path / 'ein Bild ü.jpg'), str(tmp_path / 'b.jpg')]
    mark = '\ufeff' if encoding == 'utf-16-le' else ''
    (tmp_path / 'list.txt').write_bytes((mark + '\r\n'.join(names)).encode(encoding))
    assert list(list_images([tmp_path / 'list.txt'])) == names


def test_names_are_absolute(tmp_path, monkeypatch):
    make_images(tmp_path / 'photos', 2, broken=False)
    monkeypatch.chdir(tmp_path)
    assert list_images(['photos']) == list_images([tmp_path / 'photos'])


def test_skipped_files_are_reported_with_a_reason(tmp_path):
    make_images(tmp_path / 'photos', 3, broken=False)
    for name in ('notes.md', 'no-suffix', 'new.avif'):
        (tmp_path / 'photos' / name).write_text('x')
    skipped = {}
    found = list_images([tmp_path / 'photos'], skipped)
    assert {Path(path).name: reason for path, reason in skipped.items()} == {
        'notes.md': None,
        'no-suffix': None,
    }
    assert len(found) == 4


def test_links_to_folders_are_followed_once(tmp_path):
    paths = make_images(tmp_path / 'elsewhere', 3, broken=False)
    (tmp_path / 'photos').mkdir()
    (tmp_path / 'photos' / 'link').symlink_to(tmp_path / 'elsewhere')
    (tmp_path / 'elsewhere' / 'circle').symlink_to(tmp_path / 'photos')
    found = list_images([tmp_path / 'photos'])
    assert sorted(map(os.path.realpath, found)) == sorted(map(str, paths))


class TestTar:
    @pytest.fixture
    def contents(self, tmp_path):
        return {f'part/{i}.png': path.read_bytes() for i, path in enumerate(make_images(tmp_path, 3, broken=False))}

    def test_one_image_per_member(self, tmp_path, contents):
        others = [('0.json', b'{}'), ('0.cls', b'3')]
        tar = write_tar(tmp_path / 'shard 0.tar', [*contents.items(), *others])
        assert str(tar) in list_images([tmp_path])
        items = list(iterate([(str(tar), None)]))
        assert len(items) == 3
        assert {item.name: (item.version, item.source.read()) for item in items} == {
            f'{tar}/{name}': (f'{len(content)}-1234', content) for name, content in contents.items()
        }
        assert {tar_of(item.name) for item in items} == {str(tar)}
        assert tar_of('/x.tarball/a.png') is tar_of('/a.tar') is None

    def test_the_last_of_several_members_with_one_name_counts(self, tmp_path, contents):
        tar = write_tar(tmp_path / 'a.tar', [*((name, b'an older version') for name in contents), *contents.items()])
        with tarfile.open(tar) as archive:
            archive.extractall(tmp_path / 'extracted', filter='data')
        for item in iterate([(str(tar), None)]):
            assert item.source.read() == (tmp_path / 'extracted' / item.name.removeprefix(f'{tar}/')).read_bytes()

    def test_unwanted_members_are_not_read(self, tmp_path, contents):
        tar = write_tar(tmp_path / 'a.tar', contents.items())
        queried = []
        items = iterate([(str(tar), None)], lambda name, version: queried.append((name, version)) or '1' in name[-5:])
        assert [item.source is not None for item in items] == [False, True, False]
        assert queried == [(f'{tar}/{name}', f'{len(content)}-1234') for name, content in contents.items()]

    def test_a_damaged_member_is_named(self, tmp_path, contents):
        tar = write_tar(tmp_path / 'a.tar', [('b.png', b'damaged'), *contents.items()])
        item = next(iterate([(str(tar), None)]))
        with pytest.raises(ValueError, match=r'a\.tar/b\.png'):
            read_image(item.source)

    @pytest.mark.parametrize('damage', ['cut off', 'no tar', 'empty', 'missing'])
    def test_a_damaged_tar_file_is_named_after_its_readable_members(self, tmp_path, contents, damage):
        tar = write_tar(tmp_path / 'a.tar', contents.items())
        content = {'cut off': tar.read_bytes()[:3000], 'no tar': b'no tar' * 1000, 'empty': b'', 'missing': None}[
            damage
        ]
        tar.unlink()
        if content is not None:
            tar.write_bytes(content)
        *_, last = iterate([(str(tar), None)])
        assert last.name == str(tar)
        assert f'{tar}' in last.error


class TestAddresses:
    """Addresses, tested with the in-memory file system of fsspec."""

    @pytest.fixture
    def bucket(self, tmp_path):
        paths = make_images(tmp_path, 4, broken=False)
        system = fsspec.filesystem('memory')
        system.store.clear()  # the whole process shares it
        for index, path in enumerate(paths):
            system.pipe_file(f'/bucket/photos/{index}.png', path.read_bytes())
        system.pipe_file('/bucket/photos/notes.md', b'x')
        write_tar(tmp_path / 'a.tar', [('in.png', paths[0].read_bytes())])
        system.pipe_file('/bucket/a.tar', (tmp_path / 'a.tar').read_bytes())
        system.pipe_file('/bucket/list.txt', b'memory://bucket/photos/3.png\n')
        yield paths
        system.rm('/bucket', recursive=True)

    def test_listed(self, bucket):
        photos = [f'memory:///bucket/photos/{index}.png' for index in range(4)]
        skipped = {}
        assert list(list_images(['memory://bucket'], skipped)) == ['memory:///bucket/a.tar', *photos]
        assert list(skipped) == ['/bucket/list.txt', '/bucket/photos/notes.md']
        assert list(list_images(['memory://bucket/photos/[12].png'])) == photos[1:3]
        assert list(list_images(['memory://bucket/photos/2.png'])) == ['memory://bucket/photos/2.png']
        assert list(list_images(['memory://bucket/list.txt'])) == ['memory://bucket/photos/3.png']
        with pytest.raises(FileNotFoundError, match='memory://bucket/none'):
            list_images(['memory://bucket/none'])

    def test_read(self, bucket):
        for index, path in enumerate(bucket):
            address = f'memory://bucket/photos/{index}.png'
            assert torch.equal(read_image(address), read_image(path))
            with open_large_image(address) as image:
                assert image.size == read_image(path).shape[1:]
        (item,) = iterate([('memory://bucket/a.tar', None)])
        assert torch.equal(read_image(item.source), read_image(bucket[0]))
        with pytest.raises(FileNotFoundError, match=r'memory://bucket/9\.png'):
            read_image('memory://bucket/9.png')

    def test_versions_in_a_listing_equal_version_of(self, bucket):
        for name, version in list_images(['memory://bucket/photos']).items():
            assert version == version_of(name)
            fsspec.filesystem('memory').pipe_file(name, read_bytes(name))
            assert version != version_of(name)
        assert version_of('memory://bucket/none.png') is None

    def test_a_missing_package_is_named(self):
        pytest.importorskip('fsspec')
        with pytest.raises(ImportError, match=r'hdfs|adlfs|gcsfs|s3fs|paramiko'):
            read_bytes('sftp://host/a.png')
