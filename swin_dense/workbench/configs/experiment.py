"""A config as the checks and the options of the commands read it: its framework, its data sets and its classes."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from mmengine.config import Config
from mmengine.fileio import list_from_file
from mmengine.registry import DATASETS, DefaultScope

from swin_dense.utils.addresses import is_address
from swin_dense.workbench.configs.entries import walk

SPLITS = ('train', 'val', 'test')
FILE_LOADERS = ('LoadImageFromFile', 'LoadBands')  # transforms that read an image from the file at its path
_FILES = {'data_root', 'data_prefix', 'ann_file'}  # entries of data sets that read files
# Models whose heads count something else than the classes of the data: any object, or the words of a text.
TEXT_MODELS = ('GroundingDINO', 'GLIP')
_OTHER_COUNTS = ('RPN', *TEXT_MODELS)


class Experiment:
    """A config of mmdet or mmseg with its data sets, in the order train, val, test.

    It is a view: changes to the entries of a data set change the config, and changes to the config are seen here.

    Raises:
        ValueError: the model, a data loader, or the type or the place of a part of them, has the wrong form.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.check_form()

    def check_form(self) -> None:
        """Raise ValueError if the model, a data loader, or the type or place of a part of them, has a wrong form."""
        config = self.config
        for key in ('model', 'train_cfg', *(f'{split}_dataloader' for split in SPLITS)):
            part = config.get(key)
            if not isinstance(part, dict) and (part is not None or key == 'model'):
                raise ValueError(f'{key} must be a dict, got {part!r}')
        for part in self.parts():
            kind = part.get('type', '')
            if not isinstance(kind, str):
                raise ValueError(f'the type of each part of a config must be a name or a class, got {kind!r}')
        self.datasets_of(SPLITS)  # the constructor checks their paths

    @property
    def model(self) -> Any:
        return self.config.model

    @property
    def scope(self) -> str | None:
        return self.config.get('default_scope')

    @property
    def is_detector(self) -> bool:
        return self.scope == 'mmdet'

    @property
    def class_count(self) -> int | None:
        """The most frequent number of classes of its heads, as proposal heads have another; None if it is not known."""
        panoptic_counts = []  # after the others, of which the first of several as frequent ones counts
        for part in dicts(self.model):
            if is_panoptic(part) and self.model.get('type') not in _OTHER_COUNTS:
                panoptic_counts.append(part['num_things_classes'] + part['num_stuff_classes'])
        most_common = Counter([*self.class_counts.values(), *panoptic_counts]).most_common(1)
        return most_common[0][0] if most_common else None

    @property
    def class_counts(self) -> dict[str, int]:
        """The number of classes of each head, by its setting; none for a model that counts something else."""
        parts = walk(self.model, 'model') if self.model.get('type') not in _OTHER_COUNTS else ()
        found = {f'{key}.num_classes': part.get('num_classes') for key, part in parts if isinstance(part, dict)}
        return {key: count for key, count in found.items() if isinstance(count, int)}

    @property
    def datasets(self) -> list[DataSet]:
        """The data sets of all splits."""
        return self.datasets_of(SPLITS)

    def setting_of_heads(self, number: int) -> str:
        """Return how to give a number of classes to heads that have another; '' without. Those of 1 find any object."""
        one = 1 if self.class_count != 1 else number
        wrong = [f'{key}={number}' for key, count in self.class_counts.items() if count not in (one, number)]
        return f'--set {" ".join(wrong)}' if wrong else ''

    def in_scope(self) -> AbstractContextManager[Any]:
        """Let the frameworks find names in the scope of the config within a block."""
        return DefaultScope.overwrite_default_scope(self.scope or 'mmengine')

    def parts(self) -> Iterator[Any]:
        """Yield every dict of the config, outer dicts first."""
        return dicts(list(self.config.values()))

    def pipelines(self) -> Iterator[list]:
        """Yield every list of transforms that loads an image, and then its mask."""
        for _, part in walk(list(self.config.values())):
            if isinstance(part, list) and any(map(loads_masks, part[1:])):
                yield part

    def datasets_of(self, splits: Sequence[str]) -> list[DataSet]:
        """Return the data sets of some splits."""
        found = []
        for split in [split for split in SPLITS if split in splits]:
            loader = self.config.get(f'{split}_dataloader') or {}
            for address, entry in walk(loader.get('dataset'), f'{split}_dataloader.dataset'):
                is_step = '.pipeline.' in address
                if isinstance(entry, dict) and _FILES & set(entry) and not is_step:
                    found.append(DataSet(self, entry, split, address))
        return found

    def present(self) -> list[str]:
        """Return the splits that read files and folders, all of which exist."""
        return [split for split in SPLITS if self.datasets_of([split]) and not self.missing([split])]

    def missing(self, splits: Sequence[str]) -> list[str]:
        """Return the files and folders of some splits that do not exist; addresses are not checked."""
        paths = itertools.chain.from_iterable(dataset.paths() for dataset in self.datasets_of(splits))
        local = dict.fromkeys(path for path in paths if not is_address(path))
        return [path for path in local if not os.path.exists(path)]


