"""What is known about data before training, by `swin-dense config` and by the look of `train`: one error or one note.

The data are in the layouts, and with the oddities, of the tools that people annotate with.
"""

import io
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from pycocotools.mask import encode

from swin_dense.commands._main import main, parser_of
from swin_dense.workbench.checking import masks
from swin_dense.workbench.configs.settings import merge_settings
from swin_dense.workbench.training import prepare_test
from tests.workbench.configs.data import (
    CLASSES,
    DETECTOR,
    SIDE,
    SPLITS,
    TRAIN,
    VAL,
    check_data,
    dataset_of,
    make_masks,
    mask_values,
    written,
)

BOXES = 'retinanet_swin-t-p4-w7_fpn_1x_coco'


def each(function):
    return lambda content: [function(annotation) for annotation in content['annotations']]


def first(**values):
    return lambda content: content['annotations'][0].update(values)


def image(index, **values):
    return lambda content: content['images'][index].update(values)


def drop(key, kind='annotations'):
    return lambda content: content[kind][1].pop(key)


def roboflow(content):
    """Add the category of the project, of whose name there is a class too."""
    content['categories'].insert(0, {'id': 0, 'name': 'apple', 'supercategory': 'none'})


def text_id(annotation):
    annotation['image_id'] = str(annotation['image_id'])


def corners(annotation):
    left, top, width, height = annotation['bbox']
    annotation['bbox'] = [left, top, left + width, top + height]


def normalised(annotation):
    annotation['bbox'] = [part / SIDE for part in annotation['bbox']]


def polygons(change_one):
    """Return a function that changes every coordinate of the first polygon of every annotation."""

    def change(annotation):
        (polygon,) = annotation['segmentation']
        annotation['segmentation'] = [list(map(change_one, polygon))]

    return each(change)


def runs(counts, side=SIDE):
    """Return RLE as a list, or as text, for an image of a side."""
    return first(segmentation={'size': [side, side], 'counts': counts})


def text_of(mask):
    return encode(np.asfortranarray(mask.astype(np.uint8)))['counts'].decode()


UNREADABLE = "annotations are wrong, such as .*'id': 1,.*polygons as finite numbers.*, RLE as lengths that sum"
NOTHING = "annotations are wrong, such as .*'id': 1,.*covers nothing: a polygon needs three points"
ELSEWHERE = "annotations are wrong, such as .*'id': 1,.*lies elsewhere than bbox"

# The change of the annotations, the split that is wrong, and what the error says.
WRONG = {
    "Roboflow's root category": (roboflow, r'several categories of one name or id.*remove or rename'),
    'another order': (
        lambda content: content['categories'].reverse(),
        'has 2 classes, ripe pear, apple, but the config has 2, apple, ripe pear.*(--classes|sort the list)',
    ),
    'a category that is none': (
        first(category_id=99),
        r"1 of 4 annotations are wrong, such as .*'category_id': 99.*no category",
    ),
    'ids as strings': (each(text_id), r"4 of 4 annotations .*'image_id': '0'.*1 and \"1\" are different"),
    'ids twice': (first(id=2), r'not unique.*must be unique; renumber them from 1'),
    'no area': (drop('area'), r"KeyError: 'area', at .*'1\.jpg'.*write the area; width times"),
    'no bbox': (drop('bbox'), r"KeyError: 'bbox', at .*'1\.jpg'.*bbox must be x, y, width"),
    'no mask': (drop('segmentation'), "1 of 4 annotations .*'id': 2,.*needs masks"),
    'no height': (drop('height', 'images'), r"1 of 4 images .*'1\.jpg'.*height and width"),
    'a height as text': (image(2, height='64'), r"'2\.jpg'.*height and width"),
    'a polygon that is no list of lists': (first(segmentation=[1, 2, 3, 4, 5, 6]), 'needs masks, as lists of polygons'),
    'RLE of another size': (runs([1024], side=32), 'RLE must be counts, and the size of the image'),
    'a list as category_id': (
        first(category_id=[1]),
        r"category_id of each of the annotations must be a whole number or text, got .*'category_id': \[1\]",
    ),
    'no image_id': (drop('image_id'), "image_id of each of the annotations must be .*, got {'id': 2,"),
    'no file name': (
        image(2, file_name=None),
        r"file_name of each of the images must be text, got {'id': 2, 'file_name': None",
    ),
    'annotations that are none': (lambda content: content['annotations'].append(3), 'annotations must be .*, got 3'),
    'a box of three numbers': (first(bbox=[1, 2, 3]), r"'bbox': \[1, 2, 3\].*bbox must be"),
    'boxes in 0 to 1': (each(normalised), '4 of 4 boxes.*but all do if boxes are read as x, y, w.* in shares of the'),
    'corners': (each(corners), '4 of 4 boxes.*but all do if boxes are read as x1, y1, x2, y2; write x, y, width'),
    'areas of 0': (each(lambda one: one.update(area=0)), 'leave out all 4 boxes.*write the area; width times height'),
    'all crowds': (each(lambda one: one.update(iscrowd=1)), "4 marked 'iscrowd'; write an iscrowd of 0.*CVAT"),
    'sizes exchanged': (
        image(3, width=64, height=48),
        r'3\.jpg is stated as 64 x 48 pixels, but is read as 64 x 64',
    ),
    'a file that is missing': (
        image(3, file_name='gone.jpg'),
        r'4 images, 1 of them missing: \S+gone\.jpg \(No such file',
    ),
}
WRONG_MASKS = {
    'a polygon with NaN': (first(segmentation=[[1, 2, 3, math.nan, 5, 6]]), UNREADABLE),
    'an infinite polygon': (first(segmentation=[[1, 2, 3, 4, 5, -math.inf]]), UNREADABLE),
    'text in a polygon': (first(segmentation=[[1, 2, 3, '4', 5, 6]]), UNREADABLE),
    'RLE of another sum': (runs([10, 5000]), UNREADABLE),
    'RLE with negative lengths': (runs([-10, SIDE * SIDE + 10]), UNREADABLE),
    'RLE with text': (runs(['4096']), UNREADABLE),
    'text of RLE of another sum': (runs(text_of(np.eye(48))), UNREADABLE),
    'text that is no RLE': (runs('\u00e9~'), UNREADABLE),
    'RLE of nothing': (runs(text_of(np.zeros((SIDE, SIDE)))), NOTHING),
    'polygons in 0 to 1': (polygons(lambda number: number / SIDE), 'all do if masks are read as shares of the image'),
    'polygons outside of the image': (polygons(lambda number: number + SIDE), f'4 of 4 {ELSEWHERE}'),
    'a polygon beside its box': (first(segmentation=[[50, 50, 60, 50, 60, 60]]), f'1 of 4 {ELSEWHERE}'),
    'a polygon that is a line': (first(segmentation=[[10, 14, 10, 30, 10, 20]]), f'1 of 4 {NOTHING}'),
    'a polygon of two points': (first(segmentation=[[10, 14, 30, 30]]), f'1 of 4 {NOTHING}'),
    'a polygon far beyond the image': (first(segmentation=[[10, 14, 1e9, 30, 10, 30]]), UNREADABLE),
}


