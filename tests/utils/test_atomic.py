"""Atomic writes leave the complete new content at the destination, or the old one."""

import multiprocessing
import os
import signal

import pytest

from swin_dense.utils.atomic import written_whole


def test_the_destination_appears_when_the_block_ends(tmp_path):
    with written_whole(tmp_path / 'my file.x') as unfinished:
        unfinished.write_text('new')
        assert not (tmp_path / 'my file.x').exists()
    assert [path.name for path in tmp_path.iterdir()] == ['my file.x']
    assert (tmp_path / 'my file.x').read_text() == 'new'


@pytest.mark.parametrize('error', [OSError, KeyboardInterrupt])
def test_a_failure_keeps_the_old_file(tmp_path, error):
    (tmp_path / 'x').write_text('old')

    def write_half():
        with written_whole(tmp_path / 'x') as unfinished:
            unfinished.write_text('half')
            raise error

    with pytest.raises(error):
        write_half()
    assert [path.name for path in tmp_path.iterdir()] == ['x']
    assert (tmp_path / 'x').read_text() == 'old'


def test_a_killed_process_keeps_the_old_file(tmp_path):
    (tmp_path / 'x').write_text('old')

    def be_killed():
        with written_whole(tmp_path / 'x') as unfinished:
            unfinished.write_text('half')
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context('fork').Process(target=be_killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / 'x').read_text() == 'old'


def test_content_is_flushed_before_the_rename(tmp_path, monkeypatch):
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
    with written_whole(tmp_path / 'x') as unfinished:
        unfinished.write_text('new')
        content = unfinished.stat().st_ino
    assert events == [content, 'rename', tmp_path.stat().st_ino]
