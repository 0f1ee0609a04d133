"""Files of annotations in the format of COCO: their content, read once, and what tools write into it besides."""

from __future__ import annotations

import json
import math
import os
from typing import Any

from mmengine import fileio

from swin_dense.utils import checks

SPLIT_OF = 'split_of'  # entry of a file that `--val-share` writes: the file that it is a part of
_TURNS = ('rotation', 'rotation_angle', 'angle')  # keys in degrees, of CVAT and other tools
# Entries that each section of COCO's format needs, and their types.
_WORDS = {int: 'a whole number', str: 'text'}
_IDS = (int, str)
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    'images': {'id': _IDS, 'file_name': (str,)},
    'categories': {'id': _IDS, 'name': _IDS},
    'annotations': {'id': _IDS, 'image_id': _IDS, 'category_id': _IDS},
}


def read_coco(name: str | os.PathLike[str], backend_args: Any = None) -> Any:
    """Return the content of a file of annotations in the format of COCO, in any encoding of Unicode.

    Args:
        name: its path or address.
        backend_args: of mmengine's ``fileio``, as a data set has them.

    Raises:
        ValueError: it is no JSON, or sections or ids that every reader needs are missing or of another type.
    """
    name = os.fspath(name)
    if not name.endswith('.json') or os.path.isdir(name):
        raise ValueError(
            f'{name} is no .json file, but annotations must be in the format of COCO; docs/own-data.md shows how to '
            'convert those of Pascal VOC (XML) and YOLO (txt)'
        )
    try:
        content = json.loads(fileio.get(name, backend_args=backend_args))
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{name} cannot be read as JSON ({error})') from error
    for section, fields in _FIELDS.items():
        entries = content.get(section) if isinstance(content, dict) else None
        if entries is None and section == 'annotations':
            continue
        if not isinstance(entries, list):
            raise ValueError(f'{name} is no file of annotations in the format of COCO, because it has no {section}')
        for key, kinds in fields.items():
            wrong = [entry for entry in entries if not isinstance(entry, dict) or not isinstance(entry.get(key), kinds)]
            if wrong:
                words = ' or '.join(_WORDS[kind] for kind in kinds)
                raise ValueError(
                    f'{name}: {key} of each of the {section} must be {words}, got {shown(wrong[0])} '
                    f'({len(wrong)} of {len(entries)})'
                )
    return content


def encoding_of(name: str | os.PathLike[str]) -> str:
    """Return the encoding of a local file of JSON, as Python's own decoder detects it by the first bytes."""
    with open(name, 'rb') as file:
        return json.detect_encoding(file.read(4))


def turn_of(entry: Any) -> float:
    """Return the angle, in degrees, by which a tool turned the rectangle of an annotation; 0 without."""
    attributes = entry.get('attributes')
    for part in (attributes if isinstance(attributes, dict) else {}, entry):
        for key in _TURNS:
            if isinstance(part.get(key), (int, float)) and math.isfinite(part[key]):
                return float(part[key])
    return 0.0


def shown(entry: Any) -> str:
    """Return an entry of a file for a message, without its mask."""
    if isinstance(entry, dict):
        entry = {key: value for key, value in entry.items() if key not in ('segmentation', 'mask')}
    return checks.shortened(repr(entry))
