"""Sources of images: folders, lists, patterns and addresses."""

import os

import pytest
import torch

from swin_dense.images.listing import list_images
from swin_dense.images.reading import read_image
from swin_dense.images.regions import open_large_image
from swin_dense.utils.addresses import read_bytes
from tests.conftest import IfInstalled
from tests.features.helpers import make_images

fsspec = IfInstalled('fsspec')


def test_sources(tmp_path, monkeypatch):
    paths = make_images(tmp_path / 'photos', 4)
    photos = str(tmp_path / 'photos')
    pngs = [f'{photos}/text.png', *map(str, paths)]
    everything = sorted([f'{photos}/empty.jpg', f'{photos}/new.avif', *pngs])
    for name in ('notes.md', 'no-suffix', 'new.avif'):
        (tmp_path / 'photos' / name).write_text('x')
    skipped = {}
    found = list_images([photos], skipped)
    assert sorted(found) == everything
    assert skipped == {f'{photos}/notes.md': None, f'{photos}/no-suffix': None}
    assert list_images([photos, paths[0], photos]) == found
    assert sorted(list_images([f'{photos}/**/*.png'])) == sorted(pngs)
    monkeypatch.chdir(tmp_path)
    assert list_images(['photos']) == found  # absolute paths
    (tmp_path / 'list.txt').write_text(f'{paths[1]}\n\n{tmp_path}/missing.jpg\ns3://bucket/a.jpg\n')
    assert list(list_images(['list.txt'])) == [str(paths[1]), f'{tmp_path}/missing.jpg', 's3://bucket/a.jpg']
    with pytest.raises(FileNotFoundError, match='pattern'):
        list_images([f'{photos}/*.gif'])


@pytest.mark.parametrize('encoding', ['utf-8-sig', 'utf-16', 'utf-16-le'])
def test_lists_as_windows_writes_them(tmp_path, encoding):
    names = [str(tmp_path / 'ein Bild ü.jpg'), str(tmp_path / 'b.jpg')]
    mark = '\ufeff' if encoding == 'utf-16-le' else ''
    (tmp_path / 'list.txt').write_bytes((mark + '\r\n'.join(names)).encode(encoding))
    assert list(list_images([tmp_path / 'list.txt'])) == names


def test_links_to_folders_are_followed_once(tmp_path):
    paths = make_images(tmp_path / 'elsewhere', 3, broken=False)
    (tmp_path / 'photos').mkdir()
    (tmp_path / 'photos' / 'link').symlink_to(tmp_path / 'elsewhere')
    (tmp_path / 'elsewhere' / 'circle').symlink_to(tmp_path / 'photos')
    found = list_images([tmp_path / 'photos'])
    assert sorted(map(os.path.realpath, found)) == sorted(map(str, paths))


class TestAddresses:
    """Addresses, tested with the in-memory file system of fsspec."""

    @pytest.fixture
    def bucket(self, tmp_path):
        paths = make_images(tmp_path, 4, broken=False)
        system = fsspec.filesystem('memory')
        system.store.clear()  # the whole process shares it
        for index, path in enumerate(paths):
            system.pipe_file(f'/bucket/photos/{index}.png', path.read_bytes())
        system.pipe_file('/bucket/list.txt', b'memory://bucket/photos/3.png\n')
        yield paths
        system.rm('/bucket', recursive=True)

    def test_read(self, bucket):
        assert list_images(['memory://bucket/list.txt']) == ['memory://bucket/photos/3.png']
        for index, path in enumerate(bucket):
            address = f'memory://bucket/photos/{index}.png'
            assert torch.equal(read_image(address), read_image(path))
            with open_large_image(address) as image:
                assert image.size == read_image(path).shape[1:]
        with pytest.raises(FileNotFoundError, match=r'memory://bucket/9\.png'):
            read_image('memory://bucket/9.png')

    def test_a_missing_package_is_named(self):
        pytest.importorskip('fsspec')
        with pytest.raises(ImportError, match=r'hdfs|adlfs|gcsfs|s3fs|paramiko'):
            read_bytes('sftp://host/a.png')
