"""A damaged image file is read, or raises an ImageError that contains its name, whatever its decoder raises."""

import random
from collections import Counter

import pytest
import torch
from PIL import Image

from swin_dense.images.pixels import ImageError
from swin_dense.images.reading import read_image
from swin_dense.images.regions import open_large_image
from tests.images.mutations import ORIGINALS, RGB, mutate


@pytest.fixture(autouse=True)
def _small_images_only(monkeypatch):
    """Lower the pixel limit, so that a damaged header that declares a huge image is refused early."""
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 1 << 20)


def outcome(path, channels, by_parts):
    """Read a file, whole or by regions; return 'read', 'refused', or a text if the error lacks the file's name."""
    try:
        if by_parts:
            with open_large_image(path) as image:
                pixels = image.read(0, 0, *image.size)
                assert pixels.shape[:2] == image.size
        else:
            image = read_image(path, channels)
            assert image.dtype == torch.float32
            assert image.isfinite().all()
    except ImageError as error:
        return 'refused' if str(path) in str(error) else f'refused without its name: {error}'
    return 'read'


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('by_parts', [False, True])
@pytest.mark.parametrize('form', ORIGINALS)
def test_damaged_files(form, by_parts, tmp_path):
    content, channels = ORIGINALS[form](), 5 if '5' in form else 3
    path = tmp_path / 'image'
    path.write_bytes(content)
    assert outcome(path, channels, by_parts) == 'read'
    assert read_image(path, channels).shape == (channels, *RGB.shape[:2])
    chance = random.Random(f'{form} {by_parts}')
    outcomes = Counter()
    for _ in range(10):
        path.write_bytes(mutate(content, chance))
        outcomes[outcome(path, channels, by_parts)] += 1
    assert set(outcomes) <= {'read', 'refused'}
