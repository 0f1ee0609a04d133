"""TIFF files equal the arrays that were written, whole and by regions, or are refused with the option to give."""

import io
import logging
import sys

import numpy as np
import PIL
import pytest
import torch
from PIL import Image, ImageOps

from swin_dense import SwinBackbone, extract_pyramid
from swin_dense.images import tiff
from swin_dense.images.normalization import Normalization
from swin_dense.images.pixels import ImageError, Pixels
from swin_dense.images.reading import read_image, scale, to_tensor
from swin_dense.images.regions import open_large_image
from tests.conftest import TINY, IfInstalled, assert_same, assert_within, photograph, tiny
from tests.images.mutations import encode_tiff, with_pil
from tests.processes import python

tifffile = IfInstalled('tifffile')
pytest.importorskip('imagecodecs')

RGB = photograph(70, 90)
GREY = RGB[:, :, 0]
BANDS = np.concatenate([RGB, RGB[::-1, ::-1]], 2)
FOUR = BANDS[:, :, :4]
HALF = (GREY / 255).astype(np.float16)
BACKBONE = tiny()
PALETTE = np.random.default_rng(0).integers(0, 256, (3, 256))


def planar(pixels):
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def of_bits(pixels, bits):
    """Return 8-bit pixels on the scale of another number of bits; the result uses all values."""
    largest = 2**bits - 1
    return np.round(pixels / 255 * largest).astype(np.uint8 if bits <= 8 else np.uint16)


GREYSCALE = {'photometric': 'minisblack'}
SEPARATE = {**GREYSCALE, 'planarconfig': 'separate'}
TOGETHER = {**GREYSCALE, 'planarconfig': 'contig'}
COLOUR = {'photometric': 'rgb'}
TILES = {'tile': (32, 16)}
DEEP = RGB * np.uint16(257)


def greyscale(bits):
    pixels = of_bits(GREY, bits)
    return pixels, {**GREYSCALE, 'bitspersample': bits}, pixels / (2**bits - 1)


def separate(count, dtype, compression):
    scale = 257 if dtype == 'uint16' else 1
    bands = BANDS[:, :, :count]
    return planar(bands).astype(dtype) * scale, {**SEPARATE, 'compression': compression}, bands / 255


# Arrays as written, the options of tifffile.imwrite, and the values on the scale 0 to 1 that must be read.
FILES = {
    '1 bit': (GREY > 99, GREYSCALE, GREY > 99),
    '1 bit, white is 0': (GREY > 99, {'photometric': 'miniswhite'}, GREY <= 99),
    **{f'{bits} bits': greyscale(bits) for bits in (2, 4, 8, 16)},
    '16 bits of colour': (DEEP, COLOUR, RGB / 255),
    '16 bits, white is 0': (GREY * np.uint16(257), {'photometric': 'miniswhite'}, 1 - GREY / 255),
    '32 bits': (GREY * np.uint32(257), GREYSCALE, GREY / 255),
    'float16': (HALF, GREYSCALE, HALF),
    'float32': ((RGB / 255).astype(np.float32), COLOUR, RGB / 255),
    '2 bands': (BANDS[:, :, :2], TOGETHER, BANDS[:, :, :2] / 255),
    '4 bands': (FOUR, TOGETHER, FOUR / 255),
    '6 bands': (BANDS, {**TOGETHER, 'compression': 'lzw'}, BANDS / 255),
    'RGB and infrared': (FOUR, {**COLOUR, 'extrasamples': ['unspecified']}, FOUR / 255),
    'RGBA': (FOUR, COLOUR, FOUR / 255),
    'palette': (
        GREY,
        {'photometric': 'palette', 'colormap': (PALETTE * 257).astype(np.uint16)},
        PALETTE.T[GREY] / 255,
    ),
    'big-endian 16 bits': (DEEP, {**COLOUR, 'byteorder': '>'}, RGB / 255),
    'big': (RGB, {**COLOUR, 'bigtiff': True}, RGB / 255),
    'zstd': (RGB, {**COLOUR, 'compression': 'zstd', 'predictor': True}, RGB / 255),
}
for count in (2, 3, 4):
    for dtype, compression in (('uint8', 'deflate'), ('uint16', 'lzw'), ('uint8', None)):
        FILES[f'{count} separate {dtype} bands, {compression}'] = separate(count, dtype, compression)


def encode(pixels, **options):
    try:
        return encode_tiff(pixels, **options)
    except NotImplementedError as missing:  # packed bits, before imagecodecs 2025.8, which needs Python 3.11
        pytest.skip(f'imagecodecs has no {missing}')


def expected_of(values):
    values = np.atleast_3d(np.asarray(values, np.float64))
    return torch.from_numpy(values).permute(2, 0, 1).float()


