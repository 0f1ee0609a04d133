"""What is known about data before training, by `swin-dense config` and by the look of `train`: one error or one note.

The data are in the layouts, and with the oddities, of the tools that people annotate with.
"""

import copy
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from pycocotools.mask import encode

from swin_dense.commands._main import main
from swin_dense.workbench.configs.checking import check_data
from tests.workbench.configs.data import (
    CLASSES,
    DETECTOR,
    SEGMENTOR,
    SIDE,
    fruit,
    make_masks,
    mask_values,
    written,
)

BOXES = 'retinanet_swin-t-p4-w7_fpn_1x_coco'
TRAIN, VAL = 'annotations/instances_train2017.json', 'annotations/instances_val2017.json'


def change(root, function, *files):
    """Change the content of annotation files."""
    for file in files or (TRAIN, VAL):
        content = json.loads((root / file).read_text())
        function(content)
        (root / file).write_text(json.dumps(content))


def each(function):
    """Return a function that changes every annotation."""
    return lambda content: [function(annotation) for annotation in content['annotations']]


def first(**values):
    return lambda content: content['annotations'][0].update(values)


def drop(key, kind='annotations'):
    return lambda content: content[kind][1].pop(key)


def roboflow(content):
    """Add the category of the project, of whose name there is a class too."""
    content['categories'].insert(0, {'id': 0, 'name': 'apple', 'supercategory': 'none'})


def text_ids(content):
    for annotation in content['annotations']:
        annotation['image_id'] = str(annotation['image_id'])


def corners(annotation):
    _, _, width, height = annotation['bbox']
    annotation['bbox'] = [30, 30, 30 + width, 30 + height]


def normalised(annotation):
    annotation['bbox'] = [part / SIDE for part in annotation['bbox']]


def polygons(change_one):
    """Return a function that changes every coordinate of the first polygon of every annotation."""
    return each(lambda one: one.update(segmentation=[[change_one(number) for number in one['segmentation'][0]]]))


def rle(mask, side):
    """Return the RLE of a mask, as the text of pycocotools, for an image of another side."""
    encoded = encode(np.asfortranarray(mask.astype(np.uint8)))
    return {'size': [side, side], 'counts': encoded['counts'].decode()}


MASK_IS_UNREADABLE = "annotations are wrong, such as .*'id': 0,.*polygons as finite numbers, RLE as lengths that sum"
MASK_IS_ELSEWHERE = "annotations are wrong, such as .*'id': 0,.*covers nothing, or lies elsewhere than bbox"

