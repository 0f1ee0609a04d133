"""What the annotations of a data set state, read once and without the framework, beside what the framework yields.

:func:`read_source` returns both for one data set of a config; the round trip compares them, and the perfect model
answers with them. Before pycocotools reads a file, :func:`check_numbers` refuses numbers on which it would crash or not
return.
"""

from __future__ import annotations

import math
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mmengine import fileio
from mmengine.dataset import BaseDataset, Compose
from mmengine.registry import DATASETS

from swin_dense.utils.addresses import is_address
from swin_dense.utils.checks import described
from swin_dense.workbench.checking import hints
from swin_dense.workbench.checking.segmentations import decode_rle
from swin_dense.workbench.configs.coco import SPLIT_OF, read_coco, shown
from swin_dense.workbench.configs.experiment import DataSet
from swin_dense.workbench.configs.quietly import quiet, without_collection

_LARGEST = 1e6  # pixels of a coordinate of a polygon: pycocotools follows its outline step by step
_LARGEST_BOX = 1e15


class StatedObject(NamedTuple):
    """An object as the annotations state it.

    Attributes:
        file: the path of its image; '' if no image has its image_id.
        label: the name of its class, as written; None if no category has its category_id.
        box: (left, top, right, bottom) in pixels, counted from 0; zeros if the annotation has no box.
        entry: the annotation: the dict of COCO's file, or what Pascal VOC's file has, with ``difficult`` as a bool and
            its ``xml_path``, or the instance that the framework yields.
    """

    file: str
    label: Any
    box: tuple[float, float, float, float]
    entry: Any

    @property
    def id(self) -> Any:
        """The id of a COCO annotation, or None."""
        return self.entry.get('id')

    @property
    def mask(self) -> Any:
        """Polygons or run lengths of COCO's format, or None."""
        return self.entry.get('segmentation') or self.entry.get('mask')

    @property
    def is_ignored(self) -> bool:
        """Whether the annotation itself says that it is no single object to find."""
        return any(self.entry.get(key) for key in ('iscrowd', 'ignore', 'difficult', 'ignore_flag'))


@dataclass
class StatedFile:
    """An image file, and what the annotations state for it.

    Attributes:
        path: its path or address, as the framework opens it.
        images: the entries that name it, one unless it is listed more than once. Those of COCO and VOC have ``width``
            and ``height`` in pixels.
        objects: the objects of all of these entries, in the order of the annotations.
    """

    path: str
    images: list[Any] = field(default_factory=list)
    objects: list[StatedObject] = field(default_factory=list)


@dataclass
class Stated:
    """What the annotations of a data set state.

    Those of COCO and Pascal VOC are read here; the objects of other formats are those that the framework yields.

    Attributes:
        name: what to call them in a message: the file that a user can correct.
        files: the image files by path, in the order of the annotations; also those that the framework leaves out.
        orphans: objects whose image_id no image has.
        categories: the names of the categories of COCO's file by id, in its order; {} for other formats.
    """

    name: str
    files: dict[str, StatedFile] = field(default_factory=dict)
    orphans: list[StatedObject] = field(default_factory=list)
    categories: dict[Any, Any] = field(default_factory=dict)

    def objects(self) -> Iterator[StatedObject]:
        """Yield all objects, those of no image last."""
        for file in self.files.values():
            yield from file.objects
        yield from self.orphans


@dataclass
class Source:
    """One data set of a config: what its annotations state, and what the framework makes of them.

    Attributes:
        data: its entry in the config.
        built: the data set, built by the framework; its pipeline is empty afterwards.
        stated: what its annotations state.
        loaded: the framework's dict for each image (``img_path``, ``height``, ``instances``, ...), before its filters.
        samples: those that are left after ``filter_cfg`` and ``indices``, in the order of an epoch.
        numbers: the label of each class as this data set yields it, by the name of the class in its annotations.
        categories: the number of entries of categories in COCO's file, also of the same id.
    """

    data: DataSet
    built: Any
    stated: Stated
    loaded: list[Any]
    samples: list[Any]
    numbers: dict[Any, int]
    categories: int = 0


