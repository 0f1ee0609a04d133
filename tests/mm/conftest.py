"""The images of pretraining."""

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope='module')
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp('own photos')
    generator = np.random.default_rng(0)
    for index in range(10):
        small_image = Image.fromarray(generator.integers(0, 255, (5, 6, 3), dtype=np.uint8))
        small_image.resize((96 + index, 80)).save(folder / f'{index}.png')
    return folder