# The change of the annotations, the split that is wrong, and what the error says.
WRONG = {
    "Roboflow's root category": (
        roboflow,
        r'several categories of one name or id.*remove or rename',
    ),
    'another order': (lambda content: content['categories'].reverse(), 'in the order ripe pear,apple.*--classes "ripe'),
    'a category that is none': (
        first(category_id=99),
        r"1 of 4 annotations are wrong, such as .*'category_id': 99.*no category",
    ),
    'ids as strings': (
        text_ids,
        r"4 of 4 annotations .*'image_id': '0'.*1 and \"1\" are different",
    ),
    'ids twice': (first(id=1), r"2 of 4 annotations .*'id': 1,.*each differently"),
    'no area': (drop('area'), r"1 of 4 annotations .*'id': 1,.*area; width times"),
    'no bbox': (drop('bbox'), r"1 of 4 annotations .*'id': 1,.*bbox must be"),
    'no mask': (drop('segmentation'), "1 of 4 annotations .*'id': 1,.*needs masks"),
    'no height': (drop('height', 'images'), r"1 of 4 images .*'1\.jpg'.*height and width"),
    'a height as text': (lambda content: content['images'][2].update(height='64'), r"'2\.jpg'.*height and width"),
    'a polygon that is no list of lists': (first(segmentation=[1, 2, 3, 4, 5, 6]), 'needs masks, as lists of polygons'),
    'RLE of another size': (
        first(segmentation={'size': [32, 64], 'counts': [2048]}, iscrowd=1),
        'RLE of the size of the image',
    ),
    'a list as category_id': (
        first(category_id=[1]),
        r"category_id of each of the annotations must be a whole number or text, got .*'category_id': \[1\]",
    ),
    'no image_id': (drop('image_id'), "image_id of each of the annotations must be .*, got {'id': 1,"),
    'no file name': (
        lambda content: content['images'][2].update(file_name=None),
        r"file_name of each of the images must be text, got {'id': 2, 'file_name': None",
    ),
    'annotations that are none': (lambda content: content['annotations'].append(3), 'annotations must be .*, got 3'),
    'a box of three numbers': (first(bbox=[1, 2, 3]), r"'bbox': \[1, 2, 3\].*bbox must be"),
    'boxes in 0 to 1': (each(normalised), 'leave out all 4 boxes.*not as shares of the image'),
    'corners': (each(corners), r'4 of 4 boxes reach beyond .*none does as \(x1, y1, x2, y2\)'),
    'all crowds': (
        each(lambda one: one.update(iscrowd=1)),
        "4 are marked 'ignore' or 'iscrowd'.*CVAT",
    ),
    'sizes exchanged': (
        lambda content: content['images'][3].update(width=64, height=48),
        r'3\.jpg is stated as 64 x 48 pixels, but is read as 64 x 64',
    ),
    'a file that is missing': (
        lambda content: content['images'][3].update(file_name='gone.jpg'),
        r'4 images, of which 1 are missing: \S+gone\.jpg \(No such file',
    ),
}


WRONG_MASKS = {
    'a polygon with NaN': (first(segmentation=[[1, 2, 3, math.nan, 5, 6]]), MASK_IS_UNREADABLE),
    'an infinite polygon': (first(segmentation=[[1, 2, 3, 4, 5, -math.inf]]), MASK_IS_UNREADABLE),
    'text in a polygon': (first(segmentation=[[1, 2, 3, '4', 5, 6]]), MASK_IS_UNREADABLE),
    'RLE of another sum': (first(segmentation={'size': [SIDE, SIDE], 'counts': [10, 5000]}), MASK_IS_UNREADABLE),
    'RLE with negative lengths': (
        first(segmentation={'size': [SIDE, SIDE], 'counts': [-10, SIDE * SIDE + 10]}),
        MASK_IS_UNREADABLE,
    ),
    'RLE with text': (first(segmentation={'size': [SIDE, SIDE], 'counts': ['4096']}), MASK_IS_UNREADABLE),
    'text of RLE of another sum': (first(segmentation=rle(np.eye(48), SIDE)), MASK_IS_UNREADABLE),
    'text that is no RLE': (first(segmentation={'size': [SIDE, SIDE], 'counts': '\u00e9~'}), MASK_IS_UNREADABLE),
    'RLE of nothing': (first(segmentation=rle(np.zeros((SIDE, SIDE)), SIDE)), MASK_IS_ELSEWHERE),
    'polygons in 0 to 1': (polygons(lambda number: number / SIDE), f'4 of 4 {MASK_IS_ELSEWHERE}'),
    'polygons outside of the image': (polygons(lambda number: number + SIDE), f'4 of 4 {MASK_IS_ELSEWHERE}'),
    'a polygon beside its box': (first(segmentation=[[50, 50, 60, 50, 60, 60]]), f'1 of 4 {MASK_IS_ELSEWHERE}'),
    'a polygon that is a line': (first(segmentation=[[10, 14, 10, 30, 10, 20]]), f'1 of 4 {MASK_IS_ELSEWHERE}'),
    'a polygon of two points': (first(segmentation=[[10, 14, 30, 30]]), f'1 of 4 {MASK_IS_ELSEWHERE}'),
    'a polygon far beyond the image': (
        first(segmentation=[[10, 14, 1e9, 30, 10, 30]]),
        f'1 of 4 {MASK_IS_ELSEWHERE}',
    ),
}