@pytest.mark.parametrize('case', WRONG)
@pytest.mark.parametrize('file', [TRAIN, VAL])
def test_wrong_annotations_are_one_error(fruit, case, file):
    damage, message = WRONG[case]
    config = fruit.write()
    fruit.change(damage, file)
    with pytest.raises(ValueError, match=message) as caught:
        check_data(config, ('train', 'val'))
    assert str(fruit.root / file) in str(caught.value)
    assert not unknown_options(caught.value)
    assert str(caught.value) in fruit.refused()


def unknown_options(error):
    """Return the options that an error advises and `train` does not have, outside of commands that it shows."""
    words = re.findall(r'--[a-z-]+', re.sub('`[^`]*`', '', str(error)))
    return {*words} - {*parser_of('train')._option_string_actions}


def test_wrong_masks_are_one_error(fruit):
    config, path = fruit.write(), fruit.root / TRAIN
    before = path.read_text()
    for damage, message in WRONG_MASKS.values():
        path.write_text(before)
        fruit.change(damage, TRAIN)
        with pytest.raises(ValueError, match=message) as caught:
            check_data(config, ('train',))
        assert str(caught.value).startswith(f'{path}: ')


def test_masks_that_tools_write_are_read(fruit):
    """RLE as text and as a list, a polygon with a piece of two points, and a box that is wider than its mask."""
    mask = np.zeros((SIDE, SIDE))
    mask[14:30, 10:30] = 1
    lengths = [
        10 * SIDE + 14,
        *[16, SIDE - 16] * 19,
        16,
        34 * SIDE + 34,
    ]
    written_by_tools = iter(
        [
            {'size': [SIDE, SIDE], 'counts': text_of(mask)},
            {'size': [SIDE, SIDE], 'counts': lengths},
            [[10, 14, 30, 14, 30, 30], [10, 14, 12, 14]],
            [[12, 20, 14, 20, 14, 22]],
        ]
    )
    fruit.change(each(lambda one: one.update(segmentation=next(written_by_tools))), TRAIN)
    check_data(fruit.write(), ('train',))


def test_what_only_an_evaluation_needs(fruit):
    """pycocotools raises bare errors for annotations that mmdet trains with."""
    config = fruit.write()
    fruit.change(drop('iscrowd'))
    check_data(config, ('train',))
    with pytest.raises(ValueError, match=r'val2017\.json \(KeyError.*write iscrowd, 0'):
        check_data(config, ('val',))
    fruit.change(each(lambda one: one.update(iscrowd=0, id=f'a{one["id"]}')))
    check_data(config, ('train',))
    with pytest.raises(ValueError, match=r"val2017\.json .*'a1'.* needs whole numbers"):
        check_data(config, ('val',))


def test_what_is_odd_is_noted(ten_fruits):
    """An image without boxes, a crowd with RLE, boxes that are left out or too large, and a class without boxes."""

    def odd(content):
        crowd, wide, narrow, *others, _ = content['annotations']
        content['annotations'].pop()
        counts = [12 + 8 * SIDE, *[20, SIDE - 20] * 23, 20]
        crowd.update(iscrowd=1, segmentation={'size': [SIDE, SIDE], 'counts': [*counts, SIDE * SIDE - sum(counts)]})
        wide['bbox'] = [30, 30, 40, 20]
        narrow['bbox'] = [30, 30, 0.5, 20]
        for annotation in others:
            annotation['category_id'] = 7
        content['categories'].append({'id': 8, 'name': 'leaf'})
        content['annotations'][-1]['category_id'] = 8

    ten_fruits.change(odd)
    notes = check_data(ten_fruits.write(), SPLITS)
    path, evaluated = (str(ten_fruits.root / file) for file in (TRAIN, VAL))
    left_out = "mmdet does not train on 2 of 8 boxes (25 %): 1 narrower than a pixel, 1 marked 'iscrowd'"
    assert notes == [
        f'{path}: 10 images, 1 without annotations, 9 annotations',
        f'{path}: 1 of 9 annotations are not used, of names that are no class: leaf (1)',
        f'{path}: {left_out}',
        f'{path}: 1 of 2 classes have no box: apple',
        f'{path}: 1 of 8 boxes reach beyond their image, by up to 6 pixels; mmdet cuts them at its edge',
        f'{path}: 1 of 7 masks reach beyond their box, by up to 21 pixels; a box should hold its mask, because '
        'detectors such as Mask R-CNN learn only the part within',
        f'{path}: mmdet uses 8 of 10 images and leaves out 2 without an annotation of the classes '
        '(--set train_dataloader.dataset.filter_cfg.filter_empty_gt=False keeps them)',
        *notes[7:],
    ]
    assert f'{evaluated}: {left_out}' in notes
    assert f'{evaluated}: 1 of 8 boxes reach beyond their image, by up to 6 pixels; the evaluation' in ' '.join(notes)
    assert ' '.join(notes).count('instances_val2017.json: 10 images') == 1  # also the data of the test


