"""Where a command writes its one file."""

from __future__ import annotations

from pathlib import Path


def check_out(out: Path, force: bool) -> None:
    """Refuse a place where no file can be written, or where one must not be replaced.

    Raises:
        OSError: its folder does not exist, it is a folder itself, or it exists and ``force`` is not given.
    """
    if not out.parent.is_dir():
        raise FileNotFoundError(f'there is no folder {out.parent}')
    if out.is_dir():
        raise IsADirectoryError(f'{out} is a folder')
    if out.exists() and not force:
        raise FileExistsError(f'{out} exists already; --force replaces it')
