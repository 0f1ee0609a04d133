"""List and iterate over images in files, folders, glob patterns, lists and tar files, local or in object storage."""

from __future__ import annotations

import codecs
import glob
import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from swin_dense.utils import search
from swin_dense.utils.addresses import any_error_as_os_error, file_system, is_address, read_bytes
from swin_dense.utils.choices import IMAGE_SUFFIXES

_TAR = '.tar'
Skipped = dict[str, str | None]
Listed = Iterable[tuple[str, str | None]]
IsWanted = Callable[[str, str | None], bool]
# Keys under which fsspec's file systems report the version of an object, most reliable first.
_VERSION_KEYS = ('ETag', 'etag', 'LastModified', 'last_modified', 'mtime', 'updated', 'created')


class Member(io.BytesIO):
    """The content of an image file in a tar file, with its name for messages."""

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name


class Item(NamedTuple):
    """One image, by its absolute path or address; in a tar file, that of the tar file followed by the member's name."""

    name: str
    # Size and modification time, or the storage's equivalent such as an ETag; None if the image does not exist.
    version: str | None
    source: str | Member | None = None  # for read_image; None if the image is not wanted
    error: str | None = None  # why a tar file cannot be read, or only in part


class Location(NamedTuple):
    """Where an image is stored, so that it can be read on its own: a file, or a place in a tar file, in bytes."""

    name: str
    tar: str | None = None
    offset: int = 0
    size: int = 0

    def source(self) -> str | Member:
        """Return a source for :func:`swin_dense.features.images.read_image`; one in a tar file is read now."""
        if self.tar is None:
            return self.name
        with any_error_as_os_error(self.tar), _open(self.tar) as file:
            file.seek(self.offset)
            return Member(file.read(self.size), self.name)


def list_images(
    places: Sequence[str | os.PathLike], skipped: Skipped | None = None, without: Sequence[str | os.PathLike] = ()
) -> dict[str, str | None]:
    """List the image and tar files of files, folders, glob patterns, lists and addresses, in a fixed order.

    Folders are searched recursively, following links, for files with the suffix of an image or tar file. A ``.txt``
    file contains one path or address per line.

    Args:
        places: paths, patterns and addresses.
        skipped: filled with the paths that are skipped in folders, and the reason, or None for other suffixes.
        without: folders that are not searched.

    Returns:
        {name: version}; the version is None unless a listing of object storage contains it.

    Raises:
        FileNotFoundError: a place does not exist, or is a pattern without matches.
    """
    found: dict[str, str | None] = {}
    skipped = {} if skipped is None else skipped
    for place in (os.fspath(place) for place in places):
        path = Path(place)
        if is_address(place) and not place.endswith('.txt'):
            found.update(_expand_address(place, skipped))
            continue
        if path.is_dir() and path.suffix != '.zarr':
            left_out = {os.path.realpath(one) for one in without}
            names = sorted(search.walk(place, _is_listed, skipped, left_out))
        elif path.suffix == '.txt' and (is_address(place) or path.is_file()):
            names = lines_in(place)
        elif path.exists():
            names = [place]
        else:
            matches = sorted(glob.glob(place, recursive=True))
            if not matches:
                raise FileNotFoundError(f'{place!r} does not exist, or is a pattern without matches')
            names = [match for match in matches if match.endswith('.zarr') or not search.is_special(match)]
        for name in names:
            full_name = name if is_address(name) else os.path.abspath(name)
            found[full_name] = None
    return found


def iterate(listed: Listed, is_wanted: IsWanted = lambda name, version: True) -> Iterator[Item]:
    """Yield every image of :func:`list_images`, including each one in tar files, of which only wanted ones are read.

    ``is_wanted`` is called with the name and the current version of each image.
    """
    for name, version in listed:
        if name.endswith(_TAR):
            yield from _members(name, is_wanted)
        else:
            version = version or version_of(name)
            source = name if is_wanted(name, version) else None
            yield Item(name, version, source)