@without_collection()
def read_source(data: DataSet) -> Source | None:
    """Build a data set without its images, and read its annotations beside it.

    The default scope of mmengine must be that of the config. Return None for a class that does not inherit from
    mmengine's ``BaseDataset``, of which nothing is known.

    Raises:
        ValueError: the framework cannot build the data set, such as one without a type, or cannot read its annotations,
            or these have numbers that pycocotools cannot read; it names the file.
    """
    kind = data.dataset_class
    if kind and not (isinstance(kind, type) and issubclass(kind, BaseDataset)):
        return None
    name = data.annotations or data.masks or data.address
    try:
        with quiet():
            built = DATASETS.build({**data.entry, 'lazy_init': True})
            built.serialize_data, built.pipeline = False, Compose([])  # the steps are asked one by one
    except Exception as error:  # of any class of data sets
        raise ValueError(f'{data.address} cannot be built ({described(error)})') from error
    content = None
    if _reads_coco(built):
        content = read_coco(name, getattr(built, 'backend_args', None))
        check_numbers(name, content, needs_masks(data))
    loaded, samples = _loaded(built, name)
    numbers = {label: index for index, label in enumerate(built.metainfo.get('classes') or ())}
    if content is not None:
        stated = state_coco(name, content, built.data_prefix.get('img') or '')
        # mmdet numbers the classes in the order of the file.
        numbers = {stated.categories[key]: index for key, index in built.cat2label.items()}
    elif loaded and all('xml_path' in sample for sample in loaded):
        stated = state_voc(name, loaded, getattr(built, 'backend_args', None))
    else:
        stated = _state_yielded(name, loaded, {index: label for label, index in numbers.items()})
    categories = len(content['categories']) if content is not None else 0
    return Source(data, built, stated, loaded, samples, numbers, categories)


def _loaded(built: Any, name: str) -> tuple[list[Any], list[Any]]:
    """Return the samples of a data set before and after its filters, with their paths in the form that all have here.

    Raise ValueError if the framework cannot read its annotations, ``name``.
    """
    last: list[Any] = [None]
    parse = getattr(built, 'parse_data_info', None)

    def parse_and_note(info: Any) -> Any:
        last[0] = info if isinstance(info, dict) else None
        return parse(info)  # type: ignore[misc]

    built.parse_data_info = parse_and_note
    try:
        with quiet():
            loaded = built.load_data_list()
            built.load_data_list = lambda: loaded
            built.full_init()
            samples = _samples(built)
            del built.load_data_list, built.parse_data_info  # a cycle, which would keep the memory
    except Exception as error:  # of any class of data sets
        info = last[0] or {}
        place = f', at {shown(info.get("raw_img_info") or info)}' if info else ''
        raise ValueError(
            f'{name}: the framework cannot read it ({described(error)}{place})'
            f'{hints.hint_on(error, hints.HINTS_ON_READING)}'
        ) from error
    for sample in (*loaded, *samples):
        if 'img_path' in sample:
            sample['img_path'] = _spelled(sample['img_path'])
    return loaded, samples


def needs_masks(data: DataSet) -> bool:
    """Return whether the masks of objects are read, to train or to evaluate."""
    metrics = str([evaluator.get('metric') for evaluator in data.evaluators])
    loads_masks = any(step.get('with_mask') for step in data.pipeline)
    return loads_masks or (data.is_evaluated and 'segm' in metrics)


def _reads_coco(built: Any) -> bool:
    """Return whether a data set reads COCO's files as mmdet's own does; those of LVIS and of panoptic masks differ."""
    if not hasattr(built, 'COCOAPI'):
        return False
    from mmdet.datasets import CocoDataset

    return type(built).load_data_list is CocoDataset.load_data_list and built.COCOAPI is CocoDataset.COCOAPI


def _samples(built: Any) -> list[Any]:
    """Return the dicts of all images, for a class of its own as its ``get_data_info`` returns them."""
    if type(built).get_data_info is BaseDataset.get_data_info:
        return built.data_list
    return [built.get_data_info(index) for index in range(len(built))]


def _spelled(path: Any) -> Any:
    """Return one spelling of the path of a file, for ``a.jpg`` and ``./a.jpg``; addresses stay as they are."""
    is_plain = isinstance(path, str) and path and not is_address(path) and '..' not in path
    return os.path.normpath(path) if is_plain else path


def state_coco(name: str, content: Any, folder: str) -> Stated:
    """Return what the content of a file in COCO's format states, whose images are in a folder."""
    stated = Stated(
        _correctable(name, content), categories={entry['id']: entry['name'] for entry in content['categories']}
    )
    path_of: dict[Any, str] = {}
    for image in content['images']:
        path = path_of[image['id']] = _spelled(os.path.join(folder, image['file_name']))
        stated.files.setdefault(path, StatedFile(path)).images.append(image)
    for entry in content.get('annotations') or []:
        box = entry.get('bbox')
        x, y, width, height = box if isinstance(box, list) and len(box) == 4 else (0, 0, 0, 0)
        file = path_of.get(entry['image_id'], '')
        label = stated.categories.get(entry['category_id'])
        found = StatedObject(file, label, (x, y, x + width, y + height), entry)
        (stated.files[file].objects if file else stated.orphans).append(found)
    return stated


