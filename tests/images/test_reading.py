"""read_image: every supported source gives the original pixels, and anything else raises a specific error."""

import io
import struct
import sys
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from swin_dense import SwinBackbone, extract_pyramid
from swin_dense.images.normalization import Normalization
from swin_dense.images.pixels import ImageError
from swin_dense.images.presets import IMAGENET_MEAN, IMAGENET_STD
from swin_dense.images.reading import decoded_bytes, normalize, read_image, scale, to_tensor
from swin_dense.images.regions import open_large_image
from tests.conftest import TINY, IfInstalled, assert_near, assert_within, photograph
from tests.images.mutations import counted, counts, encode, encode_tiff

cv2, zarr = IfInstalled('cv2'), IfInstalled('zarr')

RGB = photograph(31, 47)
GREY = photograph(30, 44)[:, :, 0]
DEEP, DEEP_GREY = RGB.astype(np.uint16) * 257, GREY.astype(np.uint16) * 257
OPAQUE = np.dstack([RGB, np.full_like(RGB[:, :, 0], 255)])


def tensor_of(pixels):
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def unit(pixels):
    """Return 8-bit pixels as they must be read: (C, H, W) in [0, 1]."""
    return tensor_of(pixels / np.float32(255))


EXPECTED = unit(RGB)


def deep_png(pixels):
    return cv2.imencode('.png', pixels[:, :, ::-1])[1].tobytes()


FORMS = {
    'png bytes': lambda: encode(RGB, 'png'),
    'bytearray': lambda: bytearray(encode(RGB, 'png')),
    'bmp': lambda: encode(RGB, 'bmp'),
    'tiff': lambda: encode(RGB, 'tiff'),
    'PIL': lambda: Image.fromarray(RGB),
    'RGBA png': lambda: encode(OPAQUE, 'png'),
    'RGBA PIL': lambda: Image.fromarray(OPAQUE),
    'uint8 array': lambda: RGB,
    'array with negative strides': lambda: RGB[::-1][::-1],
    'float32 array': lambda: RGB.astype(np.float32) / 255,
    'float64 array': lambda: RGB / 255,
    'uint16 array': lambda: DEEP,
    'big-endian uint16 array': lambda: DEEP.astype('>u2'),
    'big-endian float32 array': lambda: (RGB / 255).astype('>f4'),
    'uint8 tensor': lambda: tensor_of(RGB),
    **({'uint16 tensor': lambda: tensor_of(DEEP)} if hasattr(torch, 'uint16') else {}),  # since torch 2.3
    'float tensor': lambda: EXPECTED,
    '16-bit colour png': lambda: deep_png(DEEP),
}


@pytest.mark.parametrize('form', FORMS)
def test_every_source_gives_the_same_pixels(form):
    source = FORMS[form]()
    image = read_image(source)
    assert image.dtype == torch.float32
    assert image.is_contiguous()
    assert_near(image, EXPECTED, 1e-7)
    with open_large_image(source) as large:
        assert large.size == RGB.shape[:2]
        part = scale(to_tensor(large.pixels((3, 5, 20, 40)), 3))
    assert_near(part, EXPECTED[:, 3:20, 5:40], 1e-7)


GREYS = {
    'array (H, W)': lambda: GREY,
    'array (H, W, 1)': lambda: GREY[:, :, None],
    'png': lambda: encode(GREY, 'png'),
    'LA png': lambda: encode(Image.fromarray(GREY).convert('LA'), 'png'),
    '16-bit png': lambda: encode(DEEP_GREY, 'png'),
    '16-bit tiff': lambda: encode(DEEP_GREY, 'tiff'),
    '16-bit big-endian tiff': lambda: encode_tiff(DEEP_GREY, byteorder='>'),
    '32-bit PIL': lambda: Image.fromarray(GREY.astype(np.int32) * 257),
    'float PIL': lambda: Image.fromarray(GREY.astype(np.float32) / 255),
    'tensor (1, H, W)': lambda: torch.from_numpy(GREY)[None],
}


