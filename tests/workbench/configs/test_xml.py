"""Annotations of Pascal VOC as mmdet reads them: what it drops is said with a number, what stops it with the file."""

import re

import numpy as np
import pytest
from mmdet.datasets import BaseDetDataset
from mmengine.config import ConfigDict
from mmengine.registry import DATASETS
from PIL import Image

from swin_dense.workbench.checking import hints
from swin_dense.workbench.checking.data import check_data as check_all
from swin_dense.workbench.configs.experiment import Experiment
from swin_dense.workbench.recipes.files import load_recipe
from tests.workbench.configs.data import check_data, dataset_of

CLASSES = ('apple', 'pear')
COUNT = 4
XML = (
    '<annotation><size><width>64</width><height>48</height></size><object><name>{name}</name><difficult>0</difficult>'
    '<bndbox><xmin>9</xmin><ymin>5</ymin><xmax>40</xmax><ymax>30</ymax></bndbox></object></annotation>'
)
# Corners of a box that is wider than its image is high, with y before x.
SWAPPED = '<xmin>5</xmin><ymin>9</ymin><xmax>30</xmax><ymax>60<'


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
    assert voc.notes(split) == ['4 images, 0 without annotations, 4 annotations']
    assert voc.instances() == [1, 1, 1, 1]


def test_names_that_are_no_class_are_counted_and_named(voc):
    voc.change('apple', 'fig', 0)
    assert voc.notes()[:2] == [
        '4 images, 0 without annotations, 4 annotations',
        '1 of 4 annotations are not used, of names that are no class: fig (1)',
    ]
    assert voc.notes()[2].startswith('mmdet uses 3 of 4 images and leaves out 1 without an annotation of the classes')
    assert voc.instances() == [1, 1, 1]
    voc.change('apple', 'plum', 2)
    assert '1 of 2 classes have no box: apple' in voc.notes()
    voc.notes('val')
    checked = check_all(Experiment(voc.config), ('val',))
    assert [(one.objects, one.used_objects) for one in checked.used] == [(4, 2)]


@pytest.mark.parametrize('split', ['train', 'val'])
@pytest.mark.parametrize('other', ['Apple', 'apple '])
def test_names_that_differ_by_case_or_spaces_are_an_error(voc, split, other):
    voc.change('apple', other, 0)
    with pytest.raises(ValueError, match=rf"1 of 4 annotations .*'{other}' for 'apple': write the same name in"):
        voc.notes(split)


def test_no_object_of_a_class(voc):
    """mmdet would begin, and find no image."""
    voc.change('<name>', '<name>wild ', *range(COUNT))
    with pytest.raises(
        ValueError, match=r'none of 4 annotations is of a class, apple, pear; 4 of 4 annotations are not used, of names'
    ):
        voc.notes()
    with pytest.raises(ValueError, match=r'score mAP 0\.000: it misses 4 of classes that the training'):
        voc.notes('val')


def test_images_with_other_endings(voc):
    """mmdet would raise FileNotFoundError for the first of them in the middle of an epoch."""
    (voc.root / 'JPEGImages' / '3.jpg').rename(voc.root / 'JPEGImages' / '3.png')
    with pytest.raises(ValueError, match=r'1 of them missing: .*3\.jpg .*; mmdet.* read names that end in \.jpg'):
        voc.notes()


@pytest.mark.parametrize(
    ('old', 'new', 'message'),
    [
        ('<xmax>40</xmax>', '', r'AttributeError: .*1\.xml.*for each object name and bndbox'),
        ('<width>64</width>', '<width>64.0</width>', r'ValueError: .*1\.xml'),
        ('</annotation>', '', r'ParseError: no element found.*1\.xml'),
        ('<xmax>40', '<xmax>0.6', r'1 of 4 boxes have no area, such as that from 8, 4 to -1, 29 .*1\.jpg'),
    ],
)
def test_files_that_stop_mmdet_are_named(voc, old, new, message):
    voc.change(old, new, 1)
    with pytest.raises(ValueError, match=message):
        voc.notes()


