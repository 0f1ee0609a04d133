"""A region read from any supported source equals that part of the whole image."""

import errno
import re
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

tifffile, zarr = IfInstalled('tifffile'), IfInstalled('zarr')

RGB = photograph(150, 131)


def tensor_of(region):
    return scale(to_tensor(Pixels(region), 3))


def save_tiff(path, **options):
    tifffile.imwrite(path / 'x.tif', RGB, photometric='rgb', **options)
    return path / 'x.tif'


def save_png(path):
    Image.fromarray(RGB).save(path / 'x.png')
    return path / 'x.png'


def save_memmap(path):
    np.save(path / 'x.npy', RGB)
    return np.load(path / 'x.npy', mmap_mode='r')


def save_zarr(path):
    return zarr.array(RGB)


@pytest.mark.parametrize('save', [save_memmap, save_png, save_zarr])
def test_regions(save, tmp_path):
    """Those of other sources are in test_reading.py and test_tiff.py."""
    with open_large_image(save(tmp_path)) as image:
        assert image.size == RGB.shape[:2]
        assert np.array_equal(image.read(0, 0, 150, 131), RGB)
        assert np.array_equal(image.read(17, 20, 100, 99), RGB[17:100, 20:99])


def test_a_tiff_of_unknown_colours_is_read_as_a_whole(tmp_path):
    path = save_tiff(tmp_path)
    with tifffile.TiffFile(path, mode='r+') as file:
        file.pages[0].tags['PhotometricInterpretation'].overwrite(51111)
    whole = read_image(path)
    with open_large_image(path) as image:
        assert torch.equal(tensor_of(image.read(17, 20, 100, 99)), whole[:, 17:100, 20:99])


def refuses(source, match, error=ImageError):
    with pytest.raises(error, match=match), open_large_image(source):
        pass
    with pytest.raises(error, match=match):
        read_image(source)


def test_sources_that_cannot_be_read_are_refused_whole_and_by_regions(tmp_path, monkeypatch):
    refuses(tmp_path / 'missing.tif', 'missing', FileNotFoundError)
    refuses('s3://bucket/a.jpg', r'a.jpg. does not exist; .* open the address first', FileNotFoundError)
    contents = {'text.png': b'text', 'empty.png': b'', 'cut.tif': b'II*\0cut'}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        refuses(tmp_path / name, name)
    refuses(tmp_path, 'is a folder: ')
    refuses(np.zeros(5), r'\(H, W\)')
    refuses(3, 'a path, bytes', TypeError)
    path = save_png(tmp_path)
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 1000)
    with pytest.raises(ImageError, match='convert it to TIFF or zarr'), open_large_image(path):
        pass


def test_errors_of_the_file_system_become_image_errors(tmp_path, monkeypatch):
    path = save_png(tmp_path)

    def fail(*args, **options):
        raise OSError(errno.EIO, 'refused')

    monkeypatch.setattr(Path, 'open', fail)
    refuses(path, r'x\.png.* cannot be read: refused')


@pytest.mark.parametrize('compression', ['jpeg', 'lzw', 'zstd', 'jpeg2000'])
def test_compressed_slides_are_read_by_regions(tmp_path, compression, monkeypatch):
    path = save_tiff(tmp_path, tile=(64, 64), compression=compression)
    whole = read_image(path)
    monkeypatch.setattr(regions, 'pixels_of', None)
    with open_large_image(path) as image:
        assert image.size == RGB.shape[:2]
        part = tensor_of(image.read(20, 70, 150, 131))
    # JPEG decoders may differ by rounding.
    assert_within(part, whole[:, 20:150, 70:131], 0.02)
    assert_within(part, tensor_of(RGB[20:150, 70:131]), 0.3)


def test_a_warning_tells_that_regions_need_imagecodecs(tmp_path, monkeypatch, caplog):
    path = save_tiff(tmp_path, tile=(64, 64), compression='jpeg')
    monkeypatch.setattr(tifffile.TIFF, 'DECOMPRESSORS', {})
    for there, needed in ((True, ''), (None, r' without the package imagecodecs \(pip install imagecodecs\)')):
        monkeypatch.setattr('swin_dense.images.tiff.find_spec', lambda name, there=there: there)
        caplog.clear()
        with open_large_image(path) as image:
            assert image.size == RGB.shape[:2]
        assert re.search(rf'compressed as JPEG, which cannot be read by regions{needed}; it is decoded', caplog.text)