@pytest.mark.parametrize('suffix', ['jpg', 'png', 'webp'])
def test_the_sizes_of_pictures_that_a_camera_stored_on_their_side(fruit, suffix):
    name, exif = f'turned.{suffix}', Image.Exif()
    exif[274] = 6
    Image.new('RGB', (SIDE, 48)).save(fruit.root / 'train2017' / name, exif=exif)
    config = fruit.write()
    load = config.train_dataloader.dataset.pipeline[0]
    fruit.change(image(1, file_name=name, width=SIDE, height=48), TRAIN)
    with pytest.raises(ValueError, match=rf'turned\.{suffix} .*read as 48 x 64.*EXIF'):
        check_data(config, ('train',))
    load.color_type = 'color_ignore_orientation'
    check_data(config, ('train',))
    load.color_type = 'color'
    fruit.change(image(1, width=48, height=SIDE), TRAIN)
    check_data(config, ('train',))


@pytest.mark.parametrize(
    ('name', 'content', 'format_'),
    [
        ('labels/0.txt', '0 0.25 0.4 0.3125 0.41666\n', 'YOLO'),
        ('train/labels/0.txt', '12 0.1 0.2 0.3 0.2 0.3 .4 0.1 0.4\n', 'YOLO'),
        ('Annotations/0.xml', '<annotation/>', 'Pascal VOC'),
        ('names.txt', 'apple\npear\n', None),
    ],
)
def test_other_formats_of_annotations_are_named(ten_fruits, name, content, format_):
    shutil.rmtree(ten_fruits.root / 'annotations')
    (ten_fruits.root / name).parent.mkdir(parents=True, exist_ok=True)
    (ten_fruits.root / name).write_text(content)
    error = ten_fruits.refused('--val-share', '0.2')
    assert 'has no .json file of annotations, but it has' in error
    shown = f'docs/own-data.md shows how to convert annotations of {format_}, as these are, to the format of COCO'
    assert (shown in error) == (format_ is not None)
    assert ('shows how to convert' in error) == (format_ is not None)


@pytest.mark.parametrize('name', ['VOC.xml', 'folder'])
def test_annotations_of_another_kind_are_named(fruit, name):
    (fruit.root / 'folder').mkdir()
    (fruit.root / 'VOC.xml').write_text('<annotation/>')
    message = f'{name} is no .json file, but annotations must be in the format of COCO'
    assert message in fruit.refused('--train-ann', name)


def test_boxes_that_no_recipe_of_masks_can_use(fruit):
    """CVAT and Label Studio write an empty list for a box."""
    fruit.change(each(lambda one: one.update(segmentation=[])))
    assert 'this recipe needs masks' in fruit.refused()
    check_data(fruit.write(name=BOXES), ('train', 'val'))


def test_images_that_only_decoding_finds_damaged(ten_fruits):
    fruit = ten_fruits
    path = fruit.root / 'val2017/2.jpg'
    path.write_bytes(path.read_bytes()[:-500])
    config = fruit.write()
    check_data(config, ('train', 'val'))
    with pytest.raises(ValueError, match=r'1 of 10 .*: \S+val2017/2\.jpg'):
        check_data(config, ('train', 'val'), every_image=True)
    assert 'val2017/2.jpg' in fruit.refused('--check-images')
    path.write_bytes(b'')
    with pytest.raises(ValueError, match=r'missing: \S+val2017/2\.jpg \(empty\)'):
        check_data(config, ('val',))


def test_train_looks_before_it_builds_anything(fruit, capsys, monkeypatch):
    monkeypatch.chdir(fruit.beside)
    fruit.write()
    monkeypatch.setattr('mmengine.registry.RUNNERS.build', lambda config: SimpleNamespace(train=print))
    assert main(['train', 'mine.py']) == 0
    assert f'swin-dense train: note: {fruit.root / TRAIN}: 4 images, 0 without annotations' in capsys.readouterr().err
    damaged = fruit.root / 'train2017/3.jpg'
    damaged.write_bytes(damaged.read_bytes()[:-500])
    assert main(['train', 'mine.py', '--check-images']) == 2
    assert 'train2017/3.jpg' in capsys.readouterr().err
    damaged.unlink()
    assert main(['train', 'mine.py', '--work-dir', 'other']) == 2
    assert 'train2017/3.jpg' in capsys.readouterr().err
    assert not (fruit.beside / 'other').exists()


def store(data, function):
    """Write each mask anew, as the image that a function makes of its class indices."""
    for path in data.root.rglob('annotations/*/*.png'):
        function(np.array(Image.open(path))).save(path)


def labelme(mask):
    return Image.fromarray(np.where(mask == 1, 255, 0).astype(np.uint8))


def test_masks_of_0_and_255_are_refused_or_mapped(roads):
    store(roads, labelme)
    said = roads.refused()
    assert re.search(r'the 4 checked masks in \S+training have only the values 0,255, and 255 is ignored', said)
    assert '--mask-values 0,255' in said
    config = roads.write('--mask-values', '0,255')
    assert [mask_values(config, split) for split in SPLITS] == [[0, 1]] * 3
    # Masks of background and ignored pixels alone may be right.
    roads.write('--mask-values', '0,1')


def test_values_are_mapped_behind_every_loader_of_images(roads):
    store(roads, labelme)
    load = "pipeline.0={'type': 'LoadBands', 'normalization': {'scale': 255, 'mean': 0, 'std': 1}}"
    settings = [f'{split}_dataloader.dataset.{load}' for split in SPLITS]
    config = roads.write('--mask-values', '0,255', '--set', *settings)
    assert [mask_values(config, split) for split in SPLITS] == [[0, 1]] * 3
    assert [step.type for step in config.tta_pipeline] == ['LoadImageFromFile', 'MapMaskValues', 'TestTimeAug']


def test_values_that_are_no_class_are_refused_though_they_are_small_numbers(roads):
    """With classes of 1 and 2, pixels of 0 would be trained as the class of 1."""
    store(roads, lambda mask: Image.fromarray(np.where(mask == 255, 2, mask).astype(np.uint8)))
    message = r'has pixels of the value 0, but the classes have the values 1, 2; .* --ignore 0`'
    assert re.search(message, roads.refused('--mask-values', '1,2'))
    config = roads.write('--mask-values', '1,2', '--ignore', '0')
    assert [mask_values(config, split) for split in SPLITS] == [[0, 1, 255]] * 3
    # The values of masks that were not looked at.
    for step in list(config.train_dataloader.dataset.pipeline):
        if step['type'] == 'IgnoreMaskValues':
            config.train_dataloader.dataset.pipeline.remove(step)
    assert mask_values(config) == [0, 1, 255]


