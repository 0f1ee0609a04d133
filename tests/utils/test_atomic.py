"""Atomic writes leave the complete new content at the destination, or the old one."""

import multiprocessing
import os
import signal

import pytest

from swin_dense.utils.atomic import written_whole


def write(path, text, is_folder):
    if is_folder:
        (path / 'chunks').mkdir(parents=True)
        path = path / 'chunks' / '0'
    path.write_text(text)


@pytest.mark.parametrize('is_folder', [False, True])
def test_the_destination_appears_when_the_block_ends(tmp_path, is_folder):
    with written_whole(tmp_path / 'my file.x') as unfinished:
        write(unfinished.path, 'new', is_folder)
        assert not (tmp_path / 'my file.x').exists()
    assert [path.name for path in tmp_path.iterdir()] == ['my file.x']
    assert (tmp_path / 'my file.x' / ('chunks/0' if is_folder else '')).read_text() == 'new'


def test_the_destination_and_the_temporary_folder_can_be_chosen(tmp_path):
    (tmp_path / 'partial').mkdir()
    with written_whole(tmp_path / 'a', tmp_path / 'partial') as unfinished:
        unfinished.path.write_text('new')
        assert unfinished.path.parent == tmp_path / 'partial'
        unfinished.destination = tmp_path / 'b'
    assert sorted(path.name for path in tmp_path.rglob('*')) == ['b', 'partial']


@pytest.mark.parametrize('is_folder', [False, True])
@pytest.mark.parametrize('error', [OSError, KeyboardInterrupt])
def test_a_failure_keeps_the_old_file(tmp_path, is_folder, error):
    (tmp_path / 'x').write_text('old')

    def write_half():
        with written_whole(tmp_path / 'x') as unfinished:
            write(unfinished.path, 'half', is_folder)
            raise error

    with pytest.raises(error):
        write_half()
    assert [path.name for path in tmp_path.iterdir()] == ['x']
    assert (tmp_path / 'x').read_text() == 'old'


def test_a_killed_process_keeps_the_old_file(tmp_path):
    (tmp_path / 'x').write_text('old')

    def be_killed():
        with written_whole(tmp_path / 'x') as unfinished:
            unfinished.path.write_text('half')
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context('fork').Process(target=be_killed)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert (tmp_path / 'x').read_text() == 'old'


@pytest.mark.parametrize('is_folder', [False, True])
def test_content_is_flushed_before_the_rename(tmp_path, monkeypatch, is_folder):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, 'fsync', lambda fd: (events.append(os.fstat(fd).st_ino), fsync(fd)))
    monkeypatch.setattr(os, 'replace', lambda *paths: (events.append('replace'), replace(*paths)))
    with written_whole(tmp_path / 'x') as unfinished:
        write(unfinished.path, 'new', is_folder)
        content = [path.stat().st_ino for path in (unfinished.path, *unfinished.path.rglob('*'))]
    before, after = events[: events.index('replace')], events[events.index('replace') + 1 :]
    assert sorted(before) == sorted(content)
    assert after == [tmp_path.stat().st_ino]