@pytest.mark.parametrize('case', WRONG)
@pytest.mark.parametrize('split', ['train', 'val'])
def test_wrong_annotations_are_one_error(tmp_path, capsys, case, split):
    damage, message = WRONG[case]
    root, arguments = fruit(tmp_path)
    config = written(tmp_path, *arguments)
    file = TRAIN if split == 'train' else VAL
    change(root, damage, file)
    with pytest.raises(ValueError, match=message) as caught:
        check_data(config, ('train', 'val'))
    assert str(root / file) in str(caught.value)
    capsys.readouterr()
    written(tmp_path, *arguments, status=2)
    assert str(caught.value) in capsys.readouterr().err


def test_wrong_masks_are_one_error(tmp_path):
    root, arguments = fruit(tmp_path)
    config = written(tmp_path, *arguments)
    before = (root / TRAIN).read_text()
    for damage, message in WRONG_MASKS.values():
        (root / TRAIN).write_text(before)
        change(root, damage, TRAIN)
        with pytest.raises(ValueError, match=message) as caught:
            check_data(config, ('train',))
        assert str(caught.value).startswith(f'{root / TRAIN}: ')


def test_masks_that_tools_write_are_read(tmp_path):
    """RLE as text and as a list, a polygon with a piece of two points, and a box that is wider than its mask."""
    root, arguments = fruit(tmp_path)
    mask = np.zeros((SIDE, SIDE))
    mask[14:30, 10:30] = 1
    lengths = np.diff(np.flatnonzero(np.diff(mask.T.ravel(), prepend=1 - mask[0, 0], append=2)))
    segmentations = [
        rle(mask, SIDE),
        {'size': [SIDE, SIDE], 'counts': lengths.tolist()},
        [[10, 14, 30, 14, 30, 30], [10, 14, 12, 14]],
        [[12, 20, 14, 20, 14, 22]],
    ]

    def replace(content):
        for annotation, segmentation in zip(content['annotations'], segmentations, strict=True):
            annotation['segmentation'] = segmentation

    change(root, replace)
    check_data(written(tmp_path, *arguments), ('train', 'val'))


def test_what_only_an_evaluation_needs(tmp_path):
    """pycocotools raises bare errors for annotations that mmdet trains with."""
    root, arguments = fruit(tmp_path)
    config = written(tmp_path, *arguments)
    change(root, drop('iscrowd'))
    check_data(config, ('train',))
    with pytest.raises(ValueError, match=r'val2017\.json: .*write iscrowd, 0'):
        check_data(config, ('val',))
    change(root, each(lambda one: one.update(iscrowd=0, id=f'a{one["id"]}')))
    check_data(config, ('train',))
    with pytest.raises(ValueError, match=r"'id': 'a0'.* needs whole numbers"):
        check_data(config, ('val',))


def test_what_is_odd_is_noted(tmp_path):
    """An image without boxes, a crowd with RLE, boxes that are left out or too large, and a class without boxes."""
    root, arguments = fruit(tmp_path, count=8)

    def odd(content):
        annotations = content['annotations']
        annotations.pop()
        counts = [100, 200, SIDE * SIDE - 300]
        annotations[0].update(iscrowd=1, segmentation={'size': [SIDE, SIDE], 'counts': counts})
        annotations[1]['bbox'] = [30, 30, 40, 20]
        annotations[2]['bbox'] = [30, 30, 0.5, 20]
        for annotation in annotations[3:]:
            annotation['category_id'] = 7

    change(root, odd)
    config = written(tmp_path, *arguments)
    notes = check_data(config, ('train', 'val', 'test'))
    path = str(root / TRAIN)
    assert notes[:4] == [
        f'{path}: 8 images, 1 without annotations, 7 annotations',
        f"{path}: mmdet leaves out 29 % of the boxes: 1 are narrower than a pixel, 1 are marked 'ignore' or 'iscrowd'",
        f'{path}: 1 of 7 boxes reach beyond their image',
        f'{path}: some classes have no box',
    ]
    assert sum('instances_val2017.json: 8 images' in note for note in notes) == 1  # also the data of the test