def assert_region(image, box, expected):
    """Compare a region, of which the box is (top, left, bottom, right), with that part of a tensor."""
    top, left, bottom, right = box
    part = scale(to_tensor(Pixels(image.read(*box)), len(expected)))
    assert_within(part, expected[:, top:bottom, left:right], 1e-5)


@pytest.fixture
def save(tmp_path):
    def write(pixels, **options):
        (tmp_path / 'x.tif').write_bytes(encode(pixels, **options))
        return tmp_path / 'x.tif'

    return write


@pytest.mark.parametrize(
    'options',
    [{}, TILES],
    ids=['strips', 'tiles'],
)
@pytest.mark.parametrize('form', FILES)
def test_pixels_equal_the_array_that_was_written(form, options, save):
    pixels, how, values = FILES[form]
    if options and how.get('bitspersample', 8) not in (8, 16):
        pytest.skip('tifffile packs bits only in strips')
    path, expected = save(pixels, **how, **options), expected_of(values)
    for source in (path, path.read_bytes()):
        assert_within(read_image(source, len(expected)), expected, 1e-5)
    with open_large_image(path) as image:
        assert image.size == (70, 90)
        assert_region(image, (0, 0, 70, 90), expected)
        assert_region(image, (17, 20, 50, 33), expected)


@pytest.mark.parametrize('orientation', range(1, 9))
@pytest.mark.parametrize('options', [{'photometric': 'rgb'}, {**SEPARATE, 'compression': 'deflate'}])
def test_every_orientation(options, orientation, save):
    pixels = planar(DEEP) if 'planarconfig' in options else DEEP
    path = save(pixels, **options, extratags=[(274, 'H', 1, orientation, True)])
    stored = Image.fromarray(RGB)
    stored.getexif()[274] = orientation
    expected = expected_of(np.array(ImageOps.exif_transpose(stored)) / 255)
    assert_within(read_image(path), expected, 1e-5)
    with open_large_image(path) as image:
        assert image.size == expected.shape[1:]
        assert_region(image, (5, 6, 50, 60), expected)


BANDED = ['2 bands', '4 bands', 'RGB and infrared', '2 separate uint8 bands, deflate', '6 bands']


@torch.no_grad()
@pytest.mark.parametrize('form', BANDED)
def test_bands_are_not_dropped(form, save):
    pixels, how, values = FILES[form]
    path, img = save(pixels, **how), expected_of(values)
    backbone, several = tiny(), tiny(in_channels=len(img))
    expected = several((img[None] - 0.4) / 0.2)
    for options in ({}, {'tile': 224, 'overlap': 0}):
        with pytest.raises(ImageError, match=rf'x\.tif.*in_channels={len(img)}'):
            extract_pyramid(backbone, path, **options)
        found = extract_pyramid(several, path, normalization=Normalization(0.4, 0.2), **options)
        for level, exact in zip(found.values(), expected, strict=True):
            torch.testing.assert_close(level, exact[0], rtol=1e-4, atol=1e-5)


def test_opacity_is_dropped():
    pixels, how, values = FILES['RGBA']
    for extra in ('unassalpha', 'assocalpha'):
        found = read_image(encode(pixels, **how, extrasamples=[extra]))
        assert_within(found, expected_of(values)[:3], 1e-6)
    grey = encode(
        BANDS[:, :, :2],
        **TOGETHER,
        extrasamples=['unassalpha'],
    )
    assert_within(
        read_image(grey, 1)[0],
        expected_of(GREY / 255)[0],
        1e-6,
    )


VOLUME = {'volumetric': True, 'tile': (1, 16, 16)}
PACKED = 'values of 12 bits; convert it to an image of 8 or 16 bits, or pass an array'


def refuses(path, match):
    with pytest.raises(ImageError, match=rf'x\.tif.*{match}'):
        read_image(path)
    with pytest.raises(ImageError, match=rf'x\.tif.*{match}'), open_large_image(path) as image:
        image.read(0, 0, *image.size)


@pytest.mark.parametrize(
    ('pixels', 'options', 'message'),
    [
        (GREY.astype('int64'), GREYSCALE, 'int64'),
        (GREY.astype('uint64'), GREYSCALE, 'uint64'),
        (GREY.astype('complex64'), GREYSCALE, 'complex64'),
        (GREY * np.uint32(70000), {**GREYSCALE, **TILES}, 'exceed 16 bits'),
        (np.zeros((7, 32, 48), 'uint8'), VOLUME, 'volume'),
        (np.zeros((7, 32, 48), 'complex64'), VOLUME, 'volume'),
        # What neither PIL nor this package reads.
        (of_bits(GREY, 12), {**GREYSCALE, 'bitspersample': 12}, PACKED),
        (of_bits(RGB, 12), {**COLOUR, 'bitspersample': 12}, PACKED),
        (of_bits(GREY, 10), {**GREYSCALE, 'bitspersample': 10}, 'values of 10 bits; convert it to an image of 8 or 16'),
    ],
)
def test_other_values_and_volumes_are_refused(save, pixels, options, message):
    refuses(save(pixels, **options), message)