@pytest.mark.parametrize('split', ['training', 'validation'])
@pytest.mark.parametrize('words', [(), ('--ignore', '2'), ('--classes', 'a,b,c')])
def test_splits_that_number_their_classes_differently(roads, split, words):
    """No advice makes them pass: to ignore the value of no class. If it is a class, there is a note."""
    for path in roads.root.rglob(f'annotations/{split}/*.png'):
        mask = np.array(Image.open(path))
        Image.fromarray(np.where(mask == 255, 255, mask + 1).astype(np.uint8)).save(path)
    message = r'The value \d occurs in .* alone, and [abc], which 4 of 4 masks have in .*, does not occur in'
    if '--classes' in words:  # of which data of another scene may lack one
        roads.capsys.readouterr()
        roads.write(*words)
        assert re.search(f'note: .*{message}.*are the classes numbered alike', roads.capsys.readouterr().err)
        return
    said = roads.refused(*words)
    if split == 'training' and not words:
        assert 'value 2, but the classes are 0 to 1; if pixels of other values have no label' in said
        return
    assert re.search(message, said)
    assert '--ignore' not in said


def test_values_that_the_training_data_lack_are_not_advised_to_be_ignored(roads):
    """Where all classes occur, too, no numbering can be seen."""
    config = roads.write()
    for path in roads.root.rglob('annotations/validation/*.png'):
        mask = np.array(Image.open(path))
        Image.fromarray(np.where(mask == 255, 7, mask).astype(np.uint8)).save(path)
    for splits, values in ((SPLITS, ', 0, 1, 255'), (('test',), '')):
        message = rf'value 7, .*; give the masks the values of the training data{values}, and write 255 where'
        with pytest.raises(ValueError, match=message):
            check_data(config, splits)


def test_masks_of_few_images_may_lack_a_class(roads):
    """A validation mask without a class, and with ignored pixels, is no other numbering."""
    store(roads, lambda mask: Image.fromarray(np.where(mask == 255, 2, mask).astype(np.uint8)))
    for path in roads.root.rglob('annotations/validation/*.png'):
        if path.stem == '0':
            mask = np.array(Image.open(path))
            Image.fromarray(np.where(mask == 1, 255, mask).astype(np.uint8)).save(path)
        else:
            path.unlink()
            (roads.root / 'images/validation' / path.name).unlink()
    roads.write('--classes', 'a,b,c')


def test_masks_in_jpeg_files_are_refused_whatever_their_values(roads):
    for path in roads.root.rglob('annotations/*/*.png'):
        Image.new('L', (SIDE, SIDE), 1).save(path, 'JPEG')
    assert re.search(r'0\.png is a JPEG file, .*write masks anew, as \.png', roads.refused())


