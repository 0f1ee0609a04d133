"""Small custom data sets in the layouts of COCO, ADE20K and CamVid."""

import json

import numpy as np
from PIL import Image

from swin_dense.commands._main import main

CLASSES = ['apple', 'ripe pear']
SIDE = 64
DETECTOR, SEGMENTOR = 'mask-rcnn_swin-demo_fpn', 'upernet_swin-demo'
TRAIN, VAL = 'annotations/instances_train2017.json', 'annotations/instances_val2017.json'
SPLITS = ('train', 'val', 'test')


def written(tmp_path, *arguments, name=DETECTOR, status=0):
    """Run `swin-dense config`, expect an exit status, and return the config that it wrote."""
    from mmengine.config import Config  # which make_coco does not need

    out = tmp_path / 'mine.py'
    assert main(['config', str(name), '--out', str(out), '--force', *map(str, arguments)]) == status
    return Config.fromfile(out) if status == 0 else None


def check_data(config, splits, every_image=False, trained=()):
    """Look at the data of a config, as the commands do."""
    from swin_dense.workbench.checking import data as checking
    from swin_dense.workbench.configs import experiment

    checked = checking.check_data(experiment.Experiment(config), splits, every_image, trained)
    checked.raise_errors()
    return checked.notes


class OwnData:
    """A data set in a folder of its own, with the words of `swin-dense config` for it."""

    def __init__(self, root, recipe, capsys, *words):
        self.root, self.recipe, self.capsys = root, recipe, capsys
        self.words = ['--data-root', root, *words]
        self.beside = root.parent  # where the config is written

    def write(self, *words, **options):
        return written(
            self.beside,
            *self.words,
            *words,
            **{'name': self.recipe, **options},
        )

    def refused(self, *words):
        self.capsys.readouterr()
        self.write(*words, status=2)
        return self.capsys.readouterr().err

    def change(self, function, *files):
        for file in files or (TRAIN, VAL):
            path = self.root / file
            content = json.loads(path.read_text())
            function(content)
            path.write_text(json.dumps(content))


def make_coco(root, count=4):
    """Write images with one rectangle each, of alternating classes; category ids do not start at 0 and have gaps."""
    generator = np.random.default_rng(0)
    categories = [{'id': 3, 'name': CLASSES[0]}, {'id': 7, 'name': CLASSES[1]}]
    (root / 'annotations').mkdir(parents=True)
    for split in ('train2017', 'val2017'):
        (root / split).mkdir()
        images, annotations = [], []
        for index in range(count):
            left, top, width, height = 8 + index, 12, 24, 20
            right, bottom = left + width, top + height
            pixels = generator.integers(0, 99, (SIDE, SIDE, 3), dtype=np.uint8)
            pixels[top:bottom, left:right] = (220, 60 * (index % 2), 30)
            Image.fromarray(pixels).save(root / split / f'{index}.jpg')
            images.append({'id': index, 'file_name': f'{index}.jpg', 'height': SIDE, 'width': SIDE})
            ids = {'id': index + 1, 'image_id': index, 'category_id': categories[index % 2]['id']}
            place = {'bbox': [left, top, width, height], 'area': width * height, 'iscrowd': 0}
            polygon = [left, top, right, top, right, bottom, left, bottom]
            annotations.append({**ids, **place, 'segmentation': [polygon]})
        content = {'images': images, 'annotations': annotations, 'categories': categories}
        (root / 'annotations' / f'instances_{split}.json').write_text(json.dumps(content))
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
            cells = generator.integers(
                0,
                12,
                (6, 8),
                dtype=np.uint8,
            )
            cells[0, 0] = 11
            mask = np.kron(cells, np.ones((12, 12), np.uint8))
            name = f'0001TP_{index:06}'
            Image.fromarray(np.stack([mask * 20, 255 - mask * 20, mask * 10], -1)).save(root / split / f'{name}.png')
            Image.fromarray(mask).save(root / f'{split}annot' / f'{name}{ending}.png')
    return root


def dataset_of(config, split, **changes):
    from mmengine.registry import DATASETS, init_default_scope

    init_default_scope(config.default_scope)
    return DATASETS.build({**config[f'{split}_dataloader'].dataset, **changes})


def mask_values(config, split='train'):
    """Return the values in the first mask of a split, as mmseg loads it."""
    pipeline = config[f'{split}_dataloader'].dataset.pipeline
    loading = [step for step in pipeline if step['type'].startswith(('Load', 'Map', 'Ignore'))]
    return np.unique(dataset_of(config, split, pipeline=loading)[0]['gt_seg_map']).tolist()