def test_signed_integers_need_a_scale_and_a_stack_in_one_page_is_refused(save):
    """Their regions can be read, as they are stored."""
    with pytest.raises(ImageError, match=r'x\.tif.*got int16 of at most 255; give scale='):
        read_image(save(GREY.astype('int16'), **GREYSCALE))
    # tifffile and ImageJ describe the shape of such a stack in the metadata.
    path = save(STACK, **GREYSCALE, metadata={'axes': 'TYX'}, truncate=True)
    for page in (None, 0):
        with pytest.raises(ImageError, match=r'axes TYX .*pass its slices as arrays'):
            read_image(path, page=page)


STACK = np.stack(
    [
        GREY,
        GREY[::-1],
        GREY[:, ::-1],
    ]
)
STACKS = {
    'pages': {},
    'OME': {'ome': True, 'metadata': {'axes': 'CYX'}},
    'ImageJ': {'imagej': True, 'metadata': {'axes': 'TYX'}},
}


@pytest.mark.parametrize('form', STACKS)
def test_a_stack_needs_a_page(form, save):
    path = save(STACK, **GREYSCALE, **STACKS[form])
    backbone = SwinBackbone(**TINY)
    for options in ({}, {'tile': 224}):
        with pytest.raises(ImageError, match=r'x\.tif.* 3 pages .*give page=,'):
            extract_pyramid(backbone, path, **options)
    with pytest.raises(ImageError, match='no page 3; it has 3'):
        read_image(path, 1, page=3)
    for page, expected in enumerate(STACK):
        assert_within(
            read_image(path, 1, page=page),
            expected_of(expected / 255),
            1e-6,
        )
        with open_large_image(path, page=page) as image:
            assert np.array_equal(image.read(0, 0, 70, 90), expected)


@pytest.mark.parametrize('dtype', ['int32', 'uint32'])
@pytest.mark.parametrize('has_tifffile', [True, False])
def test_values_of_8_bits_in_32_need_a_scale(save, monkeypatch, dtype, has_tifffile):
    path, black = save(GREY.astype(dtype), **GREYSCALE), encode(np.zeros((40, 50), dtype), **GREYSCALE)
    if not has_tifffile:
        monkeypatch.setitem(sys.modules, 'tifffile', None)
    most = GREY.max()
    with pytest.raises(ImageError, match=rf'x\.tif.*got u?int32 of at most {most}; give scale='):
        read_image(path, 1)
    (pyramid,) = extract_pyramid(BACKBONE, [path], normalization=Normalization(scale=255))
    assert_same(pyramid.values(), extract_pyramid(BACKBONE, GREY).values())
    assert not read_image(black, 1).any()  # at any scale


def test_a_dark_png_of_16_bits_needs_no_scale(tmp_path):
    """Some versions of Pillow open it with 32 bits."""
    Image.fromarray(GREY.astype(np.uint16)).save(tmp_path / 'x.png')
    assert_within(read_image(tmp_path / 'x.png', 1), expected_of(GREY / 65535), 1e-7)


@pytest.mark.parametrize('options', [{}, {'tile': (32, 16)}])
def test_a_first_page_that_is_a_smaller_version_is_not_the_image(tmp_path, options):
    path = tmp_path / 'x.tif'
    with tifffile.TiffWriter(path) as file:
        for step, kind in ((4, 1), (1, 0), (2, 1)):
            pixels = np.ascontiguousarray(RGB[::step, ::step])
            file.write(pixels, photometric='rgb', subfiletype=kind, **options)
    assert_within(read_image(path), expected_of(RGB / 255), 1e-6)
    with open_large_image(path) as image:
        assert np.array_equal(image.read(0, 0, 70, 90), RGB)
    assert read_image(path, page=0).shape == (3, 18, 23)


def test_a_smaller_version_before_an_image_that_pil_decodes(tmp_path):
    path = tmp_path / 'x.tif'
    colours = {'photometric': 'palette', 'colormap': (PALETTE * 257).astype(np.uint16)}
    with tifffile.TiffWriter(path) as file:
        file.write(np.ascontiguousarray(GREY[::2, ::2]), subfiletype=1, **colours)
        file.write(GREY, **colours)
    with pytest.raises(ImageError, match=r'x\.tif.*the first page is a smaller version of page 1; give page=1'):
        read_image(path)
    assert_within(read_image(path, page=1), expected_of(PALETTE.T[GREY] / 255), 1e-6)


