"""Names of files, as a config or annotations give them and as they are on the disk, for checks and their messages."""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from swin_dense.images.listing import count_endings


def missing_files(paths: Sequence[str]) -> dict[str, str]:
    """Return the paths that are no regular file, or an empty one, with a text that names them and the reason."""
    missing = {}
    for path in paths:
        try:
            status = os.stat(path)
        except (OSError, ValueError) as error:  # ValueError: a null character
            reason = getattr(error, 'strerror', None) or error
            if name_on_disk('', path) != path:
                reason = f'{reason}; its folder has this name in another Unicode form: convmv renames files'
            missing[path] = f'{path} ({reason})'
            continue
        if not stat.S_ISREG(status.st_mode):
            missing[path] = f'{path} (no file)'
        elif status.st_size == 0:
            missing[path] = f'{path} (empty)'
    return missing


def endings_in(folder: Path) -> str:
    """Describe the file name endings in a folder, searched recursively, with counts, for an error message."""
    listed = count_endings(path for path in folder.rglob('*') if path.is_file())
    return f'whose files end in {listed}' if listed else 'which contains no files'


def name_on_disk(folder: str, name: str) -> str:
    """Return the name of a file in a folder in another Unicode form, composed or decomposed, if only that exists."""
    if name.isascii() or os.path.exists(os.path.join(folder, name)):
        return name
    forms = [unicodedata.normalize(form, name) for form in ('NFC', 'NFD')]
    return next((form for form in forms if os.path.exists(os.path.join(folder, form))), name)


def hint_on_name(folders: Sequence[Path], name: str) -> str:
    """Return how a file name in annotations differs from that of a file in folders; nothing if there is none.

    Label Studio writes names with %20, or with folders of its server, and programs on Windows write backslashes.
    """
    with_slashes = unquote(name.replace('\\', '/')).rstrip('/')
    last = with_slashes.rpartition('/')[2]
    if not last:
        return ''
    for folder in folders:
        if (folder / last).is_file():
            return f'; {folder / last} is there: write names relative to the folder of images, with /, without %20'
    return ''
