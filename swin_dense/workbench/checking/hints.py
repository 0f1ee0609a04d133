"""What is known of the rules of frameworks: words for differences that were found without them.

This is the only module that knows such rules. A difference that no entry explains is reported as well, as
``UNKNOWN``; ``tests/workbench/configs/test_perfect.py`` empties the tables and finds every damage still.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from swin_dense.mm.mask_values import IGNORED_LABEL
from swin_dense.workbench.configs.coco import turn_of

if TYPE_CHECKING:
    from swin_dense.workbench.checking.stated import StatedFile, StatedObject

UNKNOWN = 'for a reason that is not known'
_COPY = 'as the copy that `swin-dense config` writes'
_SHARE_OF_FEW = 0.05  # of the objects: more that are stated twice are no slip
_SHARE_OF_MANY = 0.1  # of the objects: more that lie elsewhere are no slip, if they are more than _FEW
_FEW = 3
# A pattern for the start of an exception of mmdet, mmseg or pycocotools, and what to do.
HINTS_ON_READING = {
    "KeyError: 'area'": 'write the area; width times height is enough',
    "KeyError: 'bbox'": 'bbox must be x, y, width and height',
    'AssertionError: Annotation ids': 'annotation ids must be unique; renumber them from 1',
    'JSONDecodeError: Unexpected UTF-8 BOM': f'save it as UTF-8 without a byte order mark, {_COPY}',
    'UnicodeDecodeError': f'save it as UTF-8, {_COPY}',
    "TypeError: 'NoneType' object is not iterable": f'write annotations as a list, {_COPY}',
    r"FileNotFoundError: .*\.xml'": (
        'each line of a list of Pascal VOC is the name of an .xml file, without an ending or a column; add the file, '
        'or correct or remove the line'
    ),
    "AttributeError: 'NoneType' object has no attribute": (
        'a file of Pascal VOC needs size with width and height, and for each object name and bndbox with xmin, ymin, '
        'xmax, ymax'
    ),
}
# The same for an evaluation.
HINTS_ON_EVALUATION = {
    "KeyError: 'iscrowd'": 'write iscrowd, 0 for a single object',
    'ValueError: could not convert string to float': 'pycocotools needs whole numbers as ids',
    "KeyError: 'segm is not in results'": (
        'it compares masks, but no step of train_dataloader.dataset.pipeline loads them; set with_mask=True of its '
        'LoadAnnotations, or metric=bbox of the evaluator'
    ),
    "TypeError: Argument 'bb' has incorrect type": 'remove polygons of fewer than three points',
    'AssertionError: Results do not correspond': 'each evaluator must compare with the file of its data set',
}

# The same for a step of training.
HINTS_ON_STEPS = {
    'IndexError: ': 'num_classes of each head must be the number of classes of the data',
    'ValueError: Expected more than 1 value per channel': (
        'batch normalisation of a map of one pixel needs --set train_dataloader.batch_size=2, or more'
    ),
    'RuntimeError: Given groups=1, weight of size': 'in_channels must be those of the maps that come in',
    'RuntimeError: The size of tensor a': 'mean and std of model.data_preprocessor need a number for each band',
    "AttributeError: 'InstanceData' object has no attribute 'masks'": 'LoadAnnotations needs with_mask=True',
}


def hint_on(error: Exception, hints: dict[str, str]) -> str:
    """Return what to do about an exception, by one of the tables above, after a colon; '' if it is not known."""
    said = f'{type(error).__name__}: {error}'
    return next((f': {hint}' for pattern, hint in hints.items() if re.match(pattern, said)), '')


# Words for what the round trip finds. The first reason that holds, for an object and the entry of its image.
LEFT_OUT: dict[str, Callable[[StatedObject, Any], bool]] = {
    "marked 'ignore'": lambda obj, _: bool(obj.entry.get('ignore')),
    'outside of their image': lambda obj, image: _is_outside(obj.box, image),
    'with an area of 0 or less': lambda obj, _: obj.entry.get('area', 1) <= 0,
    'narrower than a pixel': lambda obj, _: min(obj.box[2] - obj.box[0], obj.box[3] - obj.box[1]) < 1,
}
IGNORED = {"marked 'iscrowd'": 'iscrowd', "marked 'difficult'": 'difficult'}
# What to do where a framework leaves out all objects, by the most common reason.
CURES = {
    'with an area of 0 or less': 'write the area; width times height is enough',
    "marked 'iscrowd'": 'write an iscrowd of 0 for single objects (CVAT marks masks that are painted as iscrowd)',
    "marked 'ignore'": "remove 'ignore' from objects to train on",
    "marked 'difficult'": "write a 'difficult' of 0 for objects to train on",
}


class Filter(NamedTuple):
    """Words for the images that an entry of ``filter_cfg`` leaves out, and its value that keeps them."""

    text: str
    cure: str


FILTERS = {
    'filter_empty_gt': Filter('without an annotation of the classes', 'False'),
    'min_size': Filter('with a side below {value} pixels', '0'),
}
_MIXES_BOXES = ('Mosaic', 'MixUp')


def is_systematic(count: int, total: int) -> bool:
    """Return whether so many of all objects are wrong that a program, or another format, must be the cause."""
    return count > _FEW and count > _SHARE_OF_MANY * total


def why_left_out(obj: StatedObject, image: Any) -> str:
    """Return why a framework leaves out an object of a class."""
    return next((reason for reason, holds in LEFT_OUT.items() if holds(obj, image)), UNKNOWN)


def why_ignored(obj: StatedObject) -> str:
    """Return why a framework yields an object but does not train on it."""
    return next((reason for reason, key in IGNORED.items() if obj.entry.get(key)), UNKNOWN)


def _is_outside(box: tuple[float, ...], image: Any) -> bool:
    width, height = image.get('width', float('inf')), image.get('height', float('inf'))
    return box[0] >= width or box[1] >= height or box[2] <= 0 or box[3] <= 0


def is_no_polygon(points: Sequence[float]) -> bool:
    """Return whether mmdet leaves out a polygon: one of fewer than three points, or with an odd number of numbers."""
    return len(points) < 6 or len(points) % 2 == 1


def is_turned(obj: StatedObject) -> bool:
    """Return whether a box is that of a rectangle before a turn, of which no mask shows that it is not."""
    angle = turn_of(obj.entry) % 180
    return min(angle, 180 - angle) > 1 and not obj.mask


def hint_on_mixing(steps: Any) -> str:
    """Return what to do about transforms that mix images and fail, after a semicolon; '' if it is not known."""
    mixing = [step['type'] for step in steps if step['type'] in _MIXES_BOXES]
    if not mixing:
        return ''
    return f"; mmdet's {' and '.join(mixing)} mix boxes without masks: take Cached{mixing[0]}, or a recipe for boxes"


# Words for what the perfect model finds.

MOST_OF_A_CLASS = 100  # answers of a class in an image of which pycocotools makes its first figure


@dataclass
class Case:
    """An object, or pixels, that an evaluation counts as missed although a perfect model answered, and its context.

    Attributes:
        kind: 'bbox', 'segm' or 'pixels'.
        obj: the object; None if no annotation that was read has its id, or for a whole split.
        file: what is stated for its image; None if no image that was read has its id.
        stated: the number of distinct objects to find in this image; the model returns ``limit`` of them.
        of_class: how many of them are of its class; the metric compares ``most`` of them.
        limit_address: the setting of ``limit``.
        score_address: the setting of a least score that no answer reaches, or ''.
        labels: the numbers of the classes in the training data, by name; own_labels: in the evaluated data.
        is_left_out: whether the data set leaves its image out.
        is_empty: whether its mask covers no pixel as the framework loads it.
        is_suppressed: whether the model's suppression of overlaps removes it; ``nms_address`` is the setting.
        times: how often the annotations state an object of this class and place in this image.
        ids: how many images of the split name this file.
        compared: numbers of answers of which a metric makes figures; () if it does not say.
        others: files that the evaluator compares with, which the data set does not read.
        images, image_ids: the number of images of all data sets of the split, and of different ids.
        pixel_classes: the class of pixels in the evaluated data, and as the training data would have them;
            ``class_count`` is the number of classes that the model has.
        split, address, name: the split, the place of the data set in the config, the file of its annotations.
    """

    kind: str = ''
    obj: StatedObject | None = None
    file: StatedFile | None = None
    stated: int = 0
    of_class: int = 0
    most: int = MOST_OF_A_CLASS
    limit: int | None = None
    limit_address: str = ''
    score_address: str = ''
    labels: dict[Any, int] = field(default_factory=dict)
    own_labels: dict[Any, int] = field(default_factory=dict)
    is_left_out: bool = False
    is_empty: bool = False
    is_suppressed: bool = False
    nms_address: str = ''
    times: int = 1
    ids: int = 1
    compared: Sequence[int] = ()
    others: Sequence[str] = ()
    images: int = 0
    image_ids: int = 0
    pixel_classes: tuple[int, int] | None = None
    class_count: int = 0
    split: str = ''
    address: str = ''
    name: str = ''

    @property
    def size(self) -> tuple[float, float]:
        """The width and height of the image, in pixels; endless if they are not stated."""
        image = self.file.images[0] if self.file and self.file.images else {}
        return image.get('width', float('inf')), image.get('height', float('inf'))

    @property
    def sides(self) -> tuple[float, float]:
        """The width and height of the box, in pixels."""
        left, top, right, bottom = self.obj.box if self.obj else (0, 0, 1, 1)
        return right - left, bottom - top

    @property
    def is_beyond(self) -> bool:
        """Whether the box reaches beyond the image."""
        left, top, right, bottom = self.obj.box if self.obj else (0, 0, 1, 1)
        width, height = self.size
        return left < 0 or top < 0 or right > width or bottom > height


class Explanation(NamedTuple):
    """Why an object counts as missed.

    Attributes:
        text: follows the number of objects; fields in braces are those of :class:`Case`.
        holds: whether it explains a case.
        cure: the setting or edit that cures it, as the text.
        is_error: whether the data or the config are the cause, rather than a limit of the metric or the model; given
            the share of all objects that count as missed for this reason.
    """

    text: str
    holds: Callable[[Case], bool]
    cure: str = ''
    is_error: Callable[[float], bool] = lambda share: True


def _is_note(share: float) -> bool:
    return False


EXPLANATIONS = [  # the first that holds
    Explanation(
        'because the evaluator compares with {others[0]}',
        lambda case: bool(case.others) and case.obj is None,
        '{address} reads {name}; --set {split}_evaluator.ann_file={name} compares with the same',
    ),
    Explanation(
        'because {images} images have {image_ids} ids',
        lambda case: case.image_ids < case.images and bool(case.image_ids),
        'give each data set a metric of its own, in their order: '
        "{split}_evaluator=dict(type='MultiDatasetsEvaluator', dataset_prefixes=[...], metrics=[...])",
    ),
    Explanation(
        'because pycocotools makes its first figure of 100 answers, and proposal_nums has {compared}',
        lambda case: bool(case.compared) and MOST_OF_A_CLASS not in case.compared,
        '--set {split}_evaluator.proposal_nums=100,300,1000',
    ),
    Explanation(
        'of the value 255, which the metric does not ignore',
        lambda case: case.pixel_classes is not None and case.pixel_classes[0] == IGNORED_LABEL,
        '--set {split}_evaluator.ignore_index=255',
    ),
    Explanation(
        'of class {pixel_classes[0]}, but the model has {class_count} classes',
        lambda case: case.pixel_classes is not None and case.pixel_classes[0] >= case.class_count,
        'give the masks the values of the training data, and write 255 where pixels have no label',
    ),
    Explanation(
        'that are of class {pixel_classes[0]} here, but of {pixel_classes[1]} in the training data',
        lambda case: case.pixel_classes is not None,
        'reduce_zero_label, --mask-values and --ignore must be the same in all data sets',
    ),
    Explanation(
        'of images that the data set leaves out (filter_cfg, indices)',
        lambda case: case.is_left_out,
        '--set {address}.test_mode=True {address}.indices=None keeps them',
    ),
    Explanation(
        "whose id is 0, which marks 'no match' for pycocotools",
        lambda case: case.obj is not None and case.obj.id == 0 and type(case.obj.id) is int,
        'number the annotations from 1',
    ),
    Explanation(
        'of classes that the training data do not have',
        lambda case: case.obj is not None and case.obj.label not in case.labels,
        'give the training and the evaluated data the same names of classes',
    ),
    Explanation(
        'of classes that have other numbers in the training data',
        lambda case: case.obj is not None and case.own_labels.get(case.obj.label) != case.labels.get(case.obj.label),
        'give the training and the evaluated data the same order of classes, in metainfo.classes and in their files',
    ),
    Explanation(
        'of files that several images name, of which a model gives each the same answer',
        lambda case: case.ids > 1,
        'give each image a file of its own, or list each file once',
    ),
    Explanation(
        'beyond the {most} of a class that the metric compares in an image, whatever max_per_img is',
        lambda case: case.of_class > case.most,
        'no setting changes this figure; cut the images into tiles, or compare models by mAP_50',
        _is_note,
    ),
    Explanation(
        'because no score of a model is above {score_address}',
        lambda case: bool(case.score_address),
        '--set {score_address}=0.05',
    ),
    Explanation(
        'that overlap another of their class so much that the model returns one of them',
        lambda case: case.is_suppressed,
        '{nms_address} has the threshold',
        _is_note,
    ),
    Explanation(
        'beyond the {limit} that the model returns for an image',
        lambda case: case.limit is not None and case.stated > case.limit,
        '--set {limit_address}={stated}',
        _is_note,
    ),
    Explanation(
        'that repeat another of the same class and place in their image',
        lambda case: case.times > 1,
        'remove the repetitions',
        lambda share: share > _SHARE_OF_FEW,
    ),
    Explanation(
        "marked 'ignore', which are not trained on, but which the metric counts",
        lambda case: case.obj is not None and bool(case.obj.entry.get('ignore')) and not case.obj.entry.get('iscrowd'),
        'mark them with iscrowd 1 instead',
        _is_note,
    ),
    Explanation(
        'whose box has no area, so that no box overlaps it',
        lambda case: min(case.sides) <= 0,
        'remove them, or mark them with iscrowd 1',
        lambda share: share > _SHARE_OF_FEW,
    ),
    Explanation(
        'whose mask covers no pixel',
        lambda case: case.kind == 'segm' and case.is_empty,
        'write polygons of three points or more in pixels, or remove the objects',
    ),
    Explanation(
        'that reach beyond their image, where the boxes of a model end',
        lambda case: case.is_beyond,
        'cut the boxes at the edge of the image',
        lambda share: share > 0.25,
    ),
]


def explained(case: Case) -> Explanation:
    """Return the first explanation that holds for a case, or that it is not known."""
    unknown = Explanation(UNKNOWN, lambda case: True)
    return next((explanation for explanation in EXPLANATIONS if explanation.holds(case)), unknown)
