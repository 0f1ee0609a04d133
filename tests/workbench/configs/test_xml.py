"""Annotations of Pascal VOC as mmdet reads them: what it drops is said with a number, what stops it with the file."""

import numpy as np
import pytest
from mmengine.config import ConfigDict
from PIL import Image

from swin_dense.workbench.recipes.files import load_recipe
from tests.workbench.configs.data import check_data, dataset_of

CLASSES = ('apple', 'pear')
COUNT = 4
XML = (
    '<annotation><size><width>64</width><height>48</height></size><object><name>{name}</name><difficult>0</difficult>'
    '<bndbox><xmin>9</xmin><ymin>5</ymin><xmax>40</xmax><ymax>30</ymax></bndbox></object></annotation>'
)


class VOC:
    """A folder in the layout of Pascal VOC, with a config of a detector that reads it."""

    def __init__(self, root):
        self.root = root
        for folder in ('JPEGImages', 'Annotations', 'ImageSets/Main'):
            (root / folder).mkdir(parents=True)
        for number in range(COUNT):
            pixels = np.random.default_rng(number).integers(0, 255, (48, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / 'JPEGImages' / f'{number}.jpg')
            self.file(number).write_text(XML.format(name=CLASSES[number % 2]))
        (root / 'ImageSets' / 'Main' / 'all.txt').write_text('\n'.join(map(str, range(COUNT))) + '\n')
        self.config = load_recipe('faster-rcnn_swin-t-p4-w7_fpn_small_coco')
        for split in ('train', 'val', 'test'):
            dataset = self.config[f'{split}_dataloader'].dataset
            self.config[f'{split}_dataloader'].dataset = ConfigDict(
                type='VOCDataset',
                data_root=f'{root}/',
                ann_file='ImageSets/Main/all.txt',
                data_prefix={'sub_data_root': ''},
                metainfo={'classes': CLASSES},
                pipeline=dataset.pipeline,
                **({'test_mode': True} if split != 'train' else {'filter_cfg': dict(dataset.filter_cfg)}),
            )
        self.config.model.roi_head.bbox_head.num_classes = 2
        self.config.val_evaluator = self.config.test_evaluator = ConfigDict(type='VOCMetric', metric='mAP')

    def file(self, number):
        return self.root / 'Annotations' / f'{number}.xml'

    def change(self, old, new, *numbers):
        for number in numbers:
            self.file(number).write_text(self.file(number).read_text().replace(old, new))

    def notes(self, split='train'):
        listed = f'{self.root}/ImageSets/Main/all.txt: '
        return [note.removeprefix(listed) for note in check_data(self.config, (split,))]

    def instances(self):
        built = dataset_of(self.config, 'train', pipeline=[])
        return [len(built[index]['instances']) for index in range(len(built))]


@pytest.fixture
def voc(tmp_path):
    return VOC(tmp_path / 'fruit')


@pytest.mark.parametrize('split', ['train', 'val', 'test'])
def test_a_whole_data_set(voc, split):
    assert voc.notes(split) == ['4 images, 4 objects']
    assert voc.instances() == [1, 1, 1, 1]


def test_names_that_are_no_class_are_counted_and_named(voc):
    voc.change('apple', 'Apple', 0)
    assert voc.notes()[:2] == [
        '4 images, 4 objects',
        '1 of 4 objects are not used, of names that are no class: Apple (1)',
    ]
    assert voc.notes()[2].startswith('mmdet leaves out 1 of 4 images, by filter_cfg=')
    assert voc.instances() == [1, 1, 1]
    voc.change('apple', 'plum', 2)
    assert '1 of 2 classes have no box: apple' in voc.notes()


def test_no_object_of_a_class(voc):
    """mmdet would begin, and find no image."""
    voc.change('<name>', '<name> ', *range(COUNT))
    with pytest.raises(
        ValueError, match=r'none of the 4 objects in 4 files, .* is of a class, apple, pear, but of names'
    ):
        voc.notes()
    assert '4 of 4 objects are not used, of names that are no class:  apple (2),  pear (2)' in voc.notes('val')


def test_images_with_other_endings(voc):
    """mmdet would raise FileNotFoundError for the first of them in the middle of an epoch."""
    (voc.root / 'JPEGImages' / '3.jpg').rename(voc.root / 'JPEGImages' / '3.png')
    with pytest.raises(ValueError, match=r'of which 1 are missing: .*3\.jpg .*; mmdet reads names that end in \.jpg'):
        voc.notes()


@pytest.mark.parametrize(
    ('old', 'new', 'message'),
    [
        ('<xmax>40</xmax>', '', r'1\.xml \(AttributeError: .*; it needs'),
        ('<width>64</width>', '<width>64.0</width>', r'1\.xml \(ValueError: '),
        ('</annotation>', '', r'1\.xml \(ParseError: no element found'),
        ('<xmax>40', '<xmax>0.6', r'1 of 4 boxes have no area, such as that from 8, 4 to -1, 29 in .*1\.xml'),
    ],
)
def test_files_that_stop_mmdet_are_named(voc, old, new, message):
    voc.change(old, new, 1)
    with pytest.raises(ValueError, match=message):
        voc.notes()


def test_sizes_that_are_not_written(voc):
    """mmdet leaves out images of a size of 0, as some tools write it, without a word."""
    voc.change('<width>64<', '<width>0<', 1, 3)
    assert any(note.startswith('mmdet leaves out 2 of 4 images, by filter_cfg=') for note in voc.notes())
    assert len(voc.instances()) == 2
    voc.change('<width>64<', '<width>0<', 0, 2)
    with pytest.raises(ValueError, match='would leave out 4 of 4 images'):
        voc.notes()


def test_difficult_objects_are_counted(voc):
    voc.change('<difficult>0', '<difficult>1', 2)
    assert "mmdet does not train on 1 of 4 boxes, those marked 'difficult'" in voc.notes()


def test_another_number_of_classes_than_the_heads(voc):
    voc.config.train_dataloader.dataset.pop('metainfo')
    with pytest.raises(
        ValueError, match=r'has 20 classes, aeroplane, .*, but the model has 2; set the names with --set'
    ):
        voc.notes()


def test_data_sets_of_other_kinds_are_said_not_to_be_looked_at(voc):
    voc.config.train_dataloader.dataset.type = 'CrowdHumanDataset'
    assert voc.notes() == ['train_dataloader.dataset: the annotations of a CrowdHumanDataset are not looked at']
