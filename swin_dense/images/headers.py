"""What the header of an image file says about its pixels, before anything is decoded."""

from __future__ import annotations

import io
import warnings
from os import PathLike
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image
from PIL import TiffImagePlugin as TAGS

from swin_dense.images import tiff
from swin_dense.images.pixels import ORIENTATION, quiet_decoders

_PNG_DEPTH = 24  # position of the bit depth in a PNG
_BIG_TIFF = 43
_BITS_OF_MODES = {'I': 32, 'F': 32}
_SIGNS = {1: 'u', 2: 'i', 3: 'f'}  # values of the tag SampleFormat
_COLOURS = {2: 3, 5: 4, 6: 3, 8: 3}  # of the tag PhotometricInterpretation; others have one band


class Header(NamedTuple):
    """A header: the size (width, height) is that of the stored image, before its orientation is applied."""

    format: str
    size: tuple[int, int]
    bits: int
    kind: str  # of the values: 'u' without sign, 'i' with sign, 'f' floats
    bands: int
    extra: int  # bands beside grey or colours, such as opacity and near infrared
    orientation: int  # that of EXIF, 1 to 8


def header_of(source: Any) -> Header | None:
    """Return the header of an image, which is a file, its content, an array or a PIL image; None if it is unknown."""
    if isinstance(source, np.ndarray) and source.ndim in (2, 3):
        bands = 1 if source.ndim == 2 else source.shape[2]
        return Header('array', source.shape[1::-1], 8 * source.itemsize, source.dtype.kind, bands, 0, 1)
    if isinstance(source, Image.Image):
        return _pil_header(source)
    return read_header(source) if isinstance(source, (str, PathLike, bytes)) else None


def read_header(file: str | PathLike[str] | bytes) -> Header | None:
    """Return the header of a file or its content; None if neither PIL nor its reader of TIFF's tags understands it."""
    try:
        with (
            quiet_decoders(),
            warnings.catch_warnings(),
            io.BytesIO(file) if isinstance(file, bytes) else open(file, 'rb') as content,
        ):
            warnings.simplefilter('ignore')
            start = content.read(_PNG_DEPTH + 1)
            if start.startswith(tiff.MAGIC):
                return _tiff_header(start, content)
            with Image.open(content) as image:
                header = _pil_header(image)
            # PIL decodes some images of 16 bits to 8.
            return header._replace(bits=max(8, start[_PNG_DEPTH])) if header.format == 'PNG' else header
    except Exception:  # of any decoder, for content of any kind
        return None


def _tiff_header(start: bytes, file: BinaryIO) -> Header:
    tags: Any = TAGS.ImageFileDirectory_v2(start[: 16 if start[2] == _BIG_TIFF else 8])
    file.seek(tags.next)
    tags.load(file)
    bits, formats = tags.get(TAGS.BITSPERSAMPLE, (1,)), tags.get(TAGS.SAMPLEFORMAT, (1,))
    bands, colours = tags.get(TAGS.SAMPLESPERPIXEL, 1), _COLOURS.get(tags.get(TAGS.PHOTOMETRIC_INTERPRETATION, 1), 1)
    extra = len(tags.get(TAGS.EXTRASAMPLES, ())) or max(0, bands - colours)
    size = (tags[TAGS.IMAGEWIDTH], tags[TAGS.IMAGELENGTH])
    return Header('TIFF', size, max(bits), _SIGNS.get(formats[0], 'u'), bands, extra, _orientation(tags))


def _pil_header(image: Image.Image) -> Header:
    bits = 16 if image.mode.startswith('I;16') else _BITS_OF_MODES.get(image.mode, 8)
    if image.format == 'PPM' and image.mode == 'I':
        bits = 16
    bands = image.getbands()
    # PIL decodes a PNG without EXIF to look for it.
    orientation = _orientation(image.getexif()) if 'exif' in image.info else 1
    kind = 'f' if image.mode == 'F' else 'u'
    return Header(image.format or '', image.size, bits, kind, len(bands), int(bands[-1] in 'Aa'), orientation)


def _orientation(tags: Any) -> int:
    """Return the orientation in tags of EXIF or TIFF; 1, which is upright, for values that EXIF does not define."""
    orientation = tags.get(ORIENTATION, 1)
    return orientation if orientation in range(1, 9) else 1