def test_the_sizes_of_pictures_that_a_camera_stored_on_their_side(tmp_path):
    root, arguments = fruit(tmp_path)
    config = written(tmp_path, *arguments)
    exif = Image.Exif()
    exif[274] = 6
    for suffix in ('jpg', 'png', 'webp'):
        Image.new('RGB', (SIDE, 48)).save(root / 'train2017' / f'turned.{suffix}', exif=exif)
        change(
            root, lambda content, s=suffix: content['images'][1].update(file_name=f'turned.{s}', width=SIDE, height=48)
        )
        with pytest.raises(ValueError, match=rf'turned\.{suffix} .*read as 48 x 64.*EXIF'):
            check_data(config, ('train',))
        stored = copy.deepcopy(config)
        stored.train_dataloader.dataset.pipeline[0].color_type = 'color_ignore_orientation'
        check_data(stored, ('train',))
        change(root, lambda content: content['images'][1].update(width=48, height=SIDE))
        check_data(config, ('train',))


@pytest.mark.parametrize('name', ['VOC.xml', 'folder'])
def test_annotations_of_another_kind_are_named(tmp_path, capsys, name):
    root, arguments = fruit(tmp_path)
    (root / 'folder').mkdir()
    (root / 'VOC.xml').write_text('<annotation/>')
    written(tmp_path, *arguments, '--train-ann', name, status=2)
    assert f'{name} is no .json file, but annotations must be in the format of COCO' in capsys.readouterr().err


def test_boxes_that_no_recipe_of_masks_can_use(tmp_path, capsys):
    """CVAT and Label Studio write an empty list for a box."""
    root, arguments = fruit(tmp_path)
    change(root, each(lambda one: one.update(segmentation=[])))
    written(tmp_path, *arguments, status=2)
    assert 'this recipe needs masks' in capsys.readouterr().err
    config = written(tmp_path, *arguments, name=BOXES)
    check_data(config, ('train', 'val'))


def test_images_that_only_decoding_finds_damaged(tmp_path, capsys):
    root, arguments = fruit(tmp_path)
    path = root / 'val2017/2.jpg'
    path.write_bytes(path.read_bytes()[:-500])
    config = written(tmp_path, *arguments)
    check_data(config, ('train', 'val'))
    with pytest.raises(ValueError, match=r'1 of 4 .*: \S+val2017/2\.jpg'):
        check_data(config, ('train', 'val'), every_image=True)
    written(tmp_path, *arguments, '--check-images', status=2)
    assert 'val2017/2.jpg' in capsys.readouterr().err
    path.write_bytes(b'')
    with pytest.raises(ValueError, match=r'missing: \S+val2017/2\.jpg \(empty\)'):
        check_data(config, ('val',))


def test_train_looks_before_it_builds_anything(tmp_path, capsys, monkeypatch):
    root, arguments = fruit(tmp_path)
    written(tmp_path, *arguments)
    monkeypatch.setattr('mmengine.registry.RUNNERS.build', lambda config: SimpleNamespace(train=print))
    capsys.readouterr()
    command = ['train', str(tmp_path / 'mine.py'), '--work-dir', str(tmp_path / 'run')]
    assert main(command) == 0
    assert f'swin-dense train: note: {root / TRAIN}: 4 images, 0 without annotations' in capsys.readouterr().err
    damaged = root / 'train2017/3.jpg'
    damaged.write_bytes(damaged.read_bytes()[:-500])
    assert main([*command, '--check-images']) == 2
    assert 'train2017/3.jpg' in capsys.readouterr().err
    (root / 'train2017/2.jpg').unlink()
    assert main([*command[:-1], str(tmp_path / 'other')]) == 2
    assert 'train2017/2.jpg' in capsys.readouterr().err
    assert not (tmp_path / 'other').exists()


