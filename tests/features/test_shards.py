"""Each image belongs to exactly one shard, independent of the rest of the list; shards record settings and lists."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swin_dense.features.shards import (
    ALL,
    FORMAT,
    Record,
    Shard,
    hash_of_name,
    parse_shard,
    shard_of_environment,
)


@given(st.lists(st.text(st.characters(exclude_categories=['Cs'])), unique=True), st.integers(1, 9))
def test_every_image_belongs_to_exactly_one_shard(names, count):
    shards = [Shard(index, count) for index in range(count)]
    assert all(sum(shard.owns(hash_of_name(name)) for shard in shards) == 1 for name in names)


@pytest.mark.parametrize('text', ['8/8', '-1/8', '1', '1/', '/8', '1.0/8', 'a/b', '0/0', '1/2/3'])
def test_parse_shard(text):
    with pytest.raises(ValueError, match=r'--shard must be I/N'):
        parse_shard(text)
    assert parse_shard('3/8') == Shard(3, 8)


def slurm(task, first, last, count):
    names = {'ID': task, 'MIN': first, 'MAX': last, 'COUNT': count}
    return {f'SLURM_ARRAY_TASK_{name}': str(value) for name, value in names.items()}


@pytest.mark.parametrize(
    ('environment', 'shard', 'variables'),
    [
        ({}, ALL, ''),
        ({'RANK': '3', 'WORLD_SIZE': '8'}, Shard(3, 8), 'RANK'),
        ({'RANK': '0', 'WORLD_SIZE': '1'}, ALL, ''),
        (slurm(0, 0, 7, 8), Shard(0, 8), 'SLURM_ARRAY_TASK_ID'),
        (slurm(9, 1, 17, 9), Shard(4, 9), 'SLURM_ARRAY_TASK_ID'),  # --array=1-17:2
        (slurm(5, 5, 5, 1), ALL, 'SLURM_ARRAY_TASK_ID'),
        ({**slurm(2, 1, 3, 3), 'RANK': '1', 'WORLD_SIZE': '2'}, Shard(3, 6), 'RANK and SLURM_ARRAY_TASK_ID'),
    ],
)
def test_shards_of_torchrun_and_slurm(environment, shard, variables):
    assert shard_of_environment(environment) == (shard, variables)


def test_a_slurm_array_with_gaps_is_refused():
    with pytest.raises(ValueError, match=r'give --shard \$SLURM_ARRAY_TASK_ID/N'):
        shard_of_environment(slurm(3, 3, 8, 3))


def record(folder, shard=ALL, settings=None, names=('a.jpg', 'b.jpg')):
    return Record(folder, shard, settings or {'arch': 'swin_t', 'levels': (4, 8)}, names)


def begin(*arguments, **options):
    with record(*arguments, **options).writing():
        pass


def test_settings(tmp_path):
    begin(tmp_path)
    begin(tmp_path)
    before = (tmp_path / '_shard-00000-of-00001.json').read_bytes()
    with pytest.raises(ValueError, match="arch 'swin_t' there, 'swin_s' now"):
        begin(tmp_path, settings={'arch': 'swin_s', 'levels': (4, 8)})
    assert (tmp_path / '_shard-00000-of-00001.json').read_bytes() == before


def test_settings_and_number_of_shards_must_match_other_shards(tmp_path):
    begin(tmp_path, Shard(0, 2))
    begin(tmp_path, Shard(1, 2))
    with pytest.raises(ValueError, match="arch 'swin_t' there, 'swin_s' now"):
        begin(tmp_path, Shard(1, 2), {'arch': 'swin_s', 'levels': (4, 8)})
    with pytest.raises(ValueError, match=r'see _shard-00000-of-00002\.json'):
        begin(tmp_path)


@pytest.mark.parametrize('content', ['', '{"arch": ', '[]x', '["arch"]', '3', '{}', '{"settings": 3}'])
def test_a_damaged_record(tmp_path, content):
    (tmp_path / '_shard-00001-of-00002.json').write_text(content)
    with pytest.raises(ValueError, match=r'00002\.json is damaged .*another folder'):
        begin(tmp_path, Shard(0, 2))


def test_a_folder_of_an_older_version(tmp_path):
    (tmp_path / 'settings.json').write_text(json.dumps({'arch': 'swin_t'}))
    with pytest.raises(ValueError, match=r'older version.*choose another folder'):
        begin(tmp_path)


@pytest.mark.parametrize(
    ('written', 'message'),
    [
        (FORMAT + 1, 'the format 2 of .*: update swin_dense'),
        ('one', r"damaged: its format must .*, got 'one'"),
    ],
)
def test_a_folder_of_another_format(tmp_path, written, message):
    begin(tmp_path, Shard(1, 2))
    path = tmp_path / '_shard-00001-of-00002.json'
    content = json.loads(path.read_text())
    assert content.pop('format') == FORMAT
    path.write_text(json.dumps(content))
    begin(tmp_path, Shard(0, 2))  # records of the first format may lack it
    path.write_text(json.dumps({**content, 'format': written}))
    with pytest.raises(ValueError, match=message):
        begin(tmp_path, Shard(0, 2))


def test_only_one_process_at_a_time_locks_a_shard(tmp_path):
    with (
        record(tmp_path, Shard(0, 2)).writing(),
        record(tmp_path, Shard(1, 2)).writing(),
        pytest.raises(ValueError, match='another extraction is writing shard 0/2'),
        record(tmp_path, Shard(0, 2)).writing(),
    ):
        pass
    with record(tmp_path, Shard(0, 2)).writing():
        pass
