"""Atomic writes leave the complete new content at the destination, or the old one."""

import os

import pytest

from swin_dense.utils.atomic import atomic_path


def test_the_destination_appears_when_the_block_ends_and_its_content_is_flushed(tmp_path, monkeypatch):
    with atomic_path(tmp_path / 'my file.x') as unfinished:
        unfinished.write_text('new')
        assert not (tmp_path / 'my file.x').exists()
    assert [path.name for path in tmp_path.iterdir()] == ['my file.x']
    assert (tmp_path / 'my file.x').read_text() == 'new'
    events = []
    fsync, replace = os.fsync, os.replace

    def flush(descriptor):
        events.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def rename(*paths):
        events.append('rename')
        replace(*paths)

    monkeypatch.setattr(os, 'fsync', flush)
    monkeypatch.setattr(os, 'replace', rename)
    with atomic_path(tmp_path / 'x') as unfinished:
        unfinished.write_text('new')
        content = unfinished.stat().st_ino
    assert events == [content, 'rename', tmp_path.stat().st_ino]


@pytest.mark.parametrize('error', [OSError, KeyboardInterrupt])
def test_a_failure_keeps_the_old_file(tmp_path, error):
    (tmp_path / 'x').write_text('old')

    def write_half():
        with atomic_path(tmp_path / 'x') as unfinished:
            unfinished.write_text('half')
            raise error

    with pytest.raises(error):
        write_half()
    assert [path.name for path in tmp_path.iterdir()] == ['x']
    assert (tmp_path / 'x').read_text() == 'old'
