"""A region read from any supported source equals that part of the whole image."""

import errno
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from swin_dense.images import regions
from swin_dense.images.pixels import ImageError, Pixels
from swin_dense.images.reading import read_image, scale, to_tensor
from swin_dense.images.regions import open_large_image
from tests.conftest import IfInstalled, assert_within, photograph

cv2, tifffile, zarr = IfInstalled('cv2'), IfInstalled('tifffile'), IfInstalled('zarr')

RGB = photograph(150, 131)
DEEP = RGB.astype(np.uint16) * 200 + np.arange(131, dtype=np.uint16)[:, None]


def tensor_of(region):
    return scale(to_tensor(Pixels(region), 3))


def save_tiff(path, pixels=RGB, photometric='rgb', **options):
    tifffile.imwrite(path, pixels, photometric=photometric, **options)
    return path


def save_memmap(path):
    np.save(path, RGB)
    return np.load(path.with_name(path.name + '.npy'), mmap_mode='r')


def save_with_pil(path, mode='RGB', **options):
    Image.fromarray(RGB).convert(mode).save(path, **options)
    return path


def save_rotated_png(path):
    exif = Image.Exif()
    exif[274] = 6
    return save_with_pil(path, exif=exif)


SOURCES = {
    'tiled tiff': lambda path: save_tiff(path / 'x.tif', tile=(32, 48)),
    'big tiff': lambda path: save_tiff(path / 'x.tif', bigtiff=True, tile=(32, 48)),
    'rotated png': lambda path: save_rotated_png(path / 'x.png'),
    'zarr array': lambda path: zarr.array(RGB),
    'memory-mapped array': lambda path: save_memmap(path / 'x'),
    'array': lambda path: RGB,
    'tensor': lambda path: torch.from_numpy(RGB.copy()).permute(2, 0, 1),
    'png': lambda path: save_with_pil(path / 'x.png'),
    'bytes': lambda path: save_with_pil(path / 'x.png').read_bytes(),
    'PIL': lambda path: Image.fromarray(RGB),
}


@pytest.mark.parametrize('form', SOURCES)
def test_regions(form, tmp_path):
    source = SOURCES[form](tmp_path)
    expected = torch.from_numpy(RGB.transpose(2, 0, 1) / np.float32(255))
    if form.startswith('rotated'):
        expected = expected.rot90(-1, (1, 2))
    with open_large_image(source) as image:
        assert image.size == tuple(expected.shape[1:])
        assert torch.equal(tensor_of(image.read(0, 0, *image.size)), expected)
        assert torch.equal(tensor_of(image.read(17, 20, 100, 99)), expected[:, 17:100, 20:99])
        assert torch.equal(tensor_of(image.read(120, 3, 121, 4)), expected[:, 120:121, 3:4])


def save_deep_png(path):
    cv2.imwrite(str(path), DEEP)
    return path


def save_with_unknown_colours(path):
    with tifffile.TiffFile(save_tiff(path), mode='r+') as file:
        file.pages[0].tags['PhotometricInterpretation'].overwrite(51111)
    return path


UNUSUAL = {
    '16-bit colour png': lambda path: save_deep_png(path / 'x.png'),
    'tiff of unknown colours': lambda path: save_with_unknown_colours(path / 'x.tif'),
}


@pytest.mark.parametrize('form', UNUSUAL)
def test_regions_of_unusual_files_equal_the_whole_image(form, tmp_path):
    path = UNUSUAL[form](tmp_path)
    whole = read_image(path)
    with open_large_image(path) as image:
        assert image.size == tuple(whole.shape[1:])
        assert torch.equal(tensor_of(image.read(17, 20, 100, 99)), whole[:, 17:100, 20:99])


def test_bgr_arrays():
    with open_large_image(RGB[:, :, ::-1], bgr=True) as image:
        assert np.array_equal(image.read(3, 4, 50, 60), RGB[3:50, 4:60])


def test_invalid_sources_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match='missing'), open_large_image(tmp_path / 'missing.tif'):
        pass
    for name, content in (('text.png', b'text'), ('empty.png', b''), ('cut.tif', b'II*\0cut')):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ImageError, match=name.split('.')[0]), open_large_image(tmp_path / name):
            pass
    with pytest.raises(ImageError, match='is a folder'), open_large_image(tmp_path):
        pass
    with pytest.raises(ImageError, match=r'\(H, W\)'), open_large_image(np.zeros(5)):
        pass
    with pytest.raises(TypeError, match='a path, bytes'), open_large_image(3):
        pass


def test_errors_of_the_file_system_become_image_errors(tmp_path, monkeypatch):
    path = save_with_pil(tmp_path / 'x.png')

    def fail(*args, **options):
        raise OSError(errno.EIO, 'refused')

    monkeypatch.setattr(Path, 'open', fail)
    with pytest.raises(ImageError, match=r'x\.png.* cannot be read: refused'), open_large_image(path):
        pass


@pytest.mark.parametrize('compression', ['jpeg', 'lzw', 'zstd', 'jpeg2000'])
def test_compressed_slides_are_read_by_regions(tmp_path, compression, monkeypatch):
    path = save_slide(tmp_path / 'x.tif', compression)
    whole = read_image(path)
    monkeypatch.setattr(regions, 'pixels_of', None)
    with open_large_image(path) as image:
        assert image.size == RGB.shape[:2]
        part = tensor_of(image.read(20, 70, 150, 131))
    # JPEG decoders may differ by rounding.
    assert_within(part, whole[:, 20:150, 70:131], 0.02)
    assert_within(part, tensor_of(RGB[20:150, 70:131]), 0.3)


def save_slide(path, compression):
    return save_tiff(path, tile=(64, 64), compression=compression)


def test_a_warning_tells_that_regions_need_imagecodecs(tmp_path, monkeypatch, caplog):
    path = save_slide(tmp_path / 'x.tif', 'jpeg')
    monkeypatch.setattr(tifffile.TIFF, 'DECOMPRESSORS', {})
    with open_large_image(path) as image:
        assert image.size == RGB.shape[:2]
    assert 'compressed as JPEG, which can be read by regions only with the package imagecodecs' in caplog.text


def test_images_beyond_pils_limit_are_refused(tmp_path, monkeypatch):
    path = save_with_pil(tmp_path / 'x.png')
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 1000)
    with pytest.raises(ImageError, match='convert it to TIFF or zarr'), open_large_image(path):
        pass