@pytest.mark.parametrize('absent', ['tifffile', 'imagecodecs', 'neither'])
def test_only_absent_packages_are_advised(monkeypatch, absent):
    monkeypatch.setattr('swin_dense.images.tiff.find_spec', lambda name: None if name == absent else name)
    with pytest.raises(ImageError, match=r'of 8 or 16 bits(, or install \w+)?$') as raised:
        tiff.check_kept_by_pil(Image.open(io.BytesIO(encode(of_bits(GREY, 12), **GREYSCALE, bitspersample=12))), None)
    assert str(raised.value).endswith(f'or install {absent}' if absent != 'neither' else 'of 8 or 16 bits')


def test_smaller_versions_of_an_image_need_no_page(tmp_path):
    path = tmp_path / 'x.tif'
    with tifffile.TiffWriter(path) as file:
        file.write(RGB, photometric='rgb', tile=(32, 16))
        for step in (2, 4):
            file.write(np.ascontiguousarray(RGB[::step, ::step]), photometric='rgb', subfiletype=1)
    assert_within(read_image(path), expected_of(RGB / 255), 1e-6)
    assert read_image(path, page=1).shape == (3, 35, 45)
    with open_large_image(path) as image:
        assert np.array_equal(image.read(0, 0, 70, 90), RGB)


# Pillow 12.3, the last one for Python 3.10, cannot read its own file.
YCBCR = pytest.param('YCbCr', marks=pytest.mark.skipif(PIL.__version__ < '13', reason='needs Pillow 13'))


@pytest.mark.parametrize('mode', ['1', 'L', 'P', 'RGB', 'RGBA', 'LA', 'CMYK', YCBCR])
@pytest.mark.parametrize('has_tifffile', [True, False])
def test_files_of_pil(mode, has_tifffile, monkeypatch):
    content = with_pil('tiff', mode)
    if not has_tifffile:
        monkeypatch.setitem(sys.modules, 'tifffile', None)
    expected = np.array(Image.open(io.BytesIO(content)).convert('RGB')) / 255
    assert_within(read_image(content), expected_of(expected), 1e-6)


@pytest.mark.parametrize('compression', ['tiff_lzw', 'jpeg', 'packbits', 'tiff_adobe_deflate'])
def test_without_imagecodecs(compression, monkeypatch):
    content = with_pil('tiff', compression=compression)
    expected = read_image(content)
    monkeypatch.setattr('swin_dense.images.tiff.find_spec', lambda name: None)
    monkeypatch.setattr(tifffile.TIFF, 'DECOMPRESSORS', {1: None})
    assert_within(read_image(content), expected, 0.02)


@pytest.mark.parametrize('form', ['16 bits of colour', '3 separate uint8 bands, deflate', *BANDED[:3]])
def test_what_pil_would_change_is_refused_without_tifffile(form, monkeypatch):
    pixels, how, values = FILES[form]
    content = encode(pixels, **how)
    monkeypatch.setitem(sys.modules, 'tifffile', None)
    with pytest.raises(ImageError, match=r'install tifffile|supported format'):
        read_image(content, expected_of(values).shape[0])


def with_a_broken_tag():
    """Return a file whose software tag points outside of it, which tifffile logs."""
    content = bytearray(encode(RGB, photometric='rgb', software='x' * 30))
    at = content.index((305).to_bytes(2, 'little'))
    content[at + 8 : at + 12] = b'\xff' * 4
    return bytes(content)


def test_a_program_that_handles_log_messages_still_gets_them(caplog):
    with caplog.at_level(logging.WARNING):
        read_image(with_a_broken_tag())
    assert any(record.name.startswith('tifffile') for record in caplog.records)


def test_log_messages_are_not_printed_while_this_package_reads_but_afterwards(tmp_path):
    """A program without logging, which Python prints warnings for."""
    (tmp_path / 'broken tag.tif').write_bytes(with_a_broken_tag())
    code = """
import sys
import tifffile
from swin_dense.images.reading import read_image
path = sys.argv[1]
read_image(path)
print('ours is read', file=sys.stderr, flush=True)
tifffile.TiffFile(path).pages[0].tags
"""
    before, _, after = python('-c', code, tmp_path / 'broken tag.tif').stderr.partition('ours is read\n')
    assert not before
    assert 'invalid value offset' in after


@pytest.mark.parametrize('compression', [None, 'deflate', 'lzw', 'jpeg'])
@pytest.mark.parametrize('options', [{'rowsperstrip': 8}, TILES])
@pytest.mark.parametrize('part', [0.3, 0.6, 0.97])
def test_a_truncated_file_is_refused(compression, options, part, save):
    path = save(RGB, photometric='rgb', compression=compression, **options)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    refuses(path, '')
