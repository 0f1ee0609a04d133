"""What a perfect model would score, on sound and on damaged data, by the evaluators of the frameworks."""

import codecs
import copy
import functools
import itertools
import json
import re
import shutil
import tempfile
import unicodedata
from pathlib import Path
from typing import ClassVar

import numpy as np
from mmdet.evaluation import CocoMetric
from mmengine.config import ConfigDict
from mmengine.evaluator import BaseMetric
from mmengine.registry import DATASETS, METRICS, TRANSFORMS, init_default_scope
from PIL import Image
from pycocotools.cocoeval import COCOeval

from swin_dense.commands._main import main
from swin_dense.workbench.checking import hints, question
from swin_dense.workbench.checking.data import check_data
from swin_dense.workbench.checking.perfect import Asker
from swin_dense.workbench.checking.question import PerfectScore
from swin_dense.workbench.checking.stated import read_source
from swin_dense.workbench.configs.experiment import Experiment
from swin_dense.workbench.configs.own_classes import ignore_values, map_values, set_classes
from swin_dense.workbench.recipes.files import load_recipe
from tests.workbench.configs.child import run_cases
from tests.workbench.configs.data import CLASSES, DETECTOR, SEGMENTOR, TRAIN, VAL, make_coco, make_masks
from tests.workbench.configs.test_checking import WRONG, WRONG_MASKS
from tests.workbench.configs.test_xml import VOC

BOXES = 'faster-rcnn_swin-t-p4-w7_fpn_small_coco'
NAMES = ('cell', 'dog')


@functools.cache
def recipe_of(name):
    return load_recipe(name)


