"""Image files of every format, and random damage to them."""

import io
import random
from importlib.util import find_spec

import numpy as np
from PIL import Image

from tests.conftest import IfInstalled, photograph

RGB = photograph(40, 56)
DEEP = RGB.astype(np.uint16) * 257
tifffile, cv2 = IfInstalled('tifffile'), IfInstalled('cv2')


def counts(*shape, most=9000, dtype=np.uint16):
    return np.random.default_rng(0).integers(0, most, shape, dtype)


def counted(pages):
    """Return how an error states a number of pages, which only tifffile counts."""
    return pages if find_spec('tifffile') else 'several'


def encode(image, file_format, **options):
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(file, file_format, **options)
    return file.getvalue()


def encode_tiff(pixels, **options):
    file = io.BytesIO()
    tifffile.imwrite(file, pixels, **options)
    return file.getvalue()


def with_pil(file_format, mode='RGB', **options):
    return encode(Image.fromarray(RGB).convert(mode), file_format, **options)


ORIGINALS = {
    'jpeg': lambda: with_pil('jpeg'),
    'progressive jpeg': lambda: with_pil('jpeg', progressive=True, exif=b'Exif\0\0II*\0\x08\0\0\0\0\0'),
    'cmyk jpeg': lambda: with_pil('jpeg', 'CMYK'),
    'png': lambda: with_pil('png'),
    'palette png': lambda: with_pil('png', 'P'),
    '16-bit png': lambda: cv2.imencode('.png', DEEP)[1].tobytes(),
    'gif': lambda: with_pil('gif', save_all=True, append_images=[Image.fromarray(RGB[::-1])]),
    'bmp': lambda: with_pil('bmp'),
    'webp': lambda: with_pil('webp'),
    'avif': lambda: with_pil('avif'),
    'jpeg 2000': lambda: with_pil('jpeg2000'),
    'ppm': lambda: with_pil('ppm'),
    'tga': lambda: with_pil('tga'),
    'tiff': lambda: with_pil('tiff'),
    'lzw tiff': lambda: with_pil('tiff', compression='tiff_lzw'),
    '16-bit tiff': lambda: encode_tiff(DEEP, photometric='rgb'),
    'tiled jpeg tiff': lambda: encode_tiff(RGB, tile=(16, 16), compression='jpeg'),
    'tiled zlib tiff': lambda: encode_tiff(RGB, tile=(16, 16), compression='zlib', photometric='rgb'),
    'tiff of 5 channels': lambda: encode_tiff(
        RGB[..., [0, 1, 2, 0, 1]], photometric='minisblack', planarconfig='contig'
    ),
    'big tiff': lambda: encode_tiff(RGB, bigtiff=True, photometric='rgb'),
}
if '.avif' not in Image.registered_extensions():  # an older Pillow
    del ORIGINALS['avif']


def mutate(content: bytes, chance: random.Random) -> bytes:
    """Damage the content of a file: truncate it, or change, repeat, drop or overwrite a part, mostly in the header."""
    damaged = bytearray(content)
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        end = len(damaged) if chance.random() < 0.5 else min(len(damaged), 200)
        at = chance.randrange(max(end, 1))
        length = chance.choice([1, 1, 2, 4, 16, 64])
        kind = chance.choice(['cut', 'bits', 'bytes', 'largest', 'zeros', 'drop', 'repeat'])
        if kind == 'cut':
            del damaged[at:]
        elif kind == 'bits' and damaged:
            damaged[at] ^= 1 << chance.randrange(8)
        elif kind == 'bytes':
            damaged[at : at + length] = chance.randbytes(length)
        elif kind == 'largest':
            damaged[at : at + length] = b'\xff' * length
        elif kind == 'zeros':
            damaged[at : at + length] = bytes(length)
        elif kind == 'drop':
            del damaged[at : at + length]
        elif kind == 'repeat':
            damaged[at:at] = damaged[at : at + length]
    return bytes(damaged)