@pytest.mark.parametrize('form', GREYS)
def test_grey_images_are_repeated_for_three_channels_and_kept_for_one(form):
    expected = unit(GREY[:, :, None])
    assert_near(
        read_image(GREYS[form]()),
        expected.expand(3, -1, -1),
        1e-7,
    )
    assert_near(read_image(GREYS[form](), channels=1), expected, 1e-7)


def test_full_depth_of_16_bits_is_kept():
    deep = counts(9, 11, 3, most=65536)
    expected = tensor_of((deep / 65535).astype(np.float32))
    for content in (encode_tiff(deep, photometric='rgb'), deep_png(deep)):
        assert_within(read_image(content), expected, 1e-6)
        with open_large_image(content) as image:
            assert np.array_equal(image.read(0, 0, 9, 11), deep)
    grey = encode(deep[:, :, 0], 'png')
    assert_within(read_image(grey)[0], expected[0], 1e-6)


@pytest.mark.parametrize('mode', ['P', 'CMYK', '1', 'YCbCr'])
def test_other_modes_equal_pils_conversion_to_rgb(mode):
    image = Image.fromarray(RGB).convert(mode)
    assert torch.equal(read_image(image), unit(np.array(image.convert('RGB'))))
    if mode == 'P':
        content = encode(image, 'png', transparency=3)
        assert torch.equal(read_image(content), unit(np.array(image.convert('RGB'))))


