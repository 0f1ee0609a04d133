"""What the look before training says, beside the data sets, loaders and metrics of mmdet and mmseg themselves."""

import json
import re

import cv2
import numpy as np
import pytest
import tifffile
from mmengine.config import Config
from mmengine.registry import DATASETS, TRANSFORMS, init_default_scope
from PIL import Image
from pycocotools import mask as mask_tools

from swin_dense.workbench.checking.images import check_images
from swin_dense.workbench.checking.masks import check_masks
from swin_dense.workbench.checking.round_trip import check_objects
from swin_dense.workbench.checking.stated import read_source
from swin_dense.workbench.configs.experiment import DataSet, Experiment

LOAD = {'type': 'LoadImageFromFile', 'backend_args': None}
NAMES = ('apple', 'pear')


@pytest.fixture(autouse=True)
def scope():
    init_default_scope('mmdet')


def coco_config(**changes):
    """Return a config of a detector of two classes, and its data set."""
    pipeline = [LOAD, {'type': 'LoadAnnotations', 'with_bbox': True}]
    dataset = {
        'type': 'CocoDataset',
        'ann_file': 'a.json',
        'data_prefix': {'img': ''},
        'metainfo': {'classes': NAMES},
        'pipeline': pipeline,
        **changes,
    }
    model = {'type': 'FasterRCNN', 'roi_head': {'bbox_head': {'num_classes': 2}}}
    config = Config({'model': model, 'default_scope': 'mmdet', 'train_dataloader': {'dataset': dataset}})
    return config, config.train_dataloader.dataset


def notes_on(config, dataset, is_evaluated):
    """Return the notes of ``check_objects`` on a data set of a config."""
    split = 'val' if is_evaluated else 'train'
    data = DataSet(Experiment(config), dataset, split, f'{split}_dataloader.dataset')
    return check_objects(data, read_source(data)).notes


def random_content(root, generator):
    """Write images of several sizes, and return annotations of every kind that mmdet leaves out or keeps."""
    images, annotations = [], []
    for key in range(12):
        width, height = generator.choice([20, 31, 32, 48], 2).tolist()
        Image.new('RGB', (width, height)).save(root / f'{key}.png')
        images.append({'id': key, 'file_name': f'{key}.png', 'width': width, 'height': height})
        for _ in range(generator.integers(0, 3)):
            left = 60 if len(annotations) % 8 == 0 else generator.choice([-0.25, 2, 9.5])  # few outside of their image
            box = [left, 3, generator.choice([0.5, 1, 8, 30]), 9]
            annotations.append(
                {
                    'id': len(annotations) + 1,
                    'image_id': key,
                    'category_id': int(generator.choice([1, 2, 3], p=[0.5, 0.3, 0.2])),
                    'bbox': list(map(float, box)),
                    'area': float(generator.choice([0, 9, 90], p=[0.1, 0.4, 0.5])),
                    'iscrowd': int(generator.random() < 0.1),
                    'ignore': int(generator.random() < 0.1),
                }
            )
    categories = [{'id': index, 'name': name} for index, name in enumerate((*NAMES, 'leaf'), 1)]
    return {'images': images, 'annotations': annotations, 'categories': categories}


def numbers(notes, pattern):
    """Return the numbers of a pattern in the notes, or None."""
    found = [match for note in notes if (match := re.search(pattern, note))]
    return [int(number) for number in found[0].groups()] if found else None


@pytest.mark.parametrize(
    'filters',
    [
        {},
        {'filter_cfg': {'filter_empty_gt': True}},
        {'filter_cfg': {'filter_empty_gt': True, 'min_size': 32}},
        {'filter_cfg': {'min_size': 32}, 'indices': 3},
        {'filter_cfg': {'filter_empty_gt': True, 'min_size': 32}, 'indices': -2},
        {'filter_cfg': {'filter_empty_gt': True, 'min_size': 32}, 'indices': [0]},
        {'filter_cfg': {'filter_empty_gt': True, 'min_size': 32}, 'test_mode': True},
    ],
)
def test_images_boxes_and_classes_that_mmdet_trains_on(tmp_path, filters):
    generator = np.random.default_rng(0)
    for _ in range(3):
        content = random_content(tmp_path, generator)
        (tmp_path / 'a.json').write_text(json.dumps(content))
        config, dataset = coco_config(data_root=str(tmp_path), **filters)
        notes = notes_on(config, dataset, False)
        built = DATASETS.build({**dataset, 'pipeline': []})
        used = numbers(notes, r'mmdet uses (\d+) of (\d+) images') or [12, 12]
        assert used == [len(built), 12]
        # Of all images, those left out included.
        whole = DATASETS.build({**dataset, 'pipeline': [], 'filter_cfg': None, 'indices': None})
        instances = [one for index in range(len(whole)) for one in whole.get_data_info(index)['instances']]
        trained = [one for one in instances if not one['ignore_flag']]
        classes = [one for one in content['annotations'] if one['category_id'] != 3]
        left_out, boxes = numbers(notes, r'does not train on (\d+) of (\d+) boxes') or [0, len(classes)]
        assert (boxes, boxes - left_out) == (len(classes), len(trained))
        unused = numbers(notes, r'(\d+) of \d+ annotations are not used') or [0]
        assert unused == [len(content['annotations']) - len(classes)]
        absent = {*range(2)} - {one['bbox_label'] for one in trained}
        assert (numbers(notes, r'(\d+) of 2 classes have no box') or [0]) == [len(absent)]