@pytest.mark.parametrize('way', ['BILINEAR', 'NEAREST'])
def test_masks_that_were_resized_by_interpolation_are_noted(roads, way):
    """Between 0 and 2, an interpolation leaves 1, which is a class."""

    def resized(mask):
        image = Image.fromarray(np.where(mask == 1, 2, 0).astype(np.uint8))
        return image.resize((SIDE // 2, SIDE // 2), 0).resize((SIDE, SIDE), getattr(Image.Resampling, way))

    store(roads, resized)
    notes = ' '.join(check_data(roads.write('--classes', 'a,b,c'), ('train',)))
    assert bool(re.search(r'\d\d+ lines of up to 4 pixels .* without a line 0 times', notes)) == (way == 'BILINEAR')
    assert ('interpolation' in notes) == (way == 'BILINEAR')


def test_masks_of_a_lossy_format_are_said_to_be_so(roads):
    """No list of two hundred values to ignore."""

    def through_jpeg(mask):
        stored = io.BytesIO()
        noise = np.random.default_rng(0).integers(0, 2, mask.shape)
        Image.fromarray((255 * noise).astype(np.uint8)).save(stored, 'JPEG', quality=50)
        return Image.open(stored)

    store(roads, through_jpeg)
    said = roads.refused('--mask-values', '0,255')
    assert re.search(r'the values 0, 255; \d+ pixels of 4 masks have \d+ such values, as JPEG', said)
    assert '--ignore' not in said


def test_a_step_that_fails_for_masks_is_one_error(roads):
    """mmseg's LoadAnnotations must have the same reduce_zero_label as its data set."""
    config = roads.write()
    config.train_dataloader.dataset.reduce_zero_label = True
    message = r'\.png cannot be loaded: LoadAnnotations of train_dataloader.dataset.pipeline fails \(AssertionError'
    with pytest.raises(ValueError, match=message):
        check_data(config, SPLITS)


def test_masks_that_are_numbered_differently_are_said(roads):
    """As in a config whose training data were replaced, but whose validation data are still those of ADE20K."""
    store(roads, lambda mask: Image.fromarray(np.where(mask == 255, 2, mask).astype(np.uint8)))
    config = roads.write('--classes', 'a,b,c')
    check_data(config, SPLITS)
    for split in ('val', 'test'):
        dataset = config[f'{split}_dataloader'].dataset
        dataset.reduce_zero_label = True
        (load,) = [step for step in dataset.pipeline if step.type == 'LoadAnnotations']
        load.reduce_zero_label = True
    assert mask_values(config, 'train') == [0, 1, 2]
    assert mask_values(config, 'val') == [0, 1, 255]
    with pytest.raises(ValueError, match=r'3660 that are of class 0 here, but of 1 in the training data \(reduce_zero'):
        check_data(config, ('train', 'val'))


def palette(mask):
    image = Image.fromarray(mask, 'P')
    image.putpalette([200, 0, 0, 0, 200, 0] + [0] * 762)
    return image


@pytest.mark.parametrize('names', [['a'], None])
def test_fewer_names_than_the_model_has_classes_are_refused(roads, names):
    """mmseg computes the mIoU of the classes that have names, and stops late where there is none."""
    config = roads.write('--classes', 'a,b,c')
    assert config.model.decode_head.num_classes == 3
    for split in ('val', 'test'):
        config[f'{split}_dataloader'].dataset.metainfo = {'classes': names} if names else {}
    message = rf'val_dataloader.dataset has names of {len(names or [])} classes.* but the model has 3'
    with pytest.raises(ValueError, match=message):
        check_data(config, ('train', 'val'))
    config.train_dataloader.dataset.metainfo = {}
    check_data(config, ('train',))


def test_a_head_of_fewer_classes_is_named(roads):
    """The masks are right."""
    config = roads.write('--classes', 'a,b,c')
    config.model.decode_head.num_classes = 2
    message = r'names of 3 classes, a, b, c, but the model has 2 and 3 .*--set model\.decode_head\.num_classes=3$'
    with pytest.raises(ValueError, match=message):
        check_data(config, ('train',))


def test_masks_with_a_palette_and_a_class_that_does_not_occur(roads):
    store(roads, palette)
    config = roads.write('--classes', 'a,b,c')
    assert mask_values(config) == [0, 1, 255]
    folder = f'{roads.root}/annotations/training'
    assert check_data(config, ('train',)) == [
        f'{folder}: 4 masks, one for each image; read the values of 4',
        f'{folder}: 6.2 % of their pixels are ignored, those of the values 255',
        f'{folder}: in these masks, 1 of 3 classes do not occur: c',
    ]


def test_errors_of_masks_advise_no_option_that_train_lacks(roads):
    config = roads.write()
    for change in (labelme, lambda mask: Image.fromarray(np.full_like(mask, 7))):
        store(roads, change)
        with pytest.raises(ValueError, match='--mask-values') as caught:
            check_data(config, ('train',))
        assert not unknown_options(caught.value)


def test_a_text_in_place_of_a_list_of_classes_is_refused(fruit):
    """mmdet numbers the letters of a text that is not the path of a file."""
    config = fruit.write()
    config.train_dataloader.dataset.metainfo = {'classes': 'apple'}
    assert dataset_of(config, 'train', pipeline=[], filter_cfg=None).metainfo['classes'] == 'apple'
    with pytest.raises(ValueError, match="is the text 'apple', of which each letter") as caught:
        check_data(config, ('train',))
    (setting,) = re.findall('--set "(.*)"', str(caught.value))
    merge_settings(config, [setting])
    assert config.train_dataloader.dataset.metainfo.classes == ['apple']


@pytest.mark.parametrize('value', [258, 1000])
def test_masks_of_16_bits_are_read_but_those_that_would_wrap(roads, value):
    store(roads, lambda mask: Image.fromarray(mask.astype(np.uint16)))
    roads.write()
    store(roads, lambda mask: Image.fromarray(np.where(mask == 1, value, 0).astype(np.uint16)))
    assert re.search(rf'0\.png is an array \(64, 64\) of \w+ from 0 to {value}; a mask', roads.refused())


@pytest.mark.filterwarnings('error')
def test_a_mask_of_floats_is_refused_without_a_warning(tmp_path):
    path = tmp_path / 'mask.tif'
    Image.fromarray(np.array([[0, np.nan], [300, 1]], np.float32)).save(path)
    with pytest.raises(ValueError, match=r'is an array \(2, 2\) of float32 from nan to nan; a mask must'):
        masks._read_mask(str(path))


def test_masks_of_colours_are_refused_with_their_colours(roads):
    colours = np.array([(0, 0, 0), (128, 64, 200)], np.uint8)
    store(roads, lambda mask: Image.fromarray(colours[(mask == 1).astype(int)]))
    assert re.search(r'\(64, 64, 3\) .* with 2 colours \(0,0,0, 128,64,200\), as CVAT writes', roads.refused())


def test_masks_of_test_time_augmentation_are_read_too(roads):
    """Its pipeline loads them in a step inside of another."""
    config = roads.write()
    config.test_dataloader.dataset.pipeline = config.tta_pipeline
    notes = check_data(config, ('test',))
    assert any('read the values of 4' in note for note in notes)
    store(roads, lambda mask: Image.fromarray(np.where(mask == 1, 7, mask).astype(np.uint8)))
    with pytest.raises(ValueError, match='has pixels of the value 7'):
        check_data(config, ('test',))


def test_objects_of_test_time_augmentation_are_checked_too(fruit):
    """Its pipeline packs a list of samples for each image."""
    config = fruit.write()
    config.update({'work_dir': 'work', 'launcher': 'none'})
    tested = prepare_test(config, 'a.pth', tta=True)
    assert isinstance(dataset_of(tested, 'test')[0]['data_samples'], list)
    check_data(tested, ('test',))


def test_images_without_masks_are_not_augmented_with_them(roads):
    """A config that predicts images alone; its `tta_pipeline` loads masks that are not there."""
    config = roads.write()
    dataset = config.test_dataloader.dataset
    dataset.data_prefix.pop('seg_map_path')
    config.test_evaluator.update(format_only=True, output_dir='predictions')
    dataset.pipeline = [step for step in dataset.pipeline if step['type'] != 'LoadAnnotations']
    assert dataset_of(config, 'test')[0]['inputs'].shape[0] == 3
    check_data(config, ('test',))
    dataset.pipeline = config.tta_pipeline
    with pytest.raises(KeyError, match='seg_map_path'):
        dataset_of(config, 'test')[0]
    with pytest.raises(
        ValueError, match=r'has no masks .* but LoadAnnotations of tta_pipeline in the config loads them'
    ):
        check_data(config, ('test',))


def test_a_config_without_classes_of_its_own_has_those_of_coco(fruit):
    """mmdet would train without a box, also if the heads have as many classes as the file."""
    config = fruit.write()
    config.train_dataloader.dataset.pop('metainfo')
    message = r'has 2 classes, apple, ripe pear, but the config has 80, person, .*, and a model of 2 classes; '
    with pytest.raises(ValueError, match=message):
        check_data(config, ('train',))


@pytest.mark.parametrize(
    'names',
    [
        ['red, round', 'pear '],
        ['7', 7],
        [3, 'pear'],
    ],
)
def test_names_of_classes_that_only_a_file_can_give(fruit, names):
    def rename(content):
        for category, name in zip(content['categories'], names, strict=True):
            category['name'] = name

    fruit.change(rename)
    file = fruit.root / TRAIN
    assert f'--classes "{file}"' in fruit.refused()
    config = fruit.write('--classes', file)
    assert list(config.train_dataloader.dataset.metainfo.classes) == names
    assert labels(config, 'train') == [0, 1, 0, 1]


def test_names_of_classes_in_a_file_that_mmengine_reads(fruit, tmp_path):
    config = fruit.write()
    (tmp_path / 'names.txt').write_text('\n'.join(CLASSES))
    for split in SPLITS:
        config[f'{split}_dataloader'].dataset.metainfo = {'classes': str(tmp_path / 'names.txt')}
    assert dataset_of(config, 'train').metainfo['classes'] == CLASSES
    assert check_data(config, SPLITS) == check_data(fruit.write(), SPLITS)


def test_names_of_classes_in_lines_of_text(roads, tmp_path):
    (tmp_path / 'classes.txt').write_text('\ufeffground, grass\r\nroad \n\n', encoding='utf-8')
    config = roads.write('--classes', tmp_path / 'classes.txt')
    assert list(config.val_dataloader.dataset.metainfo.classes) == ['ground, grass', 'road ']
    assert 'gone.txt' in roads.refused('--classes', tmp_path / 'gone.txt')


def as_roboflow(data):
    """Move data into the layout of Roboflow, with its root category and ids from 0."""

    def numbered(content):
        names = ['fruits', *CLASSES]
        content['categories'] = [{'id': index, 'name': name} for index, name in enumerate(names)]
        for annotation in content['annotations']:
            annotation['category_id'] = 1 + annotation['category_id'] // 7

    data.change(numbered)
    for file, split, name in ((TRAIN, 'train2017', 'train'), (VAL, 'val2017', 'valid')):
        (data.root / file).rename(data.root / split / '_annotations.coco.json')
        (data.root / split).rename(data.root / name)
    (data.root / 'annotations').rmdir()


def test_the_layout_of_roboflow_is_found(fruit, capsys):
    as_roboflow(fruit)
    config = fruit.write()
    assert 'found train/_annotations.coco.json, train, valid/_annotations.coco.json, valid' in capsys.readouterr().err
    assert [labels(config, split) for split in SPLITS] == [[0, 1, 0, 1]] * 3
    assert config.val_evaluator.ann_file == str(fruit.root / 'valid/_annotations.coco.json')


def labels(config, split):
    """Return the labels of all boxes of a split, as mmdet reads them, after its images have been opened."""
    dataset, found = dataset_of(config, split, pipeline=[]), []
    for index in range(len(dataset)):
        one = dataset.get_data_info(index)
        Image.open(one['img_path']).load()
        found += [instance['bbox_label'] for instance in one['instances']]
    return found


def test_two_spellings_of_a_class_are_noted(ten_fruits):
    def rename(content):
        content['categories'][1]['name'] = 'Apple '

    ten_fruits.change(rename)
    names = ten_fruits.root / 'classes.txt'
    names.write_text('apple\nApple \n')
    (note,) = [note for note in check_data(ten_fruits.write('--classes', names), SPLITS) if 'alone' in note]
    assert "'apple' and 'Apple ' differ by case or spaces alone; if they are one, give their annotations one" in note


def label_studio(data):
    """Write all in one folder, with names that contain it."""
    (data.root / TRAIN).rename(data.root / 'result.json')
    (data.root / 'train2017').rename(data.root / 'images')

    def rename(content):
        for entry in content['images']:
            entry['file_name'] = f'images/{entry["file_name"]}'

    data.change(rename, 'result.json')


def cvat(data):
    (data.root / TRAIN).rename(data.root / 'annotations/instances_default.json')
    (data.root / 'images').mkdir()
    (data.root / 'train2017').rename(data.root / 'images/default')


def pascal_voc(data):
    """Write images where Pascal VOC has them, and annotations that were converted."""
    (data.root / TRAIN).rename(data.root / 'voc.json')
    (data.root / 'VOC2012').mkdir()
    (data.root / 'train2017').rename(data.root / 'VOC2012/JPEGImages')


def half_of_roboflow(data):
    as_roboflow(data)
    shutil.rmtree(data.root / 'valid')


def unsplit(data, layout):
    """Move the training data into a layout, and remove the annotations for validation."""
    layout(data)
    (data.root / VAL).unlink(missing_ok=True)


@pytest.mark.parametrize('layout', [label_studio, cvat, pascal_voc, half_of_roboflow])
def test_detection_data_without_a_split_are_split(ten_fruits, layout):
    unsplit(ten_fruits, layout)
    assert 'has no validation data beside' in ten_fruits.refused()
    config = ten_fruits.write('--val-share', '0.2')
    files = [ten_fruits.beside / f'mine.{part}.json' for part in ('train', 'val')]
    written = [file.read_text() for file in files]
    train, val = map(json.loads, written)
    assert (len(train['images']), len(val['images'])) == (8, 2)
    assert len({image['file_name'] for image in train['images'] + val['images']}) == 10
    for part in (train, val):
        ids = {image['id'] for image in part['images']}
        assert {one['image_id'] for one in part['annotations']} == ids
    assert sorted(labels(config, 'train') + labels(config, 'val')) == [0] * 5 + [1] * 5
    assert config.val_evaluator.ann_file == str(files[1])
    ten_fruits.write('--val-share', '0.2')
    assert [file.read_text() for file in files] == written
    assert 'plum' in ten_fruits.refused('--val-share', '0.4', '--force', '--classes', 'plum')
    assert [file.read_text() for file in files] == written  # of the config that stays


@pytest.mark.parametrize(
    'folders',
    [
        ('images', 'masks'),
        ('image', 'label'),
        ('JPEGImages', 'SegmentationClass'),
    ],
)
def test_masks_without_a_split_are_split(roads, folders):
    shutil.rmtree(roads.root)
    make_masks(roads.root, 10)
    for kind, name in zip(('images', 'annotations'), folders, strict=True):
        (roads.root / kind / 'training').rename(roads.root / 'moved')
        shutil.rmtree(roads.root / kind)
        (roads.root / 'moved').rename(roads.root / name)
    config = roads.write('--val-share', '0.3')
    train, val = ((roads.beside / f'mine.{part}.txt').read_text().split() for part in ('train', 'val'))
    assert (len(train), len(val)) == (7, 3)
    assert {*train, *val} == set('0123456789')
    assert mask_values(config, 'val') == [0, 1, 255]
    notes = check_data(config, ('train', 'val'))
    for note, count in zip(notes[::2], (7, 3), strict=True):
        assert note.endswith(f': {count} masks, one for each image; read the values of {count}')


def test_data_are_split_again_beside_the_files_of_a_split(ten_fruits):
    unsplit(ten_fruits, pascal_voc)
    ten_fruits.beside = ten_fruits.root
    for _ in range(2):
        ten_fruits.write('--val-share', '0.2')
        assert len(json.loads((ten_fruits.root / 'mine.val.json').read_text())['images']) == 2


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (
            ['--classes', 'plum'],
            'in the order of the file, such as all of it: `swin-dense config ... --classes "',
        ),
        (['--val-share', '0.99'], 'leaves none for training'),
        (['--val-share', '1'], '--val-share must be between 0 and 1'),
        (['--train-images', 'images/default', '--val-images', 'images'], 'without validation data'),
        (['--data-root', 'nowhere'], "there is no folder 'nowhere'"),
    ],
)
def test_a_split_that_cannot_be_used_leaves_no_file(ten_fruits, words, message):
    unsplit(ten_fruits, cvat)
    assert message in ten_fruits.refused('--val-share', '0.2', *words)
    assert [path.name for path in ten_fruits.beside.iterdir()] == ['fruit']
    assert main(['config', DETECTOR, '--data-root', str(ten_fruits.root), '--val-share', '0.2']) == 2
    assert '--val-share needs --out' in ten_fruits.capsys.readouterr().err