@pytest.mark.parametrize('orientation', range(1, 9))
@pytest.mark.parametrize('file_format', ['jpeg', 'png', '16-bit png'])
def test_exif_orientation_is_applied(file_format, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    if file_format == '16-bit png':
        content = add_png_exif(deep_png(DEEP), exif.tobytes())
    else:
        content = encode(RGB, file_format, exif=exif)
    stored = Image.open(io.BytesIO(content))
    upright = np.array(ImageOps.exif_transpose(stored).convert('RGB'))
    assert torch.equal(read_image(content), unit(upright))
    assert torch.equal(read_image(Image.open(io.BytesIO(content))), read_image(content))
    with open_large_image(content) as large:
        assert large.size == upright.shape[:2]


def add_png_exif(content, exif):
    """Put an eXIf chunk after the header of a PNG."""
    body = b'eXIf' + exif.removeprefix(b'Exif\0\0')
    length, checksum = struct.pack('>I', len(body) - 4), struct.pack('>I', zlib.crc32(body))
    return content[:33] + length + body + checksum + content[33:]


def test_the_bytes_that_decoding_needs():
    for mode, per_pixel in (('L', 2), ('RGB', 7), ('CMYK', 12)):
        content = encode(Image.fromarray(RGB).convert(mode), 'tiff')
        assert decoded_bytes(content) == len(content) + 31 * 47 * per_pixel
    assert decoded_bytes(RGB) == 0
    assert decoded_bytes(b'abc') == 12


def test_bgr_arrays(tmp_path):
    path = tmp_path / 'image.png'
    path.write_bytes(encode(RGB, 'png'))
    bgr = cv2.imread(str(path))
    assert torch.equal(read_image(bgr, bgr=True), EXPECTED)
    assert torch.equal(read_image(tensor_of(bgr), bgr=True), EXPECTED)
    of_four = read_image(cv2.cvtColor(bgr, cv2.COLOR_BGR2BGRA), channels=4, bgr=True)
    assert torch.equal(of_four[:3], EXPECTED)
    assert torch.equal(read_image(path, bgr=True), EXPECTED)  # files define their channel order
    assert torch.equal(read_image(GREY, bgr=True), read_image(GREY))
    with open_large_image(bgr, bgr=True) as image:
        assert np.array_equal(image.read(3, 4, 20, 30), RGB[3:20, 4:30])


FOUR_CHANNELS = counts(32, 40, 4, most=255, dtype=np.uint8)


@pytest.mark.parametrize(
    ('convert', 'tile'),
    [
        (np.copy, None),
        (lambda pixels: pixels / 255, None),
        (tensor_of, None),
        (lambda pixels: zarr.array(pixels), 224),
    ],
    ids=['array', 'float array', 'tensor', 'zarr array'],
)
def test_the_fourth_channel_of_an_array_is_not_dropped(convert, tile):
    """It may be near infrared: only files and PIL images say that it is opacity."""
    backbone, source = SwinBackbone(**TINY), convert(FOUR_CHANNELS)
    with pytest.raises(ImageError, match='4 channels but the backbone takes 3'):
        extract_pyramid(backbone, source, tile=tile)
    expected = extract_pyramid(backbone, FOUR_CHANNELS[:, :, :3])
    found = extract_pyramid(backbone, source, tile=tile, normalization=Normalization(bands=(0, 1, 2)))
    for stride, level in expected.items():
        assert_near(found[stride], level, 1e-4)


def test_open_files(tmp_path):
    path = tmp_path / 'image.png'
    path.write_bytes(encode(RGB, 'png'))
    with path.open('rb') as file:
        assert torch.equal(read_image(file), EXPECTED)
    assert torch.equal(read_image(io.BytesIO(path.read_bytes())), EXPECTED)
    with path.open(encoding='latin1') as file, pytest.raises(TypeError, match=r"image\.png'.* opened with 'rb'"):
        read_image(file)


SHADES = np.array([10, 120, 250], np.uint8)
FRAMES = np.broadcast_to(SHADES[:, None, None, None], (3, 9, 12, 3))


def paged(file_format):
    others = [Image.fromarray(frame) for frame in FRAMES[1:]]
    return encode(FRAMES[0], file_format, save_all=True, append_images=others)


PAGED = {
    'gif': lambda: paged('gif'),
    'tiff': lambda: paged('tiff'),
    'deep tiff': lambda: encode_tiff(FRAMES.astype(np.uint16) * 257, photometric='rgb'),
}


@pytest.mark.parametrize('form', PAGED)
def test_pages(form):
    content = PAGED[form]()
    for page, frame in enumerate(FRAMES):
        assert_within(read_image(content, page=page), unit(frame), 0.01)
    if form == 'gif':
        assert torch.equal(read_image(content), read_image(content, page=0))
    else:
        with pytest.raises(ImageError, match=f'{counted(3)} pages .*give page='):
            read_image(content)
    with pytest.raises(ImageError, match='no page 3; it has 3, counted from 0'):
        read_image(content, page=3)


@pytest.mark.parametrize(
    ('source', 'message'),
    [
        (b'', 'empty'),
        (b'this is text', 'not an image of a supported format'),
        (encode(RGB, 'jpeg')[:400], 'damaged or truncated'),
        (encode(RGB, 'png')[:-400], 'damaged or truncated'),
        (np.zeros((4, 5, 5), np.uint8), 'in_channels=5'),
        (np.zeros((3, 40, 50), np.uint8), r'arrays are \(H, W, C\)'),
        (np.zeros((0, 5, 3), np.uint8), 'at least one pixel'),
        (np.zeros(5, np.uint8), r'\(H, W\)'),
        (np.full((4, 5, 3), np.nan), '60 of its values are NaN'),
        (np.full((4, 5, 3), np.inf), 'infinite'),
        (RGB.astype(np.float32), 'between 0 and 1'),
        (RGB.astype(np.int64), 'uint8, uint16 or floating'),
        (np.zeros((4, 5, 3), complex), 'uint8, uint16 or floating'),
        (torch.zeros(4, 5), r'\(C, H, W\)'),
        (Image.fromarray(np.full((4, 5), 70000, np.int32)), 'exceed 16 bits'),
    ],
)
def test_invalid_images_are_refused(source, message):
    with pytest.raises(ImageError, match=message):
        read_image(source)


@pytest.mark.parametrize(
    ('step', 'error', 'message'),
    [
        ('PIL.Image.open', ZeroDivisionError('as PIL does'), 'truncated: .*as PIL does'),
        ('PIL.Image.open', KeyError('as PIL does'), 'truncated: .*as PIL does'),
        ('PIL.Image.open', struct.error('as PIL does'), 'truncated: .*as PIL does'),
        ('PIL.Image.open', EOFError('as PIL does'), 'truncated: .*as PIL does'),
        ('swin_dense.images.reading.decode', MemoryError(), 'too little memory .*use tile='),
        ('swin_dense.images.reading.to_tensor', RuntimeError("can't allocate memory"), 'too little memory .*use tile='),
    ],
)
def test_any_exception_of_a_decoder_becomes_an_image_error(tmp_path, monkeypatch, step, error, message):
    def fail(*args, **options):
        raise error

    (tmp_path / 'x.png').write_bytes(encode(RGB, 'png'))
    monkeypatch.setattr(step, fail)
    with pytest.raises(ImageError, match=rf'x\.png.*{message}'):
        read_image(tmp_path / 'x.png')


def test_the_limit_for_decompression_bombs_applies_to_every_decoder(monkeypatch):
    pixels = np.zeros((40, 50, 5), np.uint8)
    content = encode_tiff(pixels, photometric='minisblack', planarconfig='contig')
    assert read_image(content, channels=5).shape == (5, 40, 50)
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 500)
    with pytest.raises(ImageError, match=r'5 channels.*MAX_IMAGE_PIXELS'):
        read_image(content, channels=5)
    with pytest.raises(ImageError, match='MAX_IMAGE_PIXELS'):
        read_image(encode(RGB, 'png'))


