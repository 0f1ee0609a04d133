"""Sources of images: folders, lists and patterns."""

import os
from pathlib import Path

import pytest

from swin_dense.images.listing import list_images
from tests.features.helpers import make_images


def test_sources(tmp_path):
    paths = make_images(tmp_path / 'photos', 4)
    photos = str(tmp_path / 'photos')
    everything = sorted([*map(str, paths), f'{photos}/empty.jpg', f'{photos}/text.png'])
    (tmp_path / 'photos' / 'notes.md').write_text('not an image')
    assert sorted(list_images([photos])) == everything
    assert list_images([photos]) == list_images([photos, paths[0], photos])
    assert sorted(list_images([f'{photos}/**/*.png'])) == [path for path in everything if path.endswith('.png')]
    (tmp_path / 'list.txt').write_text(f'{paths[1]}\n\n{tmp_path}/missing.jpg\n')
    assert list(list_images([tmp_path / 'list.txt'])) == [str(paths[1]), f'{tmp_path}/missing.jpg']
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
