"""Which image files a user means: files, folders, patterns and lists."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

IMAGE_SUFFIXES = frozenset(
    f'.{suffix}'
    for suffixes in (
        'apng avif bmp dib gif j2c j2k jfif jp2 jpc jpe jpeg jpf jpg jpx',
        'pbm pcx pfm pgm png pnm ppm qoi sgi tga tif tiff webp zarr',
    )
    for suffix in suffixes.split()
)


def list_images(
    sources: Sequence[str | os.PathLike], on_skipped: Callable[[str, str], None] = lambda path, reason: None
) -> list[str]:
    """Return the image files that files, folders, glob patterns and lists name, each once, in a fixed order.

    A folder stands for the images anywhere below it, by suffix, links to folders included; a ``.txt`` file for one
    path per line.

    Args:
        sources: what to look through.
        on_skipped: called with every file or folder below a folder that is passed over, and why.

    Raises:
        FileNotFoundError: a source does not exist and is no pattern that matches something.
    """
    found: dict[str, str] = {}
    for source in sources:
        for path in _expand(os.fspath(source), on_skipped):
            found.setdefault(os.path.abspath(path), path)
    return list(found.values())


def _expand(source: str, on_skipped: Callable[[str, str], None]) -> list[str]:
    path = Path(source)
    if path.suffix == '.txt' and path.is_file():
        lines = path.read_text(encoding='utf-8', errors='surrogateescape').splitlines()
        return [line for line in lines if line.strip()]
    if path.is_dir() and path.suffix != '.zarr':
        return sorted(_walk(source, on_skipped))
    if path.exists():
        return [source]
    matches = sorted(glob.glob(source, recursive=True))
    if not matches:
        raise FileNotFoundError(f'{source!r} is no file, folder or pattern that matches something')
    return [match for match in matches if not os.path.isdir(match) or match.endswith('.zarr')]


def _walk(source: str, on_skipped: Callable[[str, str], None]) -> Iterator[str]:
    def skip(error: OSError) -> None:
        on_skipped(str(error.filename), f'cannot be read: {error.strerror}')

    seen: set[str] = set()  # folders, as links may lead in circles
    for parent, folders, files in os.walk(source, onerror=skip, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        arrays = [name for name in folders if name.endswith('.zarr')]
        folders[:] = sorted(name for name in folders if name not in arrays)
        for name in files + arrays:
            path = os.path.join(parent, name)
            if Path(name).suffix.lower() in IMAGE_SUFFIXES:
                yield path
            else:
                on_skipped(path, f'is no image by its suffix {Path(name).suffix!r}')