def masks(tmp_path, store, count=4):
    """Write images and masks; ``store`` makes an image of the class indices."""
    root = make_masks(tmp_path / 'roads', count)
    for path in root.rglob('annotations/*/*.png'):
        store(np.array(Image.open(path))).save(path)
    return root


def labelme(mask):
    return Image.fromarray(np.where(mask == 1, 255, 0).astype(np.uint8))


def test_masks_of_0_and_255_are_refused_or_mapped(tmp_path, capsys):
    root = masks(tmp_path, labelme)
    arguments = ['--data-root', root, '--classes', 'background,road']
    written(tmp_path, *arguments, name=SEGMENTOR, status=2)
    said = capsys.readouterr().err
    assert re.search(r'the 4 masks looked at in \S+training have only the values 0,255, and 255 is ignored', said)
    assert '--mask-values 0,255' in said
    config = written(tmp_path, *arguments, '--mask-values', '0,255', name=SEGMENTOR)
    for split in ('train', 'val', 'test'):
        assert mask_values(config, split) == [0, 1]
    unmapped = copy.deepcopy(config)
    for split in ('train', 'val'):
        pipeline = unmapped[f'{split}_dataloader'].dataset.pipeline
        pipeline[:] = [step for step in pipeline if step.type != 'MapMaskValues']
    with pytest.raises(ValueError, match='have only the values 0,255'):
        check_data(unmapped, ('train', 'val'))
    # Masks of background and ignored pixels alone may be right.
    written(tmp_path, *arguments, '--mask-values', '0,1', name=SEGMENTOR)
    assert main(['config', str(tmp_path / 'mine.py'), '--ignore', '0']) == 2
    assert 'the classes have the values 0, 1; got 0' in capsys.readouterr().err


def palette(mask):
    image = Image.fromarray(mask, 'P')
    image.putpalette([200, 0, 0, 0, 200, 0] + [0] * 762)
    return image


def test_masks_with_a_palette_and_a_class_that_does_not_occur(tmp_path):
    root = masks(tmp_path, palette)
    config = written(tmp_path, '--data-root', root, '--classes', 'a,b,c', name=SEGMENTOR)
    assert mask_values(config, 'train') == [0, 1, 255]
    notes = check_data(config, ('train',))
    folder = f'{root}/annotations/training'
    assert notes == [
        f'{folder}: 4 masks, one for each image; read the values of 4',
        f'{folder}: in these masks, 1 classes do not occur: c',
    ]


@pytest.mark.parametrize('value', [258, 1000])
def test_masks_of_16_bits_that_would_wrap_are_refused(tmp_path, capsys, value):
    root = masks(tmp_path, lambda mask: Image.fromarray(np.where(mask == 1, value, 0).astype(np.uint16)))
    written(tmp_path, '--data-root', root, '--classes', 'a,b,c', name=SEGMENTOR, status=2)
    said = capsys.readouterr().err
    assert re.search(rf'0\.png is an array \(64, 64\) of \w+ from 0 to {value}; a mask', said)


def test_masks_of_16_bits_with_class_indices_are_read(tmp_path):
    root = masks(tmp_path, lambda mask: Image.fromarray(mask.astype(np.uint16)))
    written(tmp_path, '--data-root', root, '--classes', 'a,b', name=SEGMENTOR)


def test_a_config_without_classes_of_its_own_has_those_of_coco(tmp_path):
    """mmdet would train without a box, also if the heads have as many classes as the file."""
    config = written(tmp_path, *fruit(tmp_path)[1])
    config.train_dataloader.dataset.pop('metainfo')
    with pytest.raises(
        ValueError,
        match=r'has 2 classes, apple, ripe pear, but the config has 80, person, .*, and a model of 2 classes; ',
    ):
        check_data(config, ('train',))