class DataSet:
    """A data set of a config that reads files, inside the wrappers of other data sets.

    Attributes:
        experiment: the config that it is a part of.
        entry: this part of the config; changes to it change the config.
        split: 'train', 'val' or 'test'; ``is_evaluated`` is whether it is one of the latter two.
        address: the name of the part for `--set`, such as 'train_dataloader.dataset'.
        kind: the name of its class, or ''.
        dataset_class: the class of this name in the registry of the framework; None if there is none.
        annotations: the path or address of the file of annotations, or of names of images; '' if there is none.
        images: the path or address of the folder of images.
        masks: that of the folder of masks, of a data set of mmseg.
        pipeline: the transforms of an image.
        loader: the first of them, which loads the image.
        evaluators: the configs of the metrics of its split.
        classes: the names of the classes, or () if neither the config nor the class of the data set has any.

    Raises:
        ValueError: a path, or the dict of folders, has the wrong type.
    """

    def __init__(self, experiment: Experiment, entry: Any, split: str, address: str = 'a data set') -> None:
        _check_paths(entry, address)
        self.experiment = experiment
        self.entry = entry
        self.split = split
        self.is_evaluated = split != 'train'
        self.address = address
        self.kind: str = entry.get('type') or ''
        self.annotations = self._below_root(entry.ann_file) if entry.get('ann_file') else ''
        folders = entry.get('data_prefix') or {}
        self.images = self.folder('img_path' if 'img_path' in folders else 'img')
        self.masks = self.folder('seg_map_path')
        self.pipeline: list[Any] = entry.get('pipeline') or []
        self.loader: Any = self.pipeline[0] if self.pipeline else {'type': 'LoadImageFromFile'}
        metrics = experiment.config.get(f'{split}_evaluator')
        self.evaluators = [part for part in dicts(metrics) if 'type' in part]
        with DATASETS.switch_scope_and_registry(experiment.scope) as registry:
            self.dataset_class: Any = registry.get(self.kind) if self.kind else None
        self.classes = _class_names(entry, self.dataset_class)

    def folder(self, prefix: str) -> str:
        """Return the path or address of a folder, such as that of the prefix 'img'."""
        folders = self.entry.get('data_prefix') or {}
        return self._below_root(folders.get(prefix) or '')

    def paths(self) -> list[str]:
        """Return the file of annotations and the folders that the data set reads."""
        reads_maps = any(step.get('with_seg') for step in self.pipeline)
        paths = [self.annotations] if self.annotations and is_local(self.entry) else []
        # Another storage may have no such folder, and an own loader another place.
        kind = str(self.loader.get('type')).rpartition('.')[2]
        has_folders = kind in FILE_LOADERS and is_local(self.loader)
        for prefix, folder in (self.entry.get('data_prefix') or {}).items():
            # mmdet's instance recipes only name the folder of panoptic masks.
            is_named_only = prefix == 'seg' and self.kind == 'CocoDataset' and not reads_maps
            if folder and has_folders and not is_named_only:
                paths.append(self.folder(prefix))
        return paths

    def _below_root(self, path: str) -> str:
        return os.path.join(self.entry.get('data_root') or '', path)


def _check_paths(entry: Any, address: str) -> None:
    """Raise ValueError if a path of a data set, or the dict of its folders, has the wrong type."""
    for key, kind in (('data_root', str), ('ann_file', str), ('data_prefix', dict)):
        if not isinstance(entry.get(key) or kind(), kind):
            raise ValueError(f'{key} of {address} must be a {kind.__name__}, got {entry[key]!r}')
    for prefix, folder in (entry.get('data_prefix') or {}).items():
        if not isinstance(folder or '', str):
            raise ValueError(f'data_prefix.{prefix} of {address} must be a str, got {folder!r}')


def _class_names(entry: Any, dataset_class: Any) -> tuple[Any, ...]:
    """Return the names of the classes of a data set, as mmengine reads them from a config or a class."""
    classes = (entry.get('metainfo') or {}).get('classes') or getattr(dataset_class, 'METAINFO', {}).get('classes')
    if isinstance(classes, str) and os.path.isfile(classes):  # with a name in each line
        classes = list_from_file(classes)
    return (classes,) if isinstance(classes, str) else tuple(classes or ())


def is_local(part: Any) -> bool:
    """Return whether a data set or transform opens its paths as local files, by mmengine's backend of storage."""
    return (part.get('backend_args') or {}).get('backend', 'local') == 'local'


def framework_of(config: Config) -> str:
    """Return 'mmdet' or 'mmseg', the ``default_scope`` of a config; raise ValueError for any other."""
    scope = config.get('default_scope')
    if scope not in ('mmdet', 'mmseg'):
        raise ValueError(f"the config must have default_scope = 'mmdet' or 'mmseg', got {scope!r}")
    return scope


def is_panoptic(part: Any) -> bool:
    """Return whether a part of a model counts things and stuff separately, as mmdet's Mask2Former does."""
    return {'num_things_classes', 'num_stuff_classes'} <= set(part)


def dicts(value: Any) -> Iterator[Any]:
    """Return every dict in a config, outer dicts first."""
    return (part for _, part in walk(value) if isinstance(part, dict))


def loads_masks(step: Any) -> bool:
    """Return whether a transform loads masks; that of test-time augmentation does so in a step inside of it."""
    parts = [step, *dicts(step.get('transforms'))] if isinstance(step, dict) else []
    return any(part.get('type') == 'LoadAnnotations' for part in parts)


def mapped_values(parts: Iterable[Any]) -> Sequence[int] | None:
    """Return the mask values of the classes, if one of the parts of a config maps them."""
    for step in parts:
        if step.get('type') == 'MapMaskValues':
            return step['values']
    return None