@pytest.mark.parametrize(('side', 'with_boxes'), [(24, 10), (64, 0)])
def test_no_image_that_is_left_is_an_error(tmp_path, side, with_boxes):
    content = random_content(tmp_path, np.random.default_rng(0))
    for one in content['images']:
        one.update(width=side, height=side)
        Image.new('RGB', (side, side)).save(tmp_path / one['file_name'])
    keys = range(with_boxes) if with_boxes else []
    box = {'category_id': 1, 'bbox': [2, 2, 9, 9], 'area': 81, 'iscrowd': 0}
    content['annotations'] = [{**box, 'id': key + 1, 'image_id': key} for key in keys]
    content['annotations'].append({**box, 'id': 99, 'image_id': 0, 'category_id': 3})
    (tmp_path / 'a.json').write_text(json.dumps(content))
    filters = {'filter_empty_gt': True, 'min_size': 32}
    config, dataset = coco_config(data_root=str(tmp_path), filter_cfg=filters)
    message = 'mmdet would leave out all 12 images' if with_boxes else 'none of 1 annotations is of a class'
    with pytest.raises(ValueError, match=message):
        notes_on(config, dataset, False)
    with pytest.raises((ValueError, AssertionError)):
        DATASETS.build({**dataset, 'pipeline': []})
    config, dataset = coco_config(data_root=str(tmp_path))
    assert len(DATASETS.build({**dataset, 'pipeline': []})) == 12
    if with_boxes:
        notes_on(config, dataset, False)


def forms_of(mask, polygon):
    """Return a mask as polygons, with one that mmdet leaves out, and as both forms of run lengths."""
    text = mask_tools.encode(np.asfortranarray(mask.astype(np.uint8)))
    size = list(mask.shape)
    changes = np.flatnonzero(np.diff(mask.ravel(order='F').astype(int), prepend=0, append=0))
    lengths = np.diff(changes, prepend=0, append=mask.size).tolist()
    return {
        'polygons': ([polygon], 0),
        'polygons and a piece': ([polygon, polygon[:4]], 1),
        'text': ({'size': size, 'counts': text['counts'].decode()}, 0),
        'list': ({'size': size, 'counts': lengths}, 0),
    }


@pytest.mark.parametrize('form', ['polygons', 'polygons and a piece', 'text', 'list'])
def test_masks_are_those_that_mmdet_loads(tmp_path, form):
    mask = np.zeros((40, 56), bool)
    mask[8:30, 12:34] = True
    segmentation, pieces = forms_of(mask, [12, 8, 34, 8, 34, 30, 12, 30])[form]
    Image.new('RGB', (56, 40)).save(tmp_path / '0.png')
    one = {'id': 1, 'image_id': 1, 'category_id': 1, 'bbox': [12, 8, 22, 22], 'area': 484, 'iscrowd': 0}
    content = {
        'images': [{'id': 1, 'file_name': '0.png', 'width': 56, 'height': 40}],
        'annotations': [{**one, 'segmentation': segmentation}],
        'categories': [{'id': 1, 'name': 'apple'}, {'id': 2, 'name': 'pear'}],
    }
    (tmp_path / 'a.json').write_text(json.dumps(content))
    pipeline = [LOAD, {'type': 'LoadAnnotations', 'with_bbox': True, 'with_mask': True}]
    config, dataset = coco_config(data_root=str(tmp_path), pipeline=pipeline)
    notes = notes_on(config, dataset, False)
    loaded = DATASETS.build(dict(dataset))[0]['gt_masks'].masks[0]
    assert (loaded == mask).all()
    assert (numbers(notes, r'leaves out (\d+) polygons') or [0]) == [pieces]
    content['annotations'][0]['bbox'] = [12, 8, 22, 16]
    (tmp_path / 'a.json').write_text(json.dumps(content))
    rows = np.flatnonzero(loaded.any(1))
    assert numbers(notes_on(config, dataset, False), r'by up to (\d+) pixels') == [rows[-1] + 1 - 24]