def locate(listed: Iterable[str]) -> Iterator[Location]:
    """Yield the location of every name of :func:`list_images`, and of each image in tar files, without reading images.

    Raises OSError if a tar file cannot be read, or only in part.
    """
    for name in listed:
        if not name.endswith(_TAR):
            yield Location(name)
            continue
        with any_error_as_os_error(name), _open(name) as file, tarfile.open(fileobj=file) as archive:
            members = {member.name: member for member in archive if member.isfile() and is_image(member.name)}
        for member in members.values():
            yield Location(f'{name}/{member.name}', name, member.offset_data, member.size)


def is_image(name: str) -> bool:
    """Return whether a file has the suffix of an image."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def _is_listed(name: str) -> bool:
    return is_image(name) or name.endswith(_TAR)


def version_of(name: str) -> str | None:
    """Return the size and modification time of a file or object as text, or None if it does not exist."""
    try:
        if is_address(name):
            with any_error_as_os_error(name):
                system, inside = file_system(name)
                return _version_in(system.info(inside))
        status = os.stat(name)
    except OSError:
        return None
    return f'{status.st_size}-{status.st_mtime_ns}'


def tar_of(name: str) -> str | None:
    """Return the tar file that contains an image of :func:`iterate`, or None if the image is a file of its own."""
    tar, slash, _ = name.partition(f'{_TAR}/')
    return f'{tar}{_TAR}' if slash else None


def _members(tar: str, is_wanted: IsWanted) -> Iterator[Item]:
    members: dict[str, tarfile.TarInfo] = {}  # of several members with one name, the last replaces the others
    damage: Exception | None = None
    try:
        with any_error_as_os_error(tar), _open(tar) as file, tarfile.open(fileobj=file) as archive:
            try:
                members.update((member.name, member) for member in archive)
            except tarfile.TarError as error:
                damage = error
            for member in members.values():
                if member.isfile() and is_image(member.name):
                    name, version = f'{tar}/{member.name}', f'{member.size}-{member.mtime}'
                    source = None
                    if is_wanted(name, version) and (content := archive.extractfile(member)) is not None:
                        source = Member(content.read(), name)
                    yield Item(name, version, source)
            if damage is not None:
                raise damage
    except OSError as error:
        yield Item(tar, version_of(tar), error=f'tar file {tar!r} cannot be read, or only in part: {error}')


def _open(path: str) -> Any:
    if is_address(path):
        system, inside = file_system(path)
        return system.open(inside, 'rb')
    return open(path, 'rb')


def _version_in(info: dict[str, Any]) -> str:
    """Return the version of a file from its fsspec info."""
    state = next((info[key] for key in _VERSION_KEYS if info.get(key)), '')
    return f'{info.get("size")}-{state.timestamp() if isinstance(state, datetime) else state}'


def _expand_address(address: str, skipped: Skipped) -> Iterator[tuple[str, str | None]]:
    system, inside = file_system(address)
    if not glob.has_magic(inside) and _is_listed(address):
        yield address, None
        return
    found = system.glob(inside, detail=True) if glob.has_magic(inside) else system.find(inside, detail=True)
    if not found:
        raise FileNotFoundError(f'{address!r} does not exist, or is a pattern without matches')
    for path, info in sorted(found.items()):
        if info['type'] == 'file' and _is_listed(path):
            yield system.unstrip_protocol(path), _version_in(info)
        elif info['type'] == 'file':
            skipped[path] = None


def lines_in(place: str | os.PathLike) -> list[str]:
    """Return the lines of a text file that are not empty: UTF-8, or UTF-16 as Windows writes it."""
    content = read_bytes(place)
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        text = content.decode('utf-16')
    else:
        text = content.removeprefix(codecs.BOM_UTF8).decode(errors='surrogateescape')
    return [line for line in text.splitlines() if line.strip()]