@pytest.mark.parametrize('names', [['red, round', 'pear '], ['7', 7], [3, 'pear']])
def test_names_of_classes_that_only_a_file_can_give(tmp_path, capsys, names):
    root, arguments = fruit(tmp_path)

    def rename(content):
        for category, name in zip(content['categories'], names, strict=True):
            category['name'] = name

    change(root, rename)
    written(tmp_path, *arguments, status=2)
    assert f'--classes "{root / TRAIN}"' in capsys.readouterr().err
    config = written(tmp_path, '--data-root', root, '--classes', root / TRAIN)
    assert list(config.train_dataloader.dataset.metainfo.classes) == names
    assert boxes_of(config, 'train') == [0, 1, 0, 1]


def test_names_of_classes_in_lines_of_text(tmp_path, capsys):
    root = make_masks(tmp_path / 'roads')
    (tmp_path / 'classes.txt').write_text('\ufeffground, grass\r\nroad \n\n', encoding='utf-8')
    config = written(tmp_path, '--data-root', root, '--classes', tmp_path / 'classes.txt', name=SEGMENTOR)
    assert list(config.val_dataloader.dataset.metainfo.classes) == ['ground, grass', 'road ']
    written(tmp_path, '--classes', tmp_path / 'gone.txt', name=SEGMENTOR, status=2)
    assert 'gone.txt' in capsys.readouterr().err


def as_roboflow(root):
    """Move data into the layout of Roboflow, with its root category and ids from 0."""

    def numbered(content):
        content['categories'] = [
            {'id': 0, 'name': 'fruits', 'supercategory': 'none'},
            *({'id': 1 + i, 'name': name, 'supercategory': 'fruits'} for i, name in enumerate(CLASSES)),
        ]
        for annotation in content['annotations']:
            annotation['category_id'] = 1 + annotation['category_id'] // 7

    change(root, numbered)
    for split, name in (('train2017', 'train'), ('val2017', 'valid')):
        (root / f'annotations/instances_{split}.json').rename(root / split / '_annotations.coco.json')
        (root / split).rename(root / name)
    (root / 'annotations').rmdir()


def test_the_layout_of_roboflow_is_found(tmp_path, capsys):
    root, arguments = fruit(tmp_path)
    as_roboflow(root)
    config = written(tmp_path, *arguments)
    assert 'found train/_annotations.coco.json, train, valid/_annotations.coco.json, valid' in capsys.readouterr().err
    assert boxes_of(config, 'train') == boxes_of(config, 'val') == boxes_of(config, 'test') == [0, 1, 0, 1]
    assert config.val_evaluator.ann_file == str(root / 'valid/_annotations.coco.json')
    written(tmp_path, '--data-root', root, status=2)
    assert 'has 3 classes, fruits, apple, ripe pear, but the config has' in capsys.readouterr().err


def boxes_of(config, split):
    """Return the labels of all boxes of a split, as mmdet reads them, after its images have been opened."""
    from mmengine.registry import DATASETS, init_default_scope

    init_default_scope('mmdet')
    dataset = DATASETS.build({**config[f'{split}_dataloader'].dataset, 'pipeline': []})
    data = [dataset.get_data_info(index) for index in range(len(dataset))]
    for one in data:
        Image.open(one['img_path']).load()
    return [instance['bbox_label'] for one in data for instance in one['instances']]


def label_studio(root):
    """Write all in one folder, with names that contain it."""
    (root / 'annotations/instances_train2017.json').rename(root / 'result.json')
    (root / 'train2017').rename(root / 'images')
    change(
        root, lambda content: [i.update(file_name=f'images/{i["file_name"]}') for i in content['images']], 'result.json'
    )


def cvat(root):
    (root / 'annotations/instances_train2017.json').rename(root / 'annotations/instances_default.json')
    (root / 'images').mkdir()
    (root / 'train2017').rename(root / 'images/default')


def pascal_voc(root):
    """Write images where Pascal VOC has them, and annotations that were converted."""
    (root / 'annotations/instances_train2017.json').rename(root / 'voc.json')
    (root / 'VOC2012').mkdir()
    (root / 'train2017').rename(root / 'VOC2012/JPEGImages')