def write_image(path, kind, bands):
    """Write an image of random values: 12 bits are stored in 16."""
    generator = np.random.default_rng(bands)
    shape = (40, 56) if bands == 1 else (40, 56, bands)
    if kind.startswith('float'):
        values = generator.random(shape).astype(kind)
    else:
        bits = int(kind)
        values = generator.integers(0, 1 << bits, shape).astype(np.uint8 if bits == 8 else np.uint16)
    if path.suffix == '.png':
        return cv2.imwrite(str(path), values)
    extra = ['unspecified'] * (bands - (3 if bands >= 3 else 1))
    tifffile.imwrite(path, values, photometric='rgb' if bands >= 3 else 'minisblack', extrasamples=extra)
    return True


TIFF = [('.tif', kind, bands) for kind in ('8', '12', '16', 'float16', 'float32') for bands in range(1, 7)]
PNG = [('.png', kind, bands) for kind in ('8', '12', '16') for bands in (1, 3, 4)]


@pytest.mark.parametrize('backend', ['cv2', 'pillow', 'tifffile'])
@pytest.mark.parametrize(('suffix', 'kind', 'bands'), [*TIFF, *PNG])
def test_bits_and_bands_that_the_loader_loses_are_said(tmp_path, backend, suffix, kind, bands):
    """The decoded image, beside what was written: nothing lost in silence, and nothing said that was not lost."""
    path = tmp_path / f'0{suffix}'
    assert write_image(path, kind, bands)
    load = {**LOAD, 'imdecode_backend': backend, 'to_float32': True}
    bits = int(kind.removeprefix('float')) if kind != '12' else 16
    try:
        image = TRANSFORMS.build({**load, 'to_float32': False})({'img_path': str(path)})['img']
    except Exception:
        with pytest.raises(ValueError, match='1 of 1 images cannot be decoded') as caught:
            check_images([str(path)], load, 1)
        if suffix == '.tif':
            scale = {'12': 4095, '16': 65535, '8': 255}.get(kind, 1)
            how = f'scale={scale}, mean=0, std=1, bands={tuple(range(bands))}'
            assert f'read them with LoadBands(normalization=dict({how}))' in str(caught.value)
        return
    _, found, notes = check_images([str(path)], load, 1)
    said = ' '.join(notes)
    assert found[str(path)].size == (56, 40)
    channels = 1 if image.ndim == 2 else image.shape[2]
    assert ('bits for each value' in said) == (image.dtype.itemsize * 8 < bits)
    if image.dtype.itemsize * 8 < bits:
        assert f'it reads the values of this one as {image.min()} to {image.max()}' in said
        if kind in ('12', '16'):
            assert f'scale={(1 << int(kind)) - 1}' in said
    has_lost = channels != bands and bands not in (1, 3)
    assert ('bands, of which LoadImageFromFile drops' in said) == has_lost
    if has_lost:
        assert f'bands={tuple(range(bands))}' in said