def content(count=4, each=2, names=NAMES, start=1):
    """Return annotations of images with objects in rows, of alternating classes."""
    images = [
        {'id': number, 'file_name': f'{number}.jpg', 'width': 640, 'height': 480} for number in range(1, count + 1)
    ]
    annotations = []
    for image, place in itertools.product(images, range(each)):
        number = len(annotations)
        x, y = 20 + 60 * (place % 10), 20 + 25 * (place // 10)
        one = {'id': start + number, 'image_id': image['id'], 'category_id': 1 + number % len(names), 'iscrowd': 0}
        polygon = [x, y, x + 40, y, x + 40, y + 20, x, y + 20]
        annotations.append({**one, 'bbox': [x, y, 40, 20], 'area': 800, 'segmentation': [polygon]})
    categories = [{'id': number, 'name': name} for number, name in enumerate(names, 1)]
    return {'images': images, 'annotations': annotations, 'categories': categories}


class Coco:
    """A config of a detector, and its annotations of both splits: changed in place, then asked about."""

    def __init__(self, recipe=BOXES, **options):
        self.root = Path(tempfile.mkdtemp())
        self.train, self.val = content(**options), content(**options)
        self.config = copy.deepcopy(recipe_of(recipe))
        set_classes(Experiment(self.config), options.get('names', NAMES))
        for split in ('train', 'val', 'test'):
            self.data(split).data_root = f'{self.root}/'
        for split in ('val', 'test'):
            self.config[f'{split}_evaluator'].ann_file = str(self.root / VAL)

    def data(self, split):
        return self.config[f'{split}_dataloader'].dataset

    def write(self, name, annotations):
        path = self.root / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(json.dumps(annotations))
        return str(path)

    def ask(self):
        self.write(TRAIN, self.train)
        self.write(VAL, self.val)
        return ask(self.config)


def ask(config):
    """Return whether a perfect model's scores are an error, the first figure, and all words."""
    experiment = Experiment(config)
    init_default_scope(experiment.scope)
    asker = Asker(experiment)
    try:
        asker.take_training([read_source(data) for data in experiment.datasets_of(['train'])])
        asker.ask('val', [read_source(data) for data in experiment.datasets_of(['val'])])
        scores = asker.scores
    except ValueError as error:
        scores = [PerfectScore('val', problem=str(error))]
    figures = [figure for score in scores for figure in score.scores.values()]
    return [any(score.is_error for score in scores), min(figures, default=None), '\n'.join(map(str, scores))]


def coco(change, **options):
    """Return a case: a change of sound data, and the question."""

    def case():
        data = Coco(**options)
        change(data)
        return data.ask()

    return case


def each(function, of=None):
    """Return a change of each annotation of the evaluated data."""
    return lambda data: [function(one) for one in data.val['annotations'][:of]]


def masks_of(recipe=DETECTOR):
    return {'recipe': recipe}


# Evaluators, data sets and loaders of a user.


@METRICS.register_module()
class ShareFound(BaseMetric):
    """The share of boxes that were predicted exactly."""

    def process(self, data_batch, data_samples):
        for sample in data_samples:
            found = {tuple(box) for box in sample['pred_instances']['bboxes'].tolist()}
            stated = [tuple(box) for box in sample['gt_instances']['bboxes'].tolist()]
            self.results.append([box in found for box in stated])

    def compute_metrics(self, results):
        return {'share': float(np.mean([found for ones in results for found in ones]))}


@METRICS.register_module()
class FailsAlways(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.append(0)

    def compute_metrics(self, results):
        raise KeyError('pred_keypoints')


@METRICS.register_module()
class Constant(FailsAlways):
    """A metric that gives what it is told to, whatever was found."""

    def __init__(self, figures, **_):
        super().__init__()
        self.figures = dict(figures)

    def compute_metrics(self, results):
        return self.figures


@TRANSFORMS.register_module()
class LoadNothing:
    """A loader of images of its own, whose paths are no files."""

    def __init__(self, **_):
        pass

    def __call__(self, results):
        return {**results, 'img': np.zeros((480, 640, 3), np.uint8), 'img_shape': (480, 640), 'ori_shape': (480, 640)}


def register_data_set():
    from mmdet.datasets import BaseDetDataset, CocoDataset

    @DATASETS.register_module(force=True)
    class FromNothing(BaseDetDataset):
        """A data set of its own format."""

        METAINFO: ClassVar = {'classes': NAMES}

        def load_data_list(self):
            boxes = [{'bbox': [9, 9, 50, 60], 'bbox_label': 1, 'ignore_flag': 0}]
            size = {'height': 480, 'width': 640}
            return [{'img_path': f'{number}.x', 'img_id': number, 'instances': boxes, **size} for number in range(3)]

    @DATASETS.register_module(force=True)
    class Renamed(CocoDataset):
        """mmdet's own, under another name."""


def two_sets(data, evaluator):
    """Evaluate on two data sets whose images are numbered alike."""
    second = content(3, 3)
    files = [str(data.root / VAL), data.write('second/second.json', second)]
    one = data.data('val')
    sets = [one, {**one, 'ann_file': 'second/second.json', 'data_prefix': {'img': 'second'}}]
    data.config.val_dataloader.dataset = ConfigDict(type='ConcatDataset', datasets=sets)
    metrics = [{'type': 'CocoMetric', 'ann_file': file, 'metric': 'bbox'} for file in files]
    data.config.val_evaluator = evaluator(metrics)


def last_ones_wrong(data):
    """A metric that reads the file of the first set alone, whose answers have all been matched before the others."""
    for annotations in (data.train, data.val):
        annotations.update(images=annotations['images'][:1], annotations=annotations['annotations'][:1])
    second = content(1, 1)
    second['annotations'][0]['bbox'] = [300, 300, 60, 60]
    one = data.data('val')
    data.write('second/second.json', second)
    sets = [one, {**one, 'ann_file': 'second/second.json', 'data_prefix': {'img': 'second'}}]
    data.config.val_dataloader.dataset = ConfigDict(type='ConcatDataset', datasets=sets)


def several(metrics):
    return ConfigDict(type='MultiDatasetsEvaluator', dataset_prefixes=['A', 'B'], metrics=metrics)


def wrap(split, **wrapper):
    def change(data):
        data.config[f'{split}_dataloader'].dataset = ConfigDict(**wrapper, dataset=data.data(split))

    return change


def concat(data):
    data.config.train_dataloader.dataset = ConfigDict(type='ConcatDataset', datasets=[data.data('train')] * 2)


def voc(change, **metric):
    def case():
        data = VOC(Path(tempfile.mkdtemp()) / 'voc')
        data.config.val_evaluator.update(metric)
        change(data)
        return ask(data.config)

    return case


def put(data, entry):
    data.config.val_evaluator = entry


def evaluator(**changes):
    return lambda data: data.config.val_evaluator.update(changes)


def own(data, **changes):
    for split in ('train', 'val'):
        data.data(split).update(changes)


def own_loader(data):
    for split in ('train', 'val'):
        data.data(split).pipeline[0] = ConfigDict(type='LoadNothing')
        data.data(split).data_prefix = {'img': 's3://nowhere'}


def from_nothing(data):
    register_data_set()
    for split in ('train', 'val'):
        pipeline = data.data(split).pipeline
        data.config[f'{split}_dataloader'].dataset = ConfigDict(type='FromNothing', pipeline=pipeline, data_root='x')
    data.config.val_evaluator = ConfigDict(type='VOCMetric', metric='mAP')


def renamed(data):
    register_data_set()
    own(data, type='Renamed')


def crowd(data):
    """A crowd with run lengths, as COCO has them."""
    data.val['annotations'][0].update(iscrowd=1, segmentation={'size': [480, 640], 'counts': [0, 480 * 640]})


def with_instances(data):
    """COCO's metric without a file of its own compares with the data set."""
    data.config.val_evaluator.pop('ann_file')
    pack = data.data('val').pipeline[-1]
    pack.meta_keys = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'instances')


def unused_category(data):
    for annotations in (data.train, data.val):
        annotations['categories'].insert(0, {'id': 9, 'name': 'leaf'})
        annotations['annotations'].append({**annotations['annotations'][0], 'id': 99, 'category_id': 9})


SOUND = {
    'boxes': coco(lambda data: None),
    'masks': coco(lambda data: None, recipe=DETECTOR),
    'one class': coco(lambda data: None, names=('cell',)),
    'numbered from 7': coco(lambda data: None, start=7),
    'one image': coco(lambda data: None, count=1),
    'images without objects': coco(lambda data: data.val['annotations'].__delitem__(slice(2, None))),
    '150 objects of two classes': coco(
        lambda data: data.config.model.test_cfg.rcnn.update(max_per_img=300), count=2, each=150
    ),
    'a crowd with RLE': coco(crowd, recipe=DETECTOR),
    'polygons of two parts': coco(each(lambda one: one['segmentation'].append([1, 1, 9, 1, 9, 9])), recipe=DETECTOR),
    'masks as RLE': coco(each(lambda one: one.update(segmentation=rle_of(one['bbox']))), recipe=DETECTOR),
    'boxes of fractions': coco(each(lambda one: one.update(bbox=[side + 0.3 for side in one['bbox']]))),
    'small boxes': coco(each(lambda one: one.update(bbox=[*one['bbox'][:2], 1.5, 1.2], area=1.8))),
    'boxes a hundredth beyond': coco(each(lambda one: one.update(bbox=[600, 20, 40.01, 20]), of=1)),
    'an area of another size': coco(each(lambda one: one.update(area=1e9))),
    'a category that is no class': coco(unused_category),
    'RepeatDataset': coco(wrap('train', type='RepeatDataset', times=3)),
    'RepeatDataset of evaluated data': coco(wrap('val', type='RepeatDataset', times=1)),
    'ConcatDataset': coco(concat),
    'ClassBalancedDataset': coco(wrap('train', type='ClassBalancedDataset', oversample_thr=0.1)),
    'two sets with a metric each': coco(lambda data: two_sets(data, several)),
    'a list of metrics': coco(lambda data: put(data, [data.config.val_evaluator])),
    'an evaluator by name': coco(lambda data: put(data, {'type': 'Evaluator', 'metrics': data.config.val_evaluator})),
    'a metric without a file': coco(with_instances),
    'figures of each class': coco(evaluator(classwise=True)),
    'two thresholds': coco(evaluator(iou_thrs=np.array([0.5, 0.75]))),
    'more answers compared': coco(evaluator(proposal_nums=(100, 500, 1000))),
    'images left out that have no objects': coco(
        lambda data: (
            data.val['images'].append({'id': 9, 'file_name': '9.jpg', 'width': 640, 'height': 480}),
            data.data('val').update(test_mode=False, filter_cfg={'filter_empty_gt': True, 'min_size': 32}),
        )
    ),
    'a loader and addresses of its own': coco(own_loader),
    'a data set of its own': coco(from_nothing),
    'a class that inherits': coco(renamed),
    'a metric of its own': coco(lambda data: put(data, {'type': 'ShareFound'})),
    'VOC': voc(lambda data: None),
    'VOC by 11 points': voc(lambda data: None, eval_mode='11points'),
    'VOC with several thresholds': voc(lambda data: None, iou_thrs=[0.5, 0.7]),
    'VOC with a difficult object': voc(lambda data: data.change('<difficult>0', '<difficult>1', 1)),
}


def rle_of(box):
    """Return the run lengths of a box in an image of 640 x 480."""
    x, y, width, height = map(round, box)
    counts = [x * 480 + y, *[height, 480 - height] * (width - 1), height]
    return {'size': [480, 640], 'counts': [*counts, 480 * 640 - sum(counts)]}


def test_sound_data_have_no_error_and_a_perfect_score():
    results = run_cases(SOUND, lambda case: case())
    wrong = {name: result for name, result in results.items() if result[:2] not in ([False, 1.0], [False, 100.0])}
    assert not wrong


def twice(data):
    annotations = data.val['annotations']
    annotations += [{**one, 'id': 100 + one['id']} for one in annotations]


def same_file(data):
    """Frames of two videos, of one name."""
    for image in data.val['images']:
        image['file_name'] = f'{image["id"] % 2}.jpg'
    for one in data.val['annotations']:
        one['bbox'][1] += 30 * one['image_id']


def another_file(data):
    other = copy.deepcopy(data.val)
    for one in other['annotations']:
        one['bbox'][1] += 200
    data.config.val_evaluator.ann_file = data.write('other.json', other)


def other_order(data):
    data.val['categories'].reverse()
    data.data('val').metainfo = {'classes': NAMES[::-1]}


def swap_sides(one):
    one['segmentation'] = [[side + 100 for side in one['segmentation'][0]]]


def left_out(data):
    data.val['images'][0].update(height=100, width=100)
    data.data('val').update(test_mode=False, filter_cfg={'min_size': 300})


def two_spellings(data):
    """The same file as `1.jpg` and as `./1.jpg`, each with its own objects."""
    data.val['images'][1]['file_name'] = './1.jpg'
    for one in data.val['annotations'][2:4]:
        one['bbox'][1] += 300


def overlapping(data):
    """An object of the first image becomes one of 40 x 16 pixels within another of its class."""
    first, _, second = data.val['annotations'][:3]
    second.update(image_id=1, bbox=[*first['bbox'][:3], 16])


# Case, whether it is an error, the score, and what is said. The scores are those of pycocotools alone, for a file.
DAMAGED = {
    'each object twice': (coco(twice), True, 0.505, 'misses 8 that repeat another'),
    'one object twice': (
        coco(lambda data: data.val['annotations'].append({**data.val['annotations'][0], 'id': 99}), count=20),
        False,
        0.975,
        'misses 1 that repeat another .*remove the repetitions',
    ),
    'a file of two images': (coco(same_file), True, None, 'answers of files that several images name'),
    'a file of two spellings': (coco(two_spellings), True, None, 'answers of files that several images name'),
    'objects that overlap': (
        coco(overlapping),
        False,
        None,
        r'misses 1 that overlap another of their class .*\(model.test_cfg.rcnn.nms has',
    ),
    'a metric that says nothing': (
        coco(lambda data: put(data, {'type': 'Constant', 'figures': {}})),
        False,
        None,
        'no figures',
    ),
    'a metric that says the same of all': (
        coco(lambda data: put(data, {'type': 'Constant', 'figures': {'own': 1.0}})),
        False,
        1.0,
        'own 1.000; so would a model that finds nothing',
    ),
    '150 objects of a class': (
        coco(lambda data: None, count=2, each=150, names=('cell',)),
        False,
        0.663,
        'misses 100 beyond the 100 of a class that the metric compares',
    ),
    'fewer than the objects of an image': (
        coco(lambda data: data.config.model.test_cfg.rcnn.update(max_per_img=1)),
        False,
        None,
        r'misses 4 beyond the 1 that the model returns .*--set model.test_cfg.rcnn.max_per_img=2\)',
    ),
    'an id of 0': (coco(lambda data: None, start=0), True, None, "misses 1 whose id is 0, .*'id': 0"),
    'an id of 0 among others': (coco(lambda data: None, start=-2), True, None, 'misses 1 whose id is 0'),
    'another file': (
        coco(another_file),
        True,
        0.0,
        r'misses 8 because the evaluator compares with \S+other.json .*--set val_evaluator.ann_file=\S+val2017.json',
    ),
    'two sets, one metric': (
        coco(lambda data: two_sets(data, lambda metrics: ConfigDict(metrics[0]))),
        True,
        None,
        'because 7 images have 4 ids .*MultiDatasetsEvaluator',
    ),
    'two sets, one metric, wrong answers last': (
        coco(last_ones_wrong),
        True,
        None,
        'because 2 images have 1 ids .*MultiDatasetsEvaluator',
    ),
    'two sets, metrics exchanged': (coco(lambda data: two_sets(data, lambda own: several(own[::-1]))), True, None, ''),
    'images left out by size': (coco(left_out), True, None, 'misses 2 of images that the data set leaves out'),
    'two images by indices': (
        coco(lambda data: data.data('val').update(indices=2)),
        True,
        0.505,
        r'misses 4 of images .*--set val_dataloader.dataset.test_mode=True val_dataloader.dataset.indices=None',
    ),
    'another order of classes': (coco(other_order), True, 0.0, 'misses 8 of classes that have other numbers'),
    'another class': (
        coco(lambda data: data.val['categories'][0].update(name='Cell')),
        True,
        None,
        'the evaluator fails',
    ),
    'all classes in capitals': (
        coco(lambda data: [one.update(name=one['name'].upper()) for one in data.val['categories']]),
        True,
        None,
        'score nothing: it misses 8 of classes that the training data do not have',
    ),
    'a mask that covers nothing': (
        coco(each(lambda one: one.update(segmentation=[[1, 1, 1.2, 1.2, 1, 1.2]]), of=1), recipe=DETECTOR),
        True,
        None,
        'misses 1 whose mask covers no pixel',
    ),
    'corners': (
        coco(each(lambda one: one.update(bbox=[400, 300, 440, 320]), of=None), each=1),
        True,
        None,
        'misses 4 that reach beyond their image',
    ),
    'a box far beyond the image': (
        coco(each(lambda one: one.update(bbox=[600, 20, 400, 20]), of=1)),
        False,
        None,
        'misses 1 that reach beyond their image',
    ),
    'a box without area': (
        coco(each(lambda one: one.update(bbox=[9, 9, 0, 0]), of=1), count=20),
        False,
        None,
        'misses 1 whose box has no area',
    ),
    'an object to ignore': (
        coco(each(lambda one: one.update(ignore=1), of=1)),
        False,
        None,
        "misses 1 marked 'ignore'",
    ),
    'masks of two points': (
        coco(each(lambda one: one.update(segmentation=[[1, 1, 5, 5]]), of=1), recipe=DETECTOR),
        True,
        None,
        'the evaluator fails .*: remove polygons of fewer than three points',
    ),
    'no iscrowd': (coco(each(lambda one: one.pop('iscrowd'))), True, None, 'the evaluator fails .*iscrowd'),
    'ids of text': (coco(each(lambda one: one.update(id=f'a{one["id"]}'))), True, None, 'the evaluator fails'),
    'a box that is no number': (
        coco(each(lambda one: one.update(bbox=[float('nan'), 1, 2, 3]))),
        True,
        None,
        '8 of 8 annotations .*bbox must',
    ),
    'two kinds of wrong numbers': (
        coco(
            lambda data: (
                data.val['annotations'][0].update(bbox=[10**400, 1, 2, 3]),
                data.val['annotations'][1].update(segmentation={'size': [480, 640], 'counts': [5, 5]}),
            ),
            recipe=DETECTOR,
        ),
        True,
        None,
        '1 of 8 annotations .*bbox must.*; 1 of 8 annotations .*RLE as lengths that sum',
    ),
    'a list of thresholds, which mmdet cannot read': (
        coco(evaluator(iou_thrs=[0.5])),
        True,
        None,
        'the evaluator fails',
    ),
    'too few answers compared': (
        coco(evaluator(proposal_nums=(1, 10, 50))),
        True,
        -1.0,
        r'proposal_nums has \[1, 10, 50\]',
    ),
    'a metric of its own that is not perfect': (
        coco(
            lambda data: (
                data.val['annotations'][0].update(bbox=[600, 20, 400, 20]),
                put(data, {'type': 'ShareFound'}),
            )
        ),
        False,
        0.875,
        'whether that is the best value of these figures is not known',
    ),
    'answers that are not made here': (
        coco(lambda data: put(data, {'type': 'FailsAlways'})),
        False,
        None,
        'is not known: the evaluator fails',
    ),
    'nothing to find': (
        coco(lambda data: data.val.update(annotations=[])),
        True,
        None,
        'no objects of a class to find; evaluate data that have some',
    ),
    'a score that no answer reaches': (
        coco(lambda data: data.config.model.test_cfg.rcnn.update(score_thr=1.5)),
        True,
        None,
        r'misses 8 because no score of a model is above model.test_cfg.rcnn.score_thr.*score_thr=0.05',
    ),
    'no masks loaded to train with': (
        coco(lambda data: data.data('train').pipeline[1].update(with_mask=False), recipe=DETECTOR),
        True,
        None,
        r"'segm is not in results'\): it compares masks, but no step of train_dataloader.* loads them",
    ),
    'VOC: names with a space': (
        voc(lambda data: data.change('<name>', '<name> ', *range(4))),
        True,
        0.0,
        'score mAP 0.000: it misses 4 of classes that the',
    ),
    'VOC: a box without area': (
        voc(lambda data: data.change('<xmax>40', '<xmax>0.6', 1)),
        True,
        None,
        'misses 1 whose box has no area',
    ),
    'VOC: a width of 0': (
        voc(lambda data: data.change('<width>64', '<width>0', 1, 3)),
        True,
        None,
        'misses 2 that reach beyond their image',
    ),
    'VOC: no such number': (
        voc(lambda data: data.change('<xmax>40</xmax>', '', 1)),
        True,
        None,
        r'cannot read it .*Annotations/1\.xml',
    ),
    'VOC: each object twice': (voc(lambda data: each_twice(data)), True, None, 'misses 4 that repeat another'),
    'VOC: other order': (
        voc(lambda data: data.config.val_dataloader.dataset.update(metainfo={'classes': ('pear', 'apple')})),
        True,
        0.0,
        'misses 4 of classes that have other numbers',
    ),
}


def each_twice(data):
    for number in range(4):
        path = data.file(number)
        start, objects, end = re.fullmatch('(.*?)(<object>.*</object>)(.*)', path.read_text(), re.DOTALL).groups()
        path.write_text(start + 2 * objects + end)


def said_of(table, results):
    """Return the cases of a table that have another result."""
    wrong = {}
    for name, (_, is_error, score, words) in table.items():
        result = results[name]
        fits = result[0] == is_error and score in (None, result[1]) and re.search(words, result[2], re.DOTALL)
        if not fits:
            wrong[name] = result
    return wrong


def test_damaged_data_have_a_lower_score_and_a_reason():
    results = run_cases({name: row[0] for name, row in DAMAGED.items()}, lambda case: case())
    assert not said_of(DAMAGED, results)


def without_tables(case):
    """Return what a case says where no rule of a framework is known."""
    for table in (hints.EXPLANATIONS, hints.HINTS_ON_READING, hints.HINTS_ON_EVALUATION, hints.HINTS_ON_STEPS):
        table.clear()
    return case()


def test_damage_is_found_without_a_known_reason():
    """What explains a difference does not find it: with empty tables, each damage is an error still."""
    table = {name: row for name, row in {**DAMAGED, **DAMAGED_MASKS}.items() if row[2] is not None or row[1]}
    not_known = ('a metric of its own that is not perfect', 'a metric that says the same of all')
    results = run_cases({name: row[0] for name, row in table.items() if name not in not_known}, without_tables)
    assert not {name: result for name, result in results.items() if not result[0]}


def test_wrong_annotations_are_found_without_a_known_reason():
    cases = {}
    for file, (name, (damage, _)) in itertools.product((TRAIN, VAL), [*WRONG.items(), *WRONG_MASKS.items()]):
        cases[f'{name} in {file}'] = (file, edited(damage))
    results = said_of_fruit(cases)
    assert not {
        name: checked for name, checked in results.items() if not isinstance(checked, dict) or not checked['errors']
    }


def edited(change):
    """Return a damage of a file of annotations: a change of its content."""

    def damage(path):
        annotations = json.loads(path.read_text())
        change(annotations)
        path.write_text(json.dumps(annotations))

    return damage


def renamed_decomposed(content):
    """Give an image a name in composed form, whose file has the decomposed form."""
    content['images'][0]['file_name'] = unicodedata.normalize('NFC', 'bü.jpg')


def along_rows(content):
    """Write masks as run lengths along rows, which pycocotools reads down columns."""
    sizes = {one['id']: (one['height'], one['width']) for one in content['images']}
    for one in content['annotations']:
        height, width = sizes[one['image_id']]
        x, y, w, h = map(int, one['bbox'])
        mask = np.zeros((height, width), int)
        mask[y : y + h, x : x + w] = 1
        changes = np.flatnonzero(np.diff(mask.ravel(), prepend=0, append=0))
        counts = np.diff(changes, prepend=0, append=mask.size).tolist()
        one['segmentation'] = {'size': [height, width], 'counts': counts}


def turned(content):
    for one in content['annotations']:
        one.update(attributes={'rotation': 45.0}, segmentation=[])


# Damages that tools leave in files, of which an error or a note must speak.
LEFT_BY_TOOLS = {
    'a byte order mark': lambda path: path.write_bytes(codecs.BOM_UTF8 + path.read_bytes()),
    'UTF-16': lambda path: path.write_bytes(path.read_text().encode('utf-16')),
    'no list of annotations': edited(lambda content: content.update(annotations=None)),
    'a name in another form of Unicode': edited(renamed_decomposed),
    'run lengths along rows': edited(along_rows),
    'turned rectangles': edited(turned),
}


def test_what_tools_leave_in_files_is_found_without_a_known_reason():
    cases = {f'{name} in {file}': (file, LEFT_BY_TOOLS[name]) for file in (TRAIN, VAL) for name in LEFT_BY_TOOLS}
    sound = said_of_fruit({'none': (VAL, lambda path: None)})['none']
    assert sound['errors'] == []
    for name, checked in said_of_fruit(cases).items():
        assert {*checked['errors'], *checked['notes']} - {*sound['notes']}, name


def said_of_fruit(cases):
    """Return what a check says, where no rule of a framework is known, of a file that is damaged, for each case."""
    root = make_coco(Path(tempfile.mkdtemp()) / 'fruit')
    for path in root.glob('*2017'):
        shutil.copy(next(path.glob('*.jpg')), path / unicodedata.normalize('NFD', 'bü.jpg'))
    config = copy.deepcopy(recipe_of(DETECTOR))
    set_classes(Experiment(config), CLASSES)
    for split in ('train', 'val', 'test'):
        config[f'{split}_dataloader'].dataset.data_root = f'{root}/'
    for split in ('val', 'test'):
        config[f'{split}_evaluator'].ann_file = str(root / VAL)

    def said(file, damage):
        path = root / file
        before = path.read_bytes()
        damage(path)
        try:
            return check_data(Experiment(config), ('train', 'val')).as_dict()
        finally:
            path.write_bytes(before)

    return run_cases(cases, lambda case: without_tables(functools.partial(said, *case)))


# Masks of pixels.


def roads(change, names=('a', 'b'), words=(), damage=None, question=ask):
    """Return a case of a segmentor: ``change`` of its config, ``damage`` of the masks of the evaluated data."""

    def case():
        root = make_masks(Path(tempfile.mkdtemp()) / 'roads')
        config = copy.deepcopy(recipe_of(SEGMENTOR))
        set_classes(Experiment(config), names)
        for split, folder in (('train', 'training'), ('val', 'validation'), ('test', 'validation')):
            dataset = config[f'{split}_dataloader'].dataset
            dataset.update(data_root=str(root), img_suffix='.png', seg_map_suffix='.png')
            dataset.data_prefix = {'img_path': f'images/{folder}', 'seg_map_path': f'annotations/{folder}'}
        for function, values in words:
            function(Experiment(config), values)
        change(config)
        for path in root.glob('annotations/validation/*.png') if damage else ():
            Image.fromarray(damage(np.array(Image.open(path)))).save(path)
        return question(config)

    return case


def no_zero(config):
    dataset = config.val_dataloader.dataset
    dataset.reduce_zero_label = True
    for step in dataset.pipeline:
        if step['type'] == 'LoadAnnotations':
            step['reduce_zero_label'] = True


def other_values(config):
    pipeline = config.val_dataloader.dataset.pipeline
    pipeline[:] = [{**step, 'values': [0, 1]} if step['type'] == 'MapMaskValues' else step for step in pipeline]


def without_step(config):
    pipeline = config.val_dataloader.dataset.pipeline
    pipeline[:] = [step for step in pipeline if step['type'] != 'IgnoreMaskValues']


SOUND_MASKS = {
    'masks': roads(lambda config: None),
    'a class that does not occur': roads(lambda config: None, names=('a', 'b', 'c')),
    'mapped values': roads(lambda config: None, words=[(map_values, [1, 0])]),
    'ignored values': roads(
        lambda config: None, words=[(ignore_values, [2])], damage=lambda mask: np.where(mask == 255, 2, mask)
    ),
    'several figures': roads(lambda config: config.val_evaluator.update(iou_metrics=['mIoU', 'mDice', 'mFscore'])),
    'answers in files': roads(lambda config: config.val_evaluator.update(output_dir='never/written')),
}
DAMAGED_MASKS = {
    'reduce_zero_label in one split': (
        roads(no_zero),
        True,
        0.0,
        'misses 3660 that are of class 0 here, but of 1 in the training data',
    ),
    'a value of no class': (
        roads(lambda config: None, damage=lambda mask: np.where(mask == 1, 7, mask)),
        True,
        None,
        'misses 3660 of class 7, but the model has 2 classes .*the values of the training data',
    ),
    'values ignored in training alone': (
        roads(without_step, words=[(ignore_values, [2])], damage=lambda mask: np.where(mask == 255, 2, mask)),
        True,
        None,
        'of class 2, but the model has 2 classes',
    ),
    'mapped values in another order': (
        roads(other_values, words=[(map_values, [1, 0])]),
        True,
        0.0,
        'that are of class 0 here, but of 1 in the training data',
    ),
    'no names': (
        roads(lambda config: config.val_dataloader.dataset.pop('metainfo')),
        True,
        None,
        'the evaluator fails',
    ),
    'a metric that ignores another value': (
        roads(lambda config: config.val_evaluator.update(ignore_index=0)),
        True,
        None,
        'misses 1024 of the value 255, which the metric does not ignore .*--set val_evaluator.ignore_index=255',
    ),
    'a metric that says the same of all': (
        roads(lambda config: config.update(val_evaluator={'type': 'Constant', 'figures': {'own': 100.0}})),
        False,
        100.0,
        'so would a model that finds nothing',
    ),
    'all ignored': (
        roads(lambda config: None, damage=lambda mask: np.full_like(mask, 255)),
        True,
        None,
        'no pixels of a class to find; evaluate',
    ),
}


def test_masks_of_pixels():
    cases = {**SOUND_MASKS, **{name: row[0] for name, row in DAMAGED_MASKS.items()}}
    results = run_cases(cases, lambda case: case())
    assert not {name: results[name] for name in SOUND_MASKS if results[name][:2] != [False, 100.0]}
    assert not said_of(DAMAGED_MASKS, results)


def mask_files(damage):
    """Return a damage of a config: of the files of its evaluated masks."""

    def change(config):
        root = Path(config.val_dataloader.dataset.data_root)
        for path in sorted(root.glob('annotations/validation/*.png')):
            damage(path, np.array(Image.open(path)))

    return change


def stored(function, *options):
    """Return a damage of masks: other values in their files."""
    return mask_files(lambda path, mask: Image.fromarray(function(mask)).save(path, *options))


WRONG_PIXELS = {
    'numbered from 1': stored(lambda mask: np.where(mask < 2, mask + 1, mask).astype(np.uint8)),
    'JPEG files': stored(lambda mask: mask, 'JPEG'),
    'a value of no class': stored(lambda mask: np.where(mask == 1, 7, mask).astype(np.uint8)),
    'values of 16 bits': stored(lambda mask: np.where(mask == 1, 1000, 0).astype(np.uint16)),
    'colours': stored(lambda mask: np.stack([mask, mask, mask], -1)),
    'another size': stored(lambda mask: mask[:50]),
    'cut files': mask_files(lambda path, mask: path.write_bytes(path.read_bytes()[:60])),
    'missing files': mask_files(lambda path, mask: path.unlink()),
    'names in another order': lambda config: config.val_dataloader.dataset.update(metainfo={'classes': ['b', 'a']}),
    'a name too few': lambda config: config.val_dataloader.dataset.update(metainfo={'classes': ['a']}),
}


def errors_of(config):
    try:
        return check_data(Experiment(config), ('train', 'val')).errors
    except ValueError as error:
        return [str(error)]


def test_wrong_masks_of_pixels_are_found_without_a_known_reason():
    table = {'none': lambda config: None, **WRONG_PIXELS}
    cases = {name: roads(damage, question=errors_of) for name, damage in table.items()}
    results = run_cases(cases, without_tables)
    assert results.pop('none') == []
    assert not {name: result for name, result in results.items() if not isinstance(result, list) or len(result) != 1}


# How it is asked.


def test_nothing_of_a_framework_stays_changed():
    before = [dict(vars(one)) for one in (COCOeval, CocoMetric)]
    state = np.random.get_state()[1].tolist()
    assert coco(twice)()[0]
    assert [dict(vars(one)) for one in (COCOeval, CocoMetric)] == before
    assert np.random.get_state()[1].tolist() == state
    assert not Path('never').exists()


def test_a_large_data_set_is_asked_about_a_sample(monkeypatch):
    """The images with an id of 0, of files that others name, and with most objects are among those asked about."""
    monkeypatch.setattr(question, 'MOST_IMAGES', 12)
    data = Coco(count=60, start=-80)
    is_error, _, said = data.ask()
    assert is_error
    assert re.search(r'on a sample of \d+ of its 60 images', said)
    assert 'misses 1 whose id is 0' in said
    sound = Coco(count=60)
    assert sound.ask()[:2] == [False, 1.0]
    for split in ('train', 'val'):
        sound.data(split).filter_cfg = {'min_size': 300}
    sound.data('val').test_mode = False
    for image in sound.val['images'][5:8]:
        image.update(height=200)
    is_error, _, said = sound.ask()
    assert is_error
    assert 'of images that the data set leaves out' in said


def test_evaluators_that_only_write_are_not_asked(tmp_path):
    data = Coco()
    data.config.val_evaluator = [data.config.val_evaluator, {'type': 'DumpDetResults', 'out_file_path': 'never.pkl'}]
    assert data.ask()[:2] == [False, 1.0]
    assert not Path('never.pkl').exists()
    data.config.val_evaluator = {'type': 'CocoMetric', 'format_only': True, 'outfile_prefix': str(tmp_path / 'never')}
    assert data.ask() == [False, None, '']
    assert not [*tmp_path.iterdir()]


def test_the_commands_print_it(tmp_path, capsys):
    make_coco(tmp_path / 'fruit')
    words = ['config', DETECTOR, '--out', str(tmp_path / 'mine.py'), '--data-root', str(tmp_path / 'fruit')]
    words += ['--classes', ','.join(CLASSES), '--force']
    assert main(words) == 0
    said = capsys.readouterr().err
    assert 'swin-dense config: val: a perfect model would score bbox_mAP 1.000, segm_mAP 1.000\n' in said
    assert 'swin-dense config: val            4         4         4         4\n' in said
    assert main([*words, '--json']) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[0])
    assert found['scores'][0]['scores'] == {'coco/bbox_mAP': 1.0, 'coco/segm_mAP': 1.0}
    path = tmp_path / 'fruit' / VAL
    annotations = json.loads(path.read_text())
    annotations['annotations'] += [{**one, 'id': 9 + one['id']} for one in annotations['annotations']]
    path.write_text(json.dumps(annotations))
    assert main([*words, '--json']) == 2
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found['errors'] == [error for error in found['errors'] if 'misses 4 that repeat another' in error]
    assert found['scores'][0]['missed'][0]['count'] == 4
    assert err.count('a perfect model would score') == 1


