"""The names and numbers of the classes of a data set, beside those of the training data and of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swin_dense.utils.checks import first_few
from swin_dense.workbench.configs.experiment import DataSet
from swin_dense.workbench.configs.stated import Source


def check_classes(source: Source) -> list[Any]:
    """Return the names of the classes of a data set, in the order in which the framework numbers them.

    The training data decide on the classes. Data to evaluate must have the same, or mmdet compares other classes.

    Raises:
        ValueError: the names or numbers of the classes differ from those of the config or of the model.
    """
    if not source.stated.categories:
        return _check_count(source)
    data, name = source.data, source.stated.name
    found = list(source.stated.categories.values())
    is_own = bool((data.entry.get('metainfo') or {}).get('classes'))
    classes = data.classes or found
    count = data.experiment.class_count or len(classes)
    absent = [one for one in classes if one not in found]
    has_other_count = count != len(classes)
    if absent or has_other_count:
        differ = f'{name} has {len(found)} classes, {first_few(found)}, '
        differ += f'but the config has {len(classes)}, {first_few(classes)}'
        if has_other_count:
            differ += f', and a model of {count} classes'
        elif is_own:
            differ += _training_data(data, name)
            like = {str(one).strip().lower(): one for one in found}
            alike = {one: like.get(str(one).strip().lower()) for one in absent}
            pairs = [f'{other} to {one}' for one, other in alike.items() if other is not None]
            if data.is_evaluated:
                cure = f'add {first_few(absent)} there, also without an annotation'
                if pairs:
                    cure = f'rename {first_few(pairs)}'
                raise ValueError(
                    f'{differ}: to evaluate, the categories of this file must be those to train with, in their order '
                    f'({_quoted(classes)}); in it, {cure}'
                )
            if not pairs and {*found} < {*classes}:
                raise ValueError(
                    f'{differ}: add {first_few(absent)} to its categories, also without an annotation, in the order '
                    f'{_quoted(classes)}'
                )
        raise ValueError(f'{differ}; name those to train with, such as all of the file: {_as_option(name, found)}')
    names = [one for one in found if one in classes]
    if len({*names}) < len(names) or len(source.stated.categories) < source.categories:
        raise ValueError(
            f'{name} has several categories of one name or id among {first_few(names)}, so that mmdet would number the '
            'classes wrongly; remove or rename the one without annotations (Roboflow writes one for the project)'
        )
    if names != list(classes):
        order = (
            f'{name} has the classes in the order {",".join(map(str, names))}, in which mmdet numbers them, but the '
            f'config has {",".join(map(str, classes))}'
        )
        if data.is_evaluated:
            raise ValueError(
                f'{order}{_training_data(data, name)}; sort the list of categories in this file so, with any ids '
                f'({_quoted(classes)})'
            )
        raise ValueError(f'{order}; give them in the order of the file: {_as_option(name, names)}')
    return names


def _training_data(data: DataSet, name: str) -> str:
    """Return the words that name the file of the training data, if it is another than that of the given name."""
    files = [one.annotations for one in data.experiment.datasets_of(['train']) if one.annotations]
    return f', those of the training data in {files[0]}' if files and not name.startswith(files[0]) else ''


def _quoted(names: Sequence[Any]) -> str:
    return f'"{",".join(map(str, names))}"'


def _as_option(name: str, names: Sequence[Any]) -> str:
    """Return the command with these classes of a file, or with the file if their names are not plain words."""
    is_plain = all(isinstance(one, str) and ',' not in one and one == one.strip() for one in names)
    file = name.partition(', in the part ')[0]
    given = _quoted(names) if is_plain else f'"{file}"'
    return f'`swin-dense config ... --classes {given}`'


def _check_count(source: Source) -> list[Any]:
    """Return the classes of a data set whose files do not list them; raise ValueError if the model has others."""
    data = source.data
    classes, count = list(source.built.metainfo.get('classes') or ()), data.experiment.class_count
    if classes and count not in (None, len(classes)):
        names = sorted({str(one.label) for one in source.stated.objects()})
        raise ValueError(
            f'{data.address} has {len(classes)} classes, {first_few(classes)}, but the model has {count}; set the '
            f'names, such as those in the files, with --set "{data.address}.metainfo.classes={names}", and num_classes '
            'of each head to their number'
        )
    return classes