def move(data, file='annotations.json'):
    """Write the training data as one file beside its folder of images."""
    (data.root / TRAIN).rename(data.root / file)
    (data.root / 'train2017').rename(data.root / 'images')
    shutil.rmtree(data.root / 'annotations')
    shutil.rmtree(data.root / 'val2017')


def named(function):
    return lambda content: [one.update(file_name=function(one['file_name'])) for one in content['images']]


def test_other_json_files_are_no_annotations(ten_fruits):
    """Files that programs write beside annotations; two files of annotations are named."""
    move(ten_fruits)
    (ten_fruits.root / 'dataset_info.json').write_text('{"name": "fruit"}')
    (ten_fruits.root / 'classes.json').write_text('["apple", "ripe pear"]')
    config = ten_fruits.write('--val-share', '0.2')
    assert len(labels(config, 'train') + labels(config, 'val')) == 10
    shutil.copy(ten_fruits.root / 'annotations.json', ten_fruits.root / 'old.json')
    for words in ([], ['--val-share', '0.2']):
        said = ten_fruits.refused(*words)
        assert re.search(r'several files of annotations, \S+/annotations\.json, \S+/old\.json: name those to use', said)


@pytest.mark.parametrize(
    ('name', 'hint'),
    [
        (lambda name: f'images\\{name}', 'images/0.jpg is there: write names relative to the folder of images, with /'),
        (lambda name: f'/data/upload/3/{name}', 'images/0.jpg is there: write names relative'),
        (lambda name: f'images%2F{name}', 'images/0.jpg is there: write names relative'),
        (lambda name: f'gone-{name}', 'it has images/, whose files end in .jpg (10), .json (1)'),
    ],
)
def test_the_first_name_that_is_missing_is_said_with_what_is_there(ten_fruits, name, hint):
    move(ten_fruits)
    ten_fruits.change(named(name), 'annotations.json')
    first = name('0.jpg')
    for words in ([], ['--val-share', '0.2']):
        said = ten_fruits.refused(*words)
        assert hint in said
        assert f'names {first!r} first, which is in no folder below' in said
    places = []
    for split in ('train', 'val'):
        places += [f'--{split}-ann', 'annotations.json', f'--{split}-images', 'images']
    said = ten_fruits.refused(*places)
    assert f'{first} (No such file or directory)' in said
    assert ('is there: write names' in said) == ('is there' in hint)
    assert not (ten_fruits.beside / 'mine.py').exists()