def loss_of(**loss):
    """Return a case: the notes and errors on a segmentor with a loss of its own."""

    def case():
        found = []

        def change(config):
            out = loss.pop('out_channels', None)
            config.model.decode_head.loss_decode = dict(loss_weight=1.0, **loss)
            if out:
                config.model.decode_head.update(out_channels=out, threshold=0.5)
            for split in ('val', 'test'):
                config.pop(f'{split}_evaluator')
            checked = check_data(Experiment(config), ('train',))
            found.extend([checked.errors, [note for note in checked.notes if 'loss_decode' in note]])

        roads(change)()
        return found

    return case


def test_losses_are_asked_whether_they_ignore_pixels():
    cases = {
        'cross entropy': loss_of(type='CrossEntropyLoss'),
        'two sigmoids': loss_of(type='CrossEntropyLoss', use_sigmoid=True),
        'one sigmoid': loss_of(type='CrossEntropyLoss', use_sigmoid=True, out_channels=1),
        'one channel of two classes': loss_of(type='CrossEntropyLoss', out_channels=1),
        'dice': loss_of(type='DiceLoss'),
        'focal': loss_of(type='FocalLoss'),
    }
    results = run_cases(cases, lambda case: case())
    dice, one = results.pop('dice'), results.pop('one channel of two classes')
    assert dice[0] == []
    assert re.search(
        r'model.decode_head.loss_decode \(DiceLoss\) does not ignore pixels of 255: .* they get \d', dice[1][0]
    )
    assert re.search(
        r'labels from 0 to 1 \(.*out of bounds.*--set model.decode_head.loss_decode.use_sigmoid', one[0][0]
    )
    assert results == {name: [[], []] for name in results}