def half_of_roboflow(root):
    as_roboflow(root)
    for path in (root / 'valid').iterdir():
        path.unlink()


@pytest.mark.parametrize('layout', [label_studio, cvat, pascal_voc, half_of_roboflow])
def test_detection_data_without_a_split_are_split(tmp_path, capsys, layout):
    root, arguments = fruit(tmp_path, count=10)
    layout(root)
    for path in (root / 'annotations').glob('instances_val2017.json'):
        path.unlink()
    written(tmp_path, *arguments, status=2)
    assert 'has no validation data beside' in capsys.readouterr().err
    config = written(tmp_path, *arguments, '--val-share', '0.2')
    train, val = (json.loads((tmp_path / f'mine.{part}.json').read_text()) for part in ('train', 'val'))
    names = [{image['file_name'] for image in part['images']} for part in (train, val)]
    assert [len(part) for part in names] == [8, 2]
    assert len(names[0] | names[1]) == 10
    for part in (train, val):
        assert {one['image_id'] for one in part['annotations']} == {image['id'] for image in part['images']}
    assert sorted(boxes_of(config, 'train') + boxes_of(config, 'val')) == [0] * 5 + [1] * 5
    assert config.val_evaluator.ann_file == str(tmp_path / 'mine.val.json')
    before = (tmp_path / 'mine.val.json').read_text()
    written(tmp_path, *arguments, '--val-share', '0.2')
    assert (tmp_path / 'mine.val.json').read_text() == before


@pytest.mark.parametrize('folders', [('images', 'masks'), ('image', 'label'), ('JPEGImages', 'SegmentationClass')])
def test_masks_without_a_split_are_split(tmp_path, folders):
    root = make_masks(tmp_path / 'roads', 10)
    for kind, name in zip(('images', 'annotations'), folders, strict=True):
        (root / kind / 'training').rename(root / 'moved')
        for path in (root / kind / 'validation').iterdir():
            path.unlink()
        (root / kind / 'validation').rmdir()
        (root / kind).rmdir()
        (root / 'moved').rename(root / name)
    arguments = ['--data-root', root, '--classes', 'a,b', '--val-share', '0.3']
    config = written(tmp_path, *arguments, name=SEGMENTOR)
    names = [set((tmp_path / f'mine.{part}.txt').read_text().split()) for part in ('train', 'val')]
    assert [len(part) for part in names] == [7, 3]
    assert names[0] | names[1] == {str(index) for index in range(10)}
    assert mask_values(config, 'val') == [0, 1, 255]
    assert [note.partition(':')[2] for note in check_data(config, ('train', 'val'))] == [
        f' {count} masks, one for each image; read the values of {count}' for count in (7, 3)
    ]


def test_data_are_split_again_beside_the_files_of_a_split(tmp_path):
    root, arguments = fruit(tmp_path, count=10)
    pascal_voc(root)
    (root / 'annotations/instances_val2017.json').unlink()
    for _ in range(2):
        written(root, *arguments, '--val-share', '0.2')
        assert len(json.loads((root / 'mine.val.json').read_text())['images']) == 2


def test_a_split_that_cannot_be_used_leaves_no_file(tmp_path, capsys):
    root, named = fruit(tmp_path, count=10)
    cvat(root)
    (root / 'annotations/instances_val2017.json').unlink()
    arguments = ['--data-root', root, '--val-share', '0.2']
    for words, message in (
        (['--classes', 'plum'], 'give those to train with, such as all of the file: --classes "'),
        ([*named, '--val-share', '0.99'], 'leaves none for training'),
        ([*named, '--val-share', '1'], '--val-share must be between 0 and 1'),
        (['--train-images', 'images/default', '--val-images', 'images'], 'without validation data'),
    ):
        written(tmp_path, *arguments, *words, status=2)
        assert message in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ['fruit']
    assert main(['config', DETECTOR, *map(str, arguments)]) == 2
    assert '--val-share needs --out' in capsys.readouterr().err