def test_data_of_another_layout_are_an_error_and_those_of_a_recipe_need_not_be_there(fruit, roads):
    for data in (fruit, roads):
        for folder in data.root.iterdir():
            folder.rename(data.root / f'my {folder.name}')
    assert re.search(
        r'as the recipe expects, and no other layout was found: \S+fruit has no \.json file', fruit.refused()
    )
    said = roads.refused()
    assert (
        'has no folders such as images and masks, but it has my annotations/, my images/, whose files end in .png'
        in said
    )
    fruit.root.rename(fruit.beside / 'elsewhere')
    assert f"there is no folder '{fruit.root}' (--data-root)" in fruit.refused()
    assert not (fruit.beside / 'mine.py').exists()
    config = written(fruit.beside, '--classes', ','.join(CLASSES))
    assert config.train_dataloader.dataset.metainfo.classes == tuple(CLASSES)


def test_a_split_numbers_annotations_that_cannot_be_evaluated(ten_fruits):
    move(ten_fruits)

    def number(start):
        def change(content):
            for index, one in enumerate(content['annotations']):
                one['id'] = start(index)

        return change

    for start, expected in ((lambda index: index, range(1, 11)), (lambda index: 5 + index, range(5, 15))):
        ten_fruits.change(number(start), 'annotations.json')
        ten_fruits.write('--val-share', '0.2')
        parts = [json.loads((ten_fruits.beside / f'mine.{part}.json').read_text()) for part in ('train', 'val')]
        assert sorted(one['id'] for part in parts for one in part['annotations']) == [*expected]


def test_errors_name_the_file_that_was_split(ten_fruits):
    move(ten_fruits)
    ten_fruits.change(first(bbox=[1, 2]), 'annotations.json')
    said = ten_fruits.refused('--val-share', '0.2')
    assert re.search(rf'{ten_fruits.root}/annotations\.json, in the part mine\.\w+\.json: 1 of \d annotations', said)