@pytest.mark.parametrize('package', ['imagecodecs', 'tifffile'])
def test_a_missing_package_is_named_instead_of_losing_bit_depth(package, monkeypatch):
    content = deep_png(DEEP) if package == 'imagecodecs' else encode_tiff(DEEP, photometric='rgb')
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImageError, match=f'install {package}'):
        read_image(content)
    assert torch.equal(read_image(encode(RGB, 'png')), EXPECTED)


def test_normalize():
    image = read_image(RGB)
    expected = (RGB / 255 - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_STD)
    assert_within(
        normalize(image, IMAGENET_MEAN, IMAGENET_STD),
        tensor_of(expected).float(),
        1e-6,
    )
    assert normalize(image, None, None) is image
    of_each = normalize(image, [0.5] * 3, np.full(3, 0.25))
    assert torch.equal(normalize(image, 0.5, 0.25), of_each)
    assert torch.equal(normalize(image, 1, 1), image - 1)  # the largest values allowed


@pytest.mark.parametrize(
    ('mean', 'std', 'error', 'message'),
    [
        ('imagenet', 1.0, TypeError, 'mean must be one number per channel'),
        (['a', 'b', 'c'], 1.0, TypeError, 'mean must be one number per channel'),
        (object(), 1.0, TypeError, 'mean must be one number per channel'),
        ((0.5, 0.5), (1, 1), ValueError, 'one value per channel'),
        (0.5, None, ValueError, 'give both'),
        ((123.7, 116.3, 103.5), (58.4, 57.1, 57.4), ValueError, 'divide values'),
        (0.5, (1, 0, 1), ValueError, 'std at least 1e-06'),
        (0.5, (1, 3.5e-48, 1), ValueError, 'std at least 1e-06'),  # 0 in float32
        (float('nan'), 1, ValueError, 'scale 0 to 1'),
    ],
)
def test_normalize_refuses_invalid_statistics(mean, std, error, message):
    with pytest.raises(error, match=message):
        normalize(torch.zeros(3, 2, 2), mean, std)