def state_voc(name: str, loaded: Sequence[Any], backend_args: Any = None) -> Stated:
    """Return what files in Pascal VOC's format state, for the dicts of their images; its pixels are counted from 1."""
    stated = Stated(name)
    for sample in loaded:
        path = sample['img_path']
        file = stated.files.setdefault(path, StatedFile(path))
        root = ElementTree.fromstring(fileio.get(sample['xml_path'], backend_args=backend_args))
        size = {side: float(text) for side in ('width', 'height') if (text := root.findtext(f'size/{side}'))}
        file.images.append({'id': sample['img_id'], **size})
        for element in root.findall('object'):
            sides = {side: float(element.findtext(f'bndbox/{side}', '1')) for side in ('xmin', 'ymin', 'xmax', 'ymax')}
            left, top, right, bottom = (number - 1 for number in sides.values())
            difficult = element.findtext('difficult', '0').strip() not in ('', '0')
            label = element.findtext('name')
            entry = {'name': label, **sides, 'difficult': difficult, 'xml_path': sample['xml_path']}
            file.objects.append(StatedObject(path, label, (left, top, right, bottom), entry))
    return stated


def _state_yielded(name: str, loaded: Sequence[Any], labels: dict[int, Any]) -> Stated:
    """Return the files of a data set, with the objects that the framework yields."""
    stated = Stated(name)
    for sample in loaded:
        path = sample.get('img_path') or ''
        file = stated.files.setdefault(path, StatedFile(path))
        size = {side: sample[side] for side in ('width', 'height') if side in sample}
        file.images.append({'id': sample.get('img_id'), **size})
        for instance in sample.get('instances') or []:
            box = tuple(instance.get('bbox') or (0, 0, 0, 0))
            file.objects.append(StatedObject(path, labels.get(instance.get('bbox_label')), box, instance))
    return stated


def _correctable(name: str, content: Any) -> str:
    """Return the name of a file, with that of the whole file of which `--val-share` wrote it as a part."""
    whole = content.get(SPLIT_OF)
    is_part = isinstance(whole, str) and os.path.isfile(whole)
    return f'{whole}, in the part {os.path.basename(name)}' if is_part else name


def check_numbers(name: str, content: Any, with_masks: bool) -> None:
    """Raise ValueError for numbers that pycocotools would believe: it crashes or does not return for some of them.

    Boxes, areas and polygons must be finite, and the run lengths of a mask must sum to the pixels of its image. All
    faults are counted. Masks are checked if they are read.
    """
    name = _correctable(name, content)
    images, annotations = content['images'], content.get('annotations') or []
    wrong = [entry for entry in images if not _are_sizes(entry.get('height'), entry.get('width'))]
    if wrong:
        which = f'{len(wrong)} of {len(images)} images are wrong, such as {shown(wrong[0])}'
        raise ValueError(f'{name}: {which}: write height and width in pixels')
    sizes = {entry['id']: [entry['height'], entry['width']] for entry in images}
    if len(sizes) < len(images):
        raise ValueError(f'{name} has {len(images)} images with {len(sizes)} ids; number them anew')
    faults: dict[str, list[Any]] = {}
    for entry in annotations:
        fault = _fault_of_box(entry) or (fault_of_mask(entry, sizes.get(entry['image_id'])) if with_masks else '')
        if fault:
            faults.setdefault(fault, []).append(entry)
    if faults:
        counts = []
        for fault, ones in faults.items():
            counts.append(f'{len(ones)} of {len(annotations)} annotations are wrong, such as {shown(ones[0])}: {fault}')
        raise ValueError(f'{name}: {"; ".join(counts)}')


def _are_sizes(*values: Any) -> bool:
    return all(type(value) in (int, float) and 0 < value <= _LARGEST for value in values)


def _fault_of_box(entry: Any) -> str:
    box, area = entry.get('bbox'), entry.get('area', 0)
    if box is not None and not (isinstance(box, list) and len(box) == 4 and _are_bounded(box, _LARGEST_BOX)):
        return 'bbox must be x, y, width and height: four numbers, not text'
    return '' if _are_bounded([area], _LARGEST_BOX**2) else 'the area must be a finite number'


def fault_of_mask(entry: Any, size: list[Any] | None) -> str:
    """Return what is wrong with the numbers of a mask, for an image of [height, width] or any size, or ''."""
    mask = entry.get('segmentation')
    if isinstance(mask, dict):
        own: Any = mask.get('size')
        has_size = isinstance(own, list) and len(own) == 2 and all(type(side) is int for side in own)
        if not has_size or own != (size or own) or not isinstance(mask.get('counts'), (list, str)):
            return 'RLE must be counts, and the size of the image as [height, width]'
        lengths, pixels = decode_rle(mask['counts']), math.prod(own)
        is_whole = lengths.min(initial=0) >= 0 and lengths.max(initial=0) <= pixels == lengths.sum()
        return '' if is_whole else 'write polygons as finite numbers, RLE as lengths that sum to height times width'
    parts = mask if isinstance(mask, list) else []
    if all(_are_bounded(part if isinstance(part, list) else [part], _LARGEST) for part in parts):
        return ''
    return f'write polygons as finite numbers up to {_LARGEST:.0f}, RLE as lengths that sum to height times width'


def _are_bounded(values: Sequence[Any], most: float) -> bool:
    try:
        return max(map(abs, values), default=0) <= most and not math.isnan(sum(values))
    except (TypeError, OverflowError):  # text, and numbers beyond a float
        return False
