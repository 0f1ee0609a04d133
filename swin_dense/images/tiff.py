"""Read TIFF files with tifffile, whole or by regions: with all bands, at full scale, upright."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
from PIL import Image
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, SAMPLEFORMAT, SAMPLESPERPIXEL

from swin_dense.images.pixels import ImageError, Pixels, upright, within_16_bits

MAGIC = (b'II*\0', b'MM\0*', b'II+\0', b'MM\0+')
# Colours that PIL converts. Of JPEG, the decoder itself converts YCbCr.
_CONVERTED_BY_PIL = ('MINISWHITE', 'PALETTE', 'SEPARATED', 'YCBCR', 'CIELAB', 'ICCLAB', 'ITULAB', 'LOGL', 'LOGLUV')
_WHOLE_BITS = (8, 16, 32, 64)
_BITS_OF_PIL = (1, 2, 4)  # packed, on the scale of 8 bits
_ALPHA = (1, 2)  # values of the tag ExtraSamples
_DEPTH = 32997  # tag ImageDepth
_SLICES = 'not an image; pass its slices as arrays'
_logger = logging.getLogger(__package__)


def open_tiff(file: Any, number: int | None, stack: contextlib.ExitStack, by_regions: bool = False) -> Pixels | None:
    """Read a page of a TIFF, a path or an open file that ``stack`` closes.

    Without a ``number``, it is the only one, beside which there may be smaller versions of it. With ``by_regions``, the
    values are decoded when they are sliced, if the page and installed packages allow it. Return None if PIL must decode
    the file, because its colours need a conversion or a package is missing.

    Raises ImageError if the page does not exist, is one of several, or has an unsupported type of pixels.
    """
    page = _page_to_read(file, number, stack, by_regions)
    if page is None:
        return None
    kind, bits = page.dtype.kind, page.dtype.itemsize * 8
    is_32_bit = kind in 'iu' and bits == 32
    if not (kind == 'f' or (kind in 'iu' and bits <= 16) or is_32_bit):
        raise ImageError(f'its pixels are {page.dtype}; convert them to uint8, uint16 or floats between 0 and 1')
    if by_regions and not is_32_bit and _orientation(page) == 1 and find_spec('zarr'):
        import zarr

        stored = zarr.open_array(stack.enter_context(page.aszarr()), mode='r')
        return Pixels(_Regions(page, stored), _has_alpha(page))
    # PIL's limit on the size of an image; four channels count as one pixel.
    limit = Image.MAX_IMAGE_PIXELS
    if limit is not None and page.imagewidth * page.imagelength * max(1, page.samplesperpixel / 4) > 2 * limit:
        raise Image.DecompressionBombError(
            f'Image size ({page.imagewidth} x {page.imagelength} pixels of {page.samplesperpixel} channels) exceeds '
            f'limit of {2 * limit} pixels'
        )
    try:
        values = page.asarray()
    except ValueError:
        if find_spec('imagecodecs'):
            raise
        return None
    return Pixels(upright(_as_shown(page, values), _orientation(page)), _has_alpha(page))


def _page_to_read(file: Any, number: int | None, stack: contextlib.ExitStack, by_regions: bool) -> Any:
    """Return a page of tifffile, or None if PIL must decode the file; see :func:`open_tiff`."""
    try:
        import tifffile
    except ImportError:
        return None
    try:
        opened = stack.enter_context(tifffile.TiffFile(file, is_ome=False))  # OME metadata may refer to other files
        page = _chosen_page(opened, number)
        _check_shape(opened, page, number)
    except ImageError:
        raise
    except Exception:  # PIL may support the file; if not, it raises
        return None
    colours, compression = (getattr(tag, 'name', '') for tag in (page.photometric, page.compression))
    if page.dtype is not None and page.bitspersample not in (*_WHOLE_BITS, *_BITS_OF_PIL):
        raise ImageError(
            f'it has values of {page.bitspersample} bits; convert it to an image of 8 or 16 bits, or pass an array of '
            'floats from 0 to 1'
        )
    is_packed = page.dtype is None or page.bitspersample not in _WHOLE_BITS
    is_kept = (colours, compression) == ('YCBCR', 'JPEG') or (colours == 'MINISWHITE' and page.dtype == np.uint16)
    if is_packed or (colours in _CONVERTED_BY_PIL and not is_kept):
        _check_first_page(page, number)
        return None
    try:
        tifffile.TIFF.DECOMPRESSORS[page.compression]
    except KeyError:
        if by_regions:
            needed = '' if find_spec('imagecodecs') else ' without the package imagecodecs (pip install imagecodecs)'
            _logger.warning(
                'image %r is compressed as %s, which cannot be read by regions%s; it is decoded as a whole',
                str(file),
                compression or page.compression,
                needed,
            )
        _check_first_page(page, number)
        return None
    return page


def _check_first_page(page: Any, number: int | None) -> None:
    """Raise ImageError if PIL would read another page, as it takes the first one where no number is given."""
    if number is None and page.index > 0:
        raise ImageError(f'the first page is a smaller version of page {page.index}; give page={page.index}')


def check_kept_by_pil(image: Image.Image, number: int | None) -> None:
    """Raise ImageError for a TIFF of which PIL would lose pages, bands or bits, or wrap or invert values."""
    if number is None and getattr(image, 'n_frames', 1) > 1:
        raise ImageError(f'it has several {_choose_page()}{_install("tifffile")}')
    tags: Any = image.tag_v2  # type: ignore[attr-defined]
    if tags.get(_DEPTH, 1) > 1:
        raise ImageError(f'it is a volume, {_SLICES}')
    bits, formats = set(tags.get(BITSPERSAMPLE, (1,))), set(tags.get(SAMPLEFORMAT, (1,)))
    is_kept = (
        (bits <= {1, 2, 4, 8} and formats == {1})
        or (bits == {16} and image.mode.startswith('I;16') and tags.get(PHOTOMETRIC_INTERPRETATION) == 1)
        or bits == {32}
    )
    if not is_kept or tags.get(SAMPLESPERPIXEL, 1) != len(image.getbands()):
        raise ImageError(
            'PIL would lose bands or bits of it; convert it to RGB of 8 or 16 bits'
            f'{_install("tifffile", "imagecodecs")}'
        )


def _install(*packages: str) -> str:
    """Return the end of an advice: to install those of the packages that are absent."""
    absent = [package for package in packages if sys.modules.get(package, package) is None or not find_spec(package)]
    return f', or install {" and ".join(absent)}' if absent else ''


class _Regions:
    """The pixels of a page, decoded when they are sliced."""

    def __init__(self, page: Any, stored: Any) -> None:
        self._page, self._stored = page, stored
        self.shape = (page.imagelength, page.imagewidth)

    def __getitem__(self, box: tuple[slice, slice]) -> np.ndarray:
        region = (..., *box) if self._page.axes == 'SYX' else box
        return _as_shown(self._page, np.asarray(self._stored[region]))


def _chosen_page(file: Any, number: int | None) -> Any:
    """Return the page of a number; without a number, the first that is not a smaller version of another."""
    count = len(file.pages)
    if number is not None and number >= count:
        raise ImageError(f'there is no page {number}; it has {count}, counted from 0')
    full = [page for page in file.pages if not page.is_reduced] if number is None and count > 1 else []
    return full[0] if full else file.pages[number or 0]


def _check_shape(file: Any, page: Any, number: int | None) -> None:
    """Raise ImageError if a page is a volume, a stack, truncated, or, without a number, one of several."""
    count = len(file.pages)
    if page.axes not in ('YX', 'YXS', 'SYX'):
        raise ImageError(f'it is a volume with axes {page.axes} and shape {page.shape}, {_SLICES}')
    if count == 1:
        series = file.series[0]  # ImageJ, tifffile and others store a stack as one page, described in the metadata
        if math.prod(series.shape) > math.prod(page.shape):
            raise ImageError(f'it is a stack with axes {series.axes} and shape {series.shape}, {_SLICES}')
    elif number is None and any(other.hash == page.hash for other in file.pages if other.index != page.index):
        raise ImageError(f'it has {count} {_choose_page()}')
    if page.dataoffsets and np.add(page.dataoffsets, page.databytecounts).max() > file.filehandle.size:
        raise ImageError('the file is truncated')  # some decoders do not report it
    return page


def _orientation(page: Any) -> int:
    return page.tags['Orientation'].value if 'Orientation' in page.tags else 1


def _has_alpha(page: Any) -> bool:
    return bool(page.extrasamples) and page.extrasamples[-1] in _ALPHA


def _as_shown(page: Any, values: np.ndarray) -> np.ndarray:
    """Convert stored values of a page to pixels (H, W) or (H, W, C), with white as the largest value."""
    if page.axes == 'SYX':
        values = np.moveaxis(values, 0, 2)
    if getattr(page.photometric, 'name', '') == 'MINISWHITE':  # of 16 bits; PIL reads the others
        values = np.iinfo(values.dtype).max - values
    return within_16_bits(values) if values.dtype.kind in 'iu' and values.dtype.itemsize == 4 else values


def _choose_page() -> str:
    return 'pages of equal size; give page=, counted from 0, to read one of them'
