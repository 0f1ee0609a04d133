"""The names and numbers of the classes of a data set, beside those of the training data and of the model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from swin_dense.utils.addresses import is_address
from swin_dense.utils.checks import first_few
from swin_dense.workbench.checking.stated import Source
from swin_dense.workbench.configs.coco import read_coco
from swin_dense.workbench.configs.experiment import DataSet


def check_classes(source: Source) -> list[Any]:
    """Return the names of the classes of a data set, in the order in which the framework numbers them.

    Raises:
        ValueError: the framework numbers the classes of the files otherwise than the config, or than there are classes
            in the model. The training data decide on the classes.
    """
    data, count = source.data, source.data.experiment.class_count
    classes = list(source.built.metainfo.get('classes') or source.stated.categories.values())
    has_other_count = count not in (None, len(classes))
    are_listed = bool(source.stated.categories)
    are_right = source.numbers == {label: index for index, label in enumerate(classes)}
    if has_other_count and are_right and classes:
        cure = data.experiment.setting_of_heads(len(classes))
        if not are_listed:
            names = sorted({str(obj.label) for obj in source.stated.objects()})
            cure += f', or the names in the files: --set "{data.address}.metainfo.classes={names}"'
        raise ValueError(
            f'{data.address} has {len(classes)} classes, {first_few(classes)}, but the model has {count}: {cure}'
        )
    if are_listed and not are_right:
        found = list(source.stated.categories.values())
        are_trained = data.is_evaluated and _are_trained(data, found)
        trained = '' if are_trained else _training_data(data)
        raise ValueError(
            f'{source.stated.name} has {len(found)} classes, {first_few(found)}, but the config has {len(classes)}, '
            f'{first_few(classes)}'
            + (f', and a model of {count} classes' if has_other_count else trained)
            + _cure(source, found, classes, has_other_count, are_trained)
        )
    return classes


def plain(label: Any) -> str:
    """Return the name of a class without what people write in several ways: capitals, spaces, underscores, dashes."""
    return str(label).casefold().translate(dict.fromkeys(map(ord, ' _-')))


def _training_data(data: DataSet) -> str:
    """Return words that name the file of the training data, if it is another than that of this data set."""
    files = [trained.annotations for trained in data.experiment.datasets_of(['train']) if trained.annotations]
    return f', those of the training data in {files[0]}' if files and files[0] != data.annotations else ''


def _are_trained(data: DataSet, found: Sequence[Any]) -> bool:
    """Return whether these are the classes of a file of the training data, so that both differ from the config."""
    for trained in data.experiment.datasets_of(['train']):
        if is_address(trained.annotations):
            continue
        with contextlib.suppress(ValueError, OSError):  # of a file that is checked by itself
            names = [category['name'] for category in read_coco(trained.annotations)['categories']]
            if names == list(found):
                return True
    return False


def _cure(
    source: Source, found: Sequence[Any], classes: Sequence[Any], has_other_count: bool, are_trained: bool
) -> str:
    """Return what to do about classes of a file that differ from those of the config: edit the file, or name them.

    ``are_trained`` says that this file is evaluated and has the classes of a training file, unlike the config.
    """
    names = [name for name in found if name in classes]
    absent = [name for name in classes if name not in found]
    if len({*names}) < len(names) or len(found) < source.categories:
        return (
            f'; several categories of one name or id are among {first_few(names)}, so that mmdet numbers the classes '
            'wrongly: remove or rename the one without annotations (Roboflow writes one for the project)'
        )
    of_plain = {plain(name): name for name in found}
    renamed = [f'{of_plain[plain(name)]} to {name}' for name in absent if plain(name) in of_plain]
    is_own = bool((source.data.entry.get('metainfo') or {}).get('classes')) and not has_other_count
    is_wrong_alone = source.data.is_evaluated and not are_trained
    if is_own and (is_wrong_alone or (not renamed and {*found} < {*classes})):
        edit = 'sort the list of categories in this file so, with any ids'
        if renamed:
            edit = f'rename {first_few(renamed)}'
        elif absent:
            edit = f'add {first_few(absent)} to its categories, also without an annotation'
        return f'; a model knows only the numbers of the classes: {edit}, in the order {_quoted(classes)}'
    option = _as_option(source.stated.name, found if absent else names)
    return f'; name those to train with, in the order of the file, such as all of it: {option}'


def _quoted(names: Sequence[Any]) -> str:
    return f'"{",".join(map(str, names))}"'


def _as_option(name: str, names: Sequence[Any]) -> str:
    """Return the command with these classes of a file, or with the file if their names are not plain words."""
    is_plain = all(isinstance(name, str) and ',' not in name and name == name.strip() for name in names)
    file = name.partition(', in the part ')[0]
    given = _quoted(names) if is_plain else f'"{file}"'
    return f'`swin-dense config ... --classes {given}`'