@pytest.mark.parametrize(
    ('train', 'val', 'message'),
    [
        (CLASSES, ['Apple', 'Ripe Pear'], 'rename Apple to apple, Ripe Pear to ripe pear'),
        (CLASSES, ['apple', 'ripe_pear'], 'rename ripe_pear to ripe pear'),
        (CLASSES, ['apple'], 'add ripe pear to its categories, also without an annotation, in the order'),
        (CLASSES, CLASSES[::-1], 'sort the list of categories in this file so'),
    ],
)
def test_training_and_validation_files_that_disagree(fruit, train, val, message):
    """The file to evaluate follows the training data; with its own classes, the training file refuses them."""

    def categories(names):
        def change(content):
            ids = {name.lower(): key for name, key in zip(CLASSES, (3, 7), strict=True)}
            content['categories'] = [{'id': ids[name.lower().replace('_', ' ')], 'name': name} for name in names]
            content['annotations'] = [
                one
                for one in content['annotations']
                if one['category_id'] in {ids[name.lower().replace('_', ' ')] for name in names}
            ]

        return change

    fruit.change(categories(train), TRAIN)
    fruit.change(categories(val), VAL)
    said = fruit.refused()
    assert message in said
    assert f'{fruit.root / VAL} has' in said
    assert f'those of the training data in {fruit.root / TRAIN}' in said
    assert f'"{",".join(train)}"' in said
    if val != ['apple']:  # classes that lack one of the file are a choice
        assert f'--classes "{",".join(train)}"' in fruit.refused('--classes', ','.join(val))


def test_files_that_agree_get_the_same_advice(fruit):
    """The option is wrong, not the file to evaluate: its categories need no sorting."""
    said = fruit.refused('--classes', ','.join(CLASSES[::-1]))
    assert said.count('name those to train with, in the order of the file') == 2
    assert said.count(f'--classes "{",".join(CLASSES)}"') == 2
    assert 'sort the list' not in said
    assert 'those of the training data' not in said


def reversed_classes(entry):
    """Return a data set of the same images whose classes are reversed, in its file and in its ``metainfo``."""
    path = Path(entry.data_root, entry.ann_file)
    content = json.loads(path.read_text())
    content['categories'].reverse()
    other = path.with_suffix('.reversed.json')
    other.write_text(json.dumps(content))
    return {**entry, 'ann_file': str(other), 'metainfo': {'classes': CLASSES[::-1]}}


def test_data_sets_that_number_the_classes_differently_are_refused(fruit):
    """Each agrees with its own file, so that mmdet trains on exchanged classes, or evaluates them, without an error."""
    config = fruit.write()
    config.val_dataloader.dataset = reversed_classes(config.val_dataloader.dataset)
    assert [labels(config, split) for split in ('train', 'val')] == [[0, 1, 0, 1], [1, 0, 1, 0]]
    message = "class 0, counted from 0, is 'ripe pear' in {}, but 'apple' in {}: ".format
    with pytest.raises(ValueError, match=re.escape(message('val_dataloader.dataset', 'train_dataloader.dataset'))):
        check_data(config, ('train', 'val'))
    config = fruit.write()
    parts = [config.train_dataloader.dataset, reversed_classes(config.train_dataloader.dataset)]
    config.train_dataloader.dataset = {'type': 'ConcatDataset', 'datasets': parts}
    both = (f'train_dataloader.dataset.datasets.{index}' for index in (1, 0))
    with pytest.raises(ValueError, match=re.escape(message(*both))):
        check_data(config, ('train',))


def test_a_checkpoint_that_numbers_the_classes_differently_is_not_tested(fruit):
    config = fruit.write()
    assert check_data(config, ('test',), trained=CLASSES) == check_data(config, ('test',))
    with pytest.raises(ValueError, match=r"'apple' in test_dataloader.dataset, but 'ripe pear' in the checkpoint: "):
        check_data(config, ('test',), trained=CLASSES[::-1])
    notes = check_data(config, ('test',), trained=['Apple', 'ripe pear'])
    assert notes[0].endswith(
        "is 'apple' in test_dataloader.dataset, but 'Apple' in the checkpoint; the model takes them for one class"
    )


def test_a_training_file_that_lacks_a_class_is_to_be_completed(fruit):
    def drop_pear(content):
        content['categories'].pop()
        content['annotations'] = content['annotations'][::2]

    fruit.change(drop_pear, TRAIN)
    said = fruit.refused()
    assert 'add ripe pear to its categories, also without an annotation, in the order "apple,ripe pear"' in said


@pytest.mark.parametrize('name', ['', '.', '..'])
def test_a_folder_is_no_image(fruit, name):
    fruit.change(image(1, file_name=name), TRAIN)
    assert re.search(r'1 of them missing: \S+ \(no file\)', fruit.refused())


def test_a_box_beyond_a_float_is_one_error(fruit):
    fruit.change(first(bbox=[10**400, 1, 2, 3]))
    assert 'bbox must be x, y, width and height' in fruit.refused()


@pytest.mark.parametrize(
    ('settings', 'is_said'),
    [
        (['model.backbone.frozen_stages=2'], True),
        (['model.backbone.frozen_stages=0'], True),
        (['model.backbone.frozen_stages=-1'], False),
        (['model.backbone.frozen_stages=2', 'load_from=a.pth'], False),
        (['model.backbone.frozen_stages=2', 'resume=True'], False),
        (
            ["model.backbone.init_cfg={'type': 'Pretrained', 'checkpoint': 'a.pth'}", 'model.backbone.frozen_stages=2'],
            False,
        ),
    ],
)
def test_frozen_stages_that_stay_random_are_said(fruit, settings, is_said):
    """A recipe that freezes stages, without the checkpoint that it downloads, trains on noise."""
    config = fruit.write('--set', 'model.backbone.init_cfg=None', *settings)
    notes = check_data(config, ('train', 'val'))
    assert ('the frozen stages stay random' in ''.join(notes)) == is_said
    assert 'stay random' not in ''.join(check_data(config, ('test',)))
