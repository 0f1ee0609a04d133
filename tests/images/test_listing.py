"""Sources of images: folders, lists and patterns."""

import os

import pytest

from swin_dense.images.listing import list_images
from tests.features.helpers import make_images


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
    (tmp_path / 'list.txt').write_text(f'{paths[1]}\n\n{tmp_path}/missing.jpg\n')
    assert list(list_images(['list.txt'])) == [str(paths[1]), f'{tmp_path}/missing.jpg']
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
