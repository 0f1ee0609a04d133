"""What a reader makes of images: from their headers, and from one decoded image of each kind of header."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from swin_dense.images.headers import Header, header_of
from swin_dense.images.pixels import ImageError, name_of, upright

TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height
_INVERSE = {6: 8, 8: 6}  # other orientations are their own inverse
_MOST = 1000  # headers
_FEW_BITS = (8, 10, 12, 14)  # of cameras and scanners, which store them in 16


@dataclass(frozen=True)
class Reader:
    """What reads images for a model.

    Attributes:
        name: what notes call it, such as 'LoadImageFromFile'.
        decode: returns the values that it keeps of an image, (H, W) or (H, W, C), in the type of its decoder; None if
            it cannot read the image, on which there is no note then.
        cure: returns what to do, given arguments of :class:`swin_dense.features.Normalization` that lose nothing.
        fills_range: whether it divides integers by the largest value of their type, also if an image uses few bits.
        chooses_bands: whether it was told which bands to read, so that others are not missing.
        is_upright: whether it applies the orientation of EXIF; None compares what it reads with the upright image.
    """

    name: str
    decode: Callable[[Any], np.ndarray | None]
    cure: Callable[[Mapping[str, Any]], str]
    fills_range: bool = False
    chooses_bands: bool = False
    is_upright: bool | None = None


class Kind(NamedTuple):
    """Images with the same header but for the size, of which one was decoded."""

    header: Header | None  # None if it cannot be read
    files: list[tuple[Any, tuple[int, int]]]  # each with its stored size, (width, height)
    decoded: Any  # the one that was decoded
    shape: tuple[int, ...]  # as it was read
    is_upright: bool  # the reader applies the orientation
    loss: str  # of bits and bands, and its cure; '' without any


def read_kinds(sources: Iterable[Any], reader: Reader, seen: set[Header | None] | None = None) -> list[Kind]:
    """Group images by their headers, and read one of each kind.

    ``sources`` are images as for :func:`swin_dense.images.reading.read_image`. Kinds in ``seen`` are left out, and the
    others are added to it. An error of the reader is raised.
    """
    found: dict[Header | None, list[tuple[Any, tuple[int, int]]]] = defaultdict(list)
    for source in sources:
        header = header_of(source)
        if header is None:
            found[None].append((source, (0, 0)))
        else:  # the size is no part of the kind
            found[header._replace(size=(0, 0))].append((source, header.size))
    kinds = []
    for header, files in found.items():
        if seen is not None and header in seen:
            continue
        if seen is not None:
            seen.add(header)
        # An image that is not square shows whether it is turned.
        oblong = [source for source, (width, height) in files if width != height]
        source = oblong[0] if oblong else files[0][0]
        image = reader.decode(source)
        if image is None:
            continue
        is_upright, loss = True, ''
        if header is not None:
            if header.orientation != 1:
                is_upright = _is_upright(source, image, header.orientation, reader)
            loss = _loss(header, source, image, reader)
        kinds.append(Kind(header, files, source, image.shape, is_upright, loss))
    return kinds


def notes_on_reading(sources: Sequence[Any], reader: Reader, seen: set[Header | None] | None = None) -> list[str]:
    """Return a note on each loss of bits and bands, and on the orientations that are applied, or not.

    At most a thousand headers are read, evenly spaced. ``seen`` is as for :func:`read_kinds`; of images without a
    header, such as open files, nothing is read.
    """
    seen = set() if seen is None else seen
    seen.add(None)
    sources = sources[:: -(-len(sources) // _MOST) or 1]
    kinds = read_kinds(sources, reader, seen)
    notes = notes_on_losses(kinds, len(sources))
    for is_upright in (True, False):
        turned = []
        for kind in kinds:
            if kind.header is not None and kind.header.orientation != 1 and kind.is_upright == is_upright:
                turned += [source for source, _ in kind.files]
        if turned:
            notes.append(
                f'{len(turned)} of {len(sources)} images, such as {_named(turned[0])}, have an EXIF orientation, and '
                f'are read {view(is_upright)}: results are of the same view'
            )
    return notes


def notes_on_losses(kinds: Sequence[Kind], total: int) -> list[str]:
    """Return a note on each kind of which the reader loses bits or bands."""
    lossy = [kind for kind in kinds if kind.loss]
    return [f'{len(kind.files)} of {total} images, such as {_named(kind.decoded)}, {kind.loss}' for kind in lossy]


def view(is_upright: bool) -> str:
    """Return how images with an orientation are read."""
    return 'upright, as it says' if is_upright else 'as stored, without it'


def scale_of(values: np.ndarray) -> int:
    """Return the largest value that integers of as many bits as these have; 1 for floats up to 1."""
    largest = int(np.ceil(values.max()))
    return max(1, (1 << largest.bit_length()) - 1)


def _loss(header: Header, source: Any, image: np.ndarray, reader: Reader) -> str:
    """Return which bits and bands of an image a reader loses, and the cure, or ''."""
    channels = 1 if image.ndim == 2 else image.shape[2]
    has_lost_bands = header.extra > 0 and (header.bands > channels or header.bands == 2 != channels)
    losses: list[str] = []
    options: dict[str, Any] = {}
    if image.dtype.kind in 'iu' and header.bits > 8 * image.dtype.itemsize:
        losses.append(
            f'have {header.bits} bits for each value, which {reader.name} makes {8 * image.dtype.itemsize}: it reads '
            f'the values of this one as {image.min()} to {image.max()}'
        )
        options['scale'] = _whole_scale(source, header)
    elif reader.fills_range and (header.kind, header.bits) == ('u', 16):
        used = [bits for bits in _FEW_BITS if image.max() < 1 << bits]
        if used:
            losses.append(
                f'have 16 bits for each value, of which this one uses at most {used[0]}: {reader.name} divides its '
                f'values by 65535, to at most {image.max() / 65535:.2g}'
            )
            options['scale'] = (1 << used[0]) - 1
    if has_lost_bands and not reader.chooses_bands:
        losses.append(f'have {header.bands} bands, of which {reader.name} drops the last {header.extra}')
        options['bands'] = tuple(range(header.bands))
    return f'{" and ".join(losses)}; {reader.cure(options)}' if losses else ''


def _whole_scale(source: Any, header: Header) -> int:
    """Return the largest value of the bits that an image uses, or of those that it has if it cannot be read whole."""
    try:
        return scale_of(_whole(source))
    except (ImageError, ImportError, OSError):  # a package that reads all of it is not installed
        return (1 << header.bits) - 1


def _is_upright(source: Any, image: np.ndarray, orientation: int, reader: Reader) -> bool:
    """Return whether pixels, as they are read, are those of the upright image rather than of the stored image."""
    if reader.is_upright is not None:
        return reader.is_upright
    try:
        shown = _whole(source).astype(np.float32)
    except (ImageError, ImportError, OSError):
        return True
    shown = shown.reshape(*shown.shape[:2], -1).mean(2)
    grey = image.reshape(*image.shape[:2], -1).mean(2)
    stored = upright(shown, _INVERSE.get(orientation, orientation))
    if shown.shape != stored.shape:
        return grey.shape == shown.shape
    return bool(np.vdot(grey - grey.mean(), shown - stored) >= 0)


def _whole(source: Any) -> Any:
    """Return the values of an image, upright and with all bits and bands."""
    from swin_dense.images.reading import pixels_of  # needs torch, which a file of a whole model runs without

    return pixels_of(source).values


def _named(source: Any) -> str:
    return str(source) if isinstance(source, (str, PathLike)) else name_of(source)
