"""Files that `swin-dense config` writes beside a config: readable copies of annotations, and splits by group."""

import json
import unicodedata

import pytest
from pycocotools.coco import COCO

from tests.workbench.configs.data import SPLITS, TRAIN, VAL, check_data, dataset_of

NAME = 'Gr\u00fcn_\uac00.jpg'


def in_encoding(encoding):
    def save(root):
        for file in (TRAIN, VAL):
            (root / file).write_bytes((root / file).read_text().encode(encoding))

    return save


def change(file, function):
    content = json.loads(file.read_text())
    function(content)
    file.write_text(json.dumps(content))


def no_annotations(root):
    change(root / VAL, lambda content: content.update(annotations=None))


def from_zero(root):
    for file in (TRAIN, VAL):
        change(root / file, lambda content: [one.update(id=one['id'] - 1) for one in content['annotations']])


def decomposed(root):
    """Name an image as a Mac packs it, and in the annotations as everybody types it."""
    for split, file in (('train2017', TRAIN), ('val2017', VAL)):
        (root / split / '1.jpg').rename(root / split / unicodedata.normalize('NFD', NAME))
        change(root / file, lambda content: content['images'][1].update(file_name=unicodedata.normalize('NFC', NAME)))


@pytest.mark.parametrize(
    ('damage', 'said', 'copied'),
    [
        (in_encoding('utf-8-sig'), 'without a byte order mark instead of utf-8-sig', SPLITS),
        (in_encoding('utf-16'), 'without a byte order mark instead of utf-16', SPLITS),
        (no_annotations, 'an empty list of annotations instead of null', ('val', 'test')),
        (from_zero, 'annotations numbered from 1', ('val', 'test')),
        (decomposed, 'names of files in the Unicode form that they have on the disk (1)', SPLITS),
    ],
)
def test_a_readable_copy_is_written_beside_the_config(fruit, capsys, damage, said, copied):
    """mmdet reads the copy, which contains all images and objects; a config without it is refused."""
    damage(fruit.root)
    only_writes = [f'{split}_evaluator.format_only=True' for split in ('val', 'test')]  # there is nothing to evaluate
    config = fruit.write(*(['--set', *only_writes] if damage is no_annotations else []))
    shown = capsys.readouterr().err
    assert shown.count(said) == len({*copied} - {'test'})
    files = {split: fruit.beside / f'mine.{"train" if split == "train" else "val"}.json' for split in copied}
    for split in SPLITS:
        entry, evaluator = config[f'{split}_dataloader'].dataset, config.get(f'{split}_evaluator')
        assert (entry.ann_file == str(files.get(split))) == (split in copied)
        if evaluator and split in copied:
            assert evaluator.ann_file == str(files[split])
        built = dataset_of(config, split, pipeline=[])
        objects = [one for index in range(len(built)) for one in built.get_data_info(index)['instances']]
        assert len(built) == 4
        assert len(objects) == (0 if damage is no_annotations and split != 'train' else 4)
    assert 0 not in COCO(config.val_evaluator.ann_file).anns
    for split in copied:
        config[f'{split}_dataloader'].dataset.ann_file = str(fruit.root / (TRAIN if split == 'train' else VAL))
    config.val_evaluator.ann_file = str(fruit.root / VAL)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        check_data(config, ('train', 'val'))
    if damage is not from_zero:
        assert 'swin-dense config' in str(caught.value) or 'another Unicode form' in str(caught.value)


@pytest.mark.parametrize(
    ('pattern', 'message'),
    [('(', 'must be a regular expression'), (r'x\d', 'but 10 of 10 have no match, such as 0_0.jpg')],
)
def test_patterns_of_groups_that_cannot_be_used(ten_fruits, pattern, message):
    group(ten_fruits)
    assert message in ten_fruits.refused('--val-share', '0.2', '--val-group', pattern)
    assert not (ten_fruits.beside / 'mine.train.json').exists()


def group(data):
    """Name ten images as the frames of four videos, in one folder with one file of annotations."""
    (data.root / VAL).unlink()
    (data.root / TRAIN).rename(data.root / 'all.json')

    def rename(content):
        for image in content['images']:
            index = int(image['file_name'].partition('.')[0])
            name = f'{index % 4}_{index // 4}.jpg'
            (data.root / 'train2017' / image['file_name']).rename(data.root / 'train2017' / name)
            image['file_name'] = name

    change(data.root / 'all.json', rename)


@pytest.mark.parametrize('pattern', [r'^\d', r'(\d)_\d\.jpg'])
def test_images_of_a_group_are_in_one_part(ten_fruits, pattern):
    group(ten_fruits)
    ten_fruits.write('--val-share', '0.2', '--val-group', pattern)
    parts = []
    for part in ('train', 'val'):
        content = json.loads((ten_fruits.beside / f'mine.{part}.json').read_text())
        parts.append({image['file_name'] for image in content['images']})
    train, val = parts
    assert len(train | val) == 10
    assert not {name[0] for name in train} & {name[0] for name in val}
    assert val


def test_a_file_with_two_ids_is_in_one_part(ten_fruits):
    """Of frames of two videos that an export wrote into one folder, under the same names."""
    (ten_fruits.root / VAL).unlink()
    (ten_fruits.root / TRAIN).rename(ten_fruits.root / 'all.json')
    change(
        ten_fruits.root / 'all.json',
        lambda content: [image.update(file_name=f'{image["id"] % 5}.jpg') for image in content['images']],
    )
    from swin_dense.workbench.configs.beside import split_annotations

    texts = split_annotations(ten_fruits.root / 'all.json', '', 0.3, None, ten_fruits.beside / 'mine.py')
    train, val = ({image['file_name'] for image in json.loads(text)['images']} for text in texts.values())
    assert not train & val
    assert len(train | val) == 5