def test_sizes_that_are_not_written(voc):
    """mmdet leaves out images of a size of 0, as some tools write it, without a word."""
    voc.change('<width>64<', '<width>0<', 1, 3)
    assert len(voc.instances()) == 2
    message = r'2 of 4 checked images .*1\.jpg is stated as 0 x 48 pixels, but is read as 64 x 48; .* write its size'
    with pytest.raises(ValueError, match=message):
        voc.notes()
    voc.change('<size><width>0</width><height>48</height></size>', '', 1, 3)
    assert voc.notes() == ['4 images, 0 without annotations, 4 annotations']
    assert len(voc.instances()) == 4


@pytest.mark.parametrize(
    ('lines', 'file'),
    [
        ('0.jpg\n1.jpg\n', '0.jpg'),
        ('0\n1  -1\n2   1\n', '1  -1'),
        ('0\n9\n', '9'),
    ],
)
def test_lines_of_a_list_that_name_no_annotations(voc, lines, file):
    (voc.root / 'ImageSets/Main/all.txt').write_text(lines)
    absent = r'all\.txt: the framework cannot read it \(FileNotFoundError: .* No such file or directory: '
    cure = r'each line .* is the name of an \.xml file, without an ending or a column; add the file, or correct'
    with pytest.raises(ValueError, match=rf"{absent}'\S+/Annotations/{re.escape(file)}\.xml'.*: {cure}"):
        voc.notes()


def test_a_missing_file_of_another_format_gets_no_advice_on_lists_of_pascal_voc():
    error = FileNotFoundError(2, 'No such file or directory', 'boxes/9.csv')
    assert hints.hint_on(error, hints.HINTS_ON_READING) == ''


def test_corners_with_y_before_x(voc):
    voc.change('<xmin>9</xmin><ymin>5</ymin><xmax>40</xmax><ymax>30<', SWAPPED, *range(COUNT))
    with pytest.raises(
        ValueError, match=r"4 of 4 boxes, such as .*'ymin': 9\.0.* read as y1, x1, y2, x2; write x1, y1"
    ):
        voc.notes('val')


def test_difficult_objects_are_counted(voc):
    voc.change('<difficult>0', '<difficult>1', 2)
    assert "mmdet does not train on 1 of 4 boxes (25 %): 1 marked 'difficult'" in voc.notes()


def test_another_number_of_classes_than_the_heads(voc):
    voc.config.train_dataloader.dataset.pop('metainfo')
    with pytest.raises(
        ValueError, match=r'has 20 .*model has 2: --set model.roi_head.bbox_head.num_classes=20'
    ) as caught:
        voc.notes()
    assert """--set "train_dataloader.dataset.metainfo.classes=['apple', 'pear']\"""" in str(caught.value)


def test_data_sets_of_another_format_are_what_they_yield(voc):
    """A data set of one's own, in a format that is read by itself alone."""

    class Lines(BaseDetDataset):
        METAINFO = {'classes': CLASSES}  # noqa: RUF012
        bottom = 4

        def load_data_list(self):
            data = []
            for number in range(COUNT):
                one = {'bbox': [8.0, 4, 39, 29 if number else self.bottom], 'bbox_label': 0, 'ignore_flag': 0}
                path = f'{voc.root}/JPEGImages/{number}.jpg'
                data.append({'img_id': number, 'img_path': path, 'height': 48, 'width': 64, 'instances': [one]})
            return data

    DATASETS.register_module(name='Lines', module=Lines)
    try:
        dataset = voc.config.train_dataloader.dataset
        dataset.type = 'Lines'
        with pytest.raises(ValueError, match=r'1 of 4 boxes have no area, .* from 8, 4 to 39, 4 .*0\.jpg'):
            voc.notes()
        Lines.bottom = 29
        assert voc.notes()[0] == '4 images, 0 without annotations, 4 annotations'
        (voc.root / 'JPEGImages/2.jpg').unlink()
        with pytest.raises(ValueError, match=r'2\.jpg'):
            voc.notes()
    finally:
        DATASETS.module_dict.pop('Lines')
