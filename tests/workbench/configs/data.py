"""Small custom data sets in the layouts of COCO, ADE20K and CamVid."""

import json

import numpy as np
from PIL import Image

from swin_dense.commands._main import main

CLASSES = ['apple', 'ripe pear']
SIDE = 64
DETECTOR, SEGMENTOR = 'mask-rcnn_swin-demo_fpn', 'upernet_swin-demo'


def written(tmp_path, *arguments, name=DETECTOR, status=0):
    """Run `swin-dense config`, expect an exit status, and return the config that it wrote."""
    from mmengine.config import Config  # which make_coco does not need

    out = tmp_path / 'mine.py'
    assert main(['config', str(name), '--out', str(out), '--force', *map(str, arguments)]) == status
    return Config.fromfile(out) if status == 0 else None


def fruit(tmp_path, count=4):
    """Write a data set by :func:`make_coco`, and return its folder and the arguments of `swin-dense config` for it."""
    root = make_coco(tmp_path / 'fruit', count)
    return root, ['--data-root', root, '--classes', ','.join(CLASSES)]


def make_coco(root, count=4):
    """Write images with one rectangle each, of alternating classes; category ids do not start at 0 and have gaps."""
    generator = np.random.default_rng(0)
    for split in ('train2017', 'val2017'):
        (root / split).mkdir(parents=True)
        images, annotations = [], []
        for index in range(count):
            pixels = generator.integers(0, 99, (SIDE, SIDE, 3), dtype=np.uint8)
            x, y, width, height = 8 + index, 12, 24, 20
            pixels[y : y + height, x : x + width] = (220, 60 * (index % 2), 30)
            Image.fromarray(pixels).save(root / split / f'{index}.jpg')
            images.append({'id': index, 'file_name': f'{index}.jpg', 'height': SIDE, 'width': SIDE})
            corners = [x, y, x + width, y, x + width, y + height, x, y + height]
            annotations.append(
                {
                    'id': index,
                    'image_id': index,
                    'category_id': 3 + 4 * (index % 2),
                    'bbox': [x, y, width, height],
                    'area': width * height,
                    'segmentation': [corners],
                    'iscrowd': 0,
                }
            )
        categories = [{'id': 3, 'name': CLASSES[0]}, {'id': 7, 'name': CLASSES[1]}]
        (root / 'annotations').mkdir(exist_ok=True)
        text = json.dumps({'images': images, 'annotations': annotations, 'categories': categories})
        (root / 'annotations' / f'instances_{split}.json').write_text(text)
    return root


def make_masks(root, count=4):
    """Write images and masks whose pixels are class indices, or 255 for ignored pixels."""
    generator = np.random.default_rng(0)
    for split in ('training', 'validation'):
        for kind in ('images', 'annotations'):
            (root / kind / split).mkdir(parents=True)
        for index in range(count):
            mask = np.zeros((SIDE, SIDE), np.uint8)
            mask[10:40, 8 + index : 40] = 1
            mask[60:] = 255
            pixels = generator.integers(0, 99, (SIDE, SIDE, 3), dtype=np.uint8) + 120 * (mask == 1)[..., None]
            Image.fromarray(pixels.astype(np.uint8)).save(root / 'images' / split / f'{index}.png')
            Image.fromarray(mask).save(root / 'annotations' / split / f'{index}.png')
    return root


def make_camvid(root, count=4, ending=''):
    """Write images and masks in the layout of CamVid: PNG files, 11 classes, 11 for unlabelled pixels."""
    generator = np.random.default_rng(0)
    for split in ('train', 'val'):
        (root / split).mkdir(parents=True)
        (root / f'{split}annot').mkdir()
        for index in range(count):
            mask = generator.integers(0, 12, (6, 8), dtype=np.uint8).repeat(12, 0).repeat(12, 1)
            mask[0, 0] = 11
            pixels = np.stack([mask * 20, 255 - mask * 20, mask * 10], -1)
            Image.fromarray(pixels).save(root / split / f'0001TP_{index:06}.png')
            Image.fromarray(mask).save(root / f'{split}annot' / f'0001TP_{index:06}{ending}.png')
    return root


def mask_values(config, split='train'):
    """Return the values in the first mask of a split, as mmseg loads it."""
    from mmengine.registry import DATASETS, init_default_scope

    init_default_scope('mmseg')
    dataset = config[f'{split}_dataloader'].dataset
    pipeline = [step for step in dataset.pipeline if step['type'].startswith(('Load', 'Map', 'Ignore'))]
    return np.unique(DATASETS.build({**dataset, 'pipeline': pipeline})[0]['gt_seg_map']).tolist()