@pytest.mark.parametrize('suffix', ['jpg', 'png', 'webp', 'tif', 'avif'])
@pytest.mark.parametrize('shape', [(40, 56), (48, 48)])
def test_orientations_are_applied_or_not_as_the_loader_does(tmp_path, suffix, shape):
    """Sizes tell of 5 to 8, unless the image is square; of the others, and of squares, a note gives the number."""
    pixels = np.zeros((*shape, 3), np.uint8)
    pixels[: shape[0] // 2, : shape[1] // 4] = 250  # each orientation moves this part
    paths = {}
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[274] = orientation
        paths[orientation] = str(tmp_path / f'{orientation}.{suffix}')
        try:
            Image.fromarray(pixels).save(paths[orientation], exif=exif, quality=95)
        except (KeyError, OSError):
            pytest.skip(f'this Pillow does not write {suffix}')
    for color_type in ('color', 'color_ignore_orientation', 'unchanged'):
        for backend in ('cv2', 'pillow'):
            load = {**LOAD, 'color_type': color_type, 'imdecode_backend': backend}
            decode = TRANSFORMS.build(load)
            _, found, notes = check_images([*paths.values()], load, len(paths))
            hidden = {'upright': 0, 'as stored': 0}
            for orientation, path in paths.items():
                image = decode({'img_path': path})['img']
                assert found[path].size == image.shape[1::-1]
                is_stored = (image.shape == pixels.shape) and np.abs(image.astype(int) - pixels).mean() < 9
                assert found[path].is_upright == (orientation == 1 or not is_stored)
                if orientation in (2, 3, 4) or (orientation > 4 and shape[0] == shape[1]):
                    hidden['as stored' if is_stored else 'upright'] += 1
            for view, count in hidden.items():
                assert (numbers(notes, rf'(\d+) of 8 images.*are read {view}') or [0]) == [count]


@pytest.mark.parametrize('is_turned', [False, True])
def test_sizes_that_differ_without_an_orientation_do_not_blame_it(tmp_path, is_turned):
    exif = Image.Exif()
    exif[274] = 6
    Image.new('RGB', (64, 48)).save(tmp_path / '0.jpg', **({'exif': exif} if is_turned else {}))
    one = {'id': 1, 'image_id': 1, 'category_id': 1, 'bbox': [2, 2, 9, 9], 'area': 81, 'iscrowd': 0}
    content = {
        'annotations': [one],
        'categories': [{'id': 1, 'name': 'apple'}, {'id': 2, 'name': 'pear'}],
    }
    for load, size, says_exif in (
        ('color', (64, 48), is_turned),
        ('color_ignore_orientation', (48, 64), is_turned),
        ('color', (32, 24), False),
    ):
        image = {'id': 1, 'file_name': '0.jpg', 'width': size[0], 'height': size[1]}
        (tmp_path / 'a.json').write_text(json.dumps({**content, 'images': [image]}))
        config, dataset = coco_config(data_root=str(tmp_path), pipeline=[{**LOAD, 'color_type': load}])
        read = decode_size(tmp_path / '0.jpg', load)
        if read == size:
            notes_on(config, dataset, False)
            continue
        with pytest.raises(
            ValueError, match=rf'stated as {size[0]} x {size[1]} .*read as {read[0]} x {read[1]}'
        ) as caught:
            notes_on(config, dataset, False)
        assert ('EXIF' in str(caught.value)) == says_exif


def decode_size(path, color_type):
    return TRANSFORMS.build({**LOAD, 'color_type': color_type})({'img_path': str(path)})['img'].shape[1::-1]


@pytest.mark.parametrize(('reduce_zero', 'ignored'), [(False, [255]), (True, [0, 255])])
def test_pixels_that_mmseg_ignores(tmp_path, reduce_zero, ignored):
    init_default_scope('mmseg')
    generator = np.random.default_rng(0)
    for key in range(3):
        Image.new('RGB', (32, 32)).save(tmp_path / f'{key}.jpg')
        mask = generator.choice([0, 1, 2, 255], (32, 32), p=[0.25, 0.25, 0.25, 0.25]).astype(np.uint8)
        Image.fromarray(mask).save(tmp_path / f'{key}.png')
    pipeline = [LOAD, {'type': 'LoadAnnotations'}]
    names = NAMES if reduce_zero else (*NAMES, 'leaf')
    dataset = {
        'type': 'BaseSegDataset',
        'data_root': str(tmp_path),
        'data_prefix': {'img_path': '', 'seg_map_path': ''},
        'metainfo': {'classes': names},
        'reduce_zero_label': reduce_zero,
        'pipeline': pipeline,
        'indices': 2,
    }
    model = {'decode_head': {'num_classes': len(names)}}
    config = Config({'default_scope': 'mmseg', 'model': model, 'train_dataloader': {'dataset': dataset}})
    data = Experiment(config).datasets[0]
    notes = check_masks(data, read_source(data)).notes
    built = DATASETS.build({**dataset, 'indices': None})
    labels = np.stack([built[index]['gt_seg_map'] for index in range(3)])
    share = 100 * (labels == 255).mean()
    text = ', '.join(map(str, ignored))
    assert f'{share:.2g} % of their pixels are ignored, those of the values {text}' in ' '.join(notes)
    assert numbers(notes, r'mmseg uses (\d+) of (\d+) images') == [len(DATASETS.build(dataset)), 3]
