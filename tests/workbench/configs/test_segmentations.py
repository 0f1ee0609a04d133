"""Run lengths of masks, compared with pycocotools."""

import numpy as np
import pytest

from swin_dense.workbench.configs.segmentations import is_in_place, is_readable

mask_tools = pytest.importorskip('pycocotools.mask')


def random_mask(generator):
    """Return a mask of random size: noise, or a rectangle, which has long runs."""
    height, width = generator.integers(1, 70, 2)
    if generator.random() < 0.5:
        return generator.random((height, width)) < generator.random()
    mask = np.zeros((height, width), bool)
    mask[height // 3 : height // 2, width // 4 :] = True
    return mask


def test_run_lengths_of_random_masks():
    generator = np.random.default_rng(0)
    for _ in range(500):
        mask = random_mask(generator)
        height, width = mask.shape
        text = mask_tools.encode(np.asfortranarray(mask.astype(np.uint8)))['counts'].decode()
        annotation = {'segmentation': {'counts': text}, 'bbox': [0, 0, width, height]}
        image = {'height': height, 'width': width}
        assert is_readable(annotation, image)
        assert is_in_place(annotation, image) == mask.any()
        for other in (height + 1, height - 1):
            assert not is_readable(annotation, {'height': other, 'width': width})


@pytest.mark.parametrize('text', ['', 'o', 'oooooooooooooooo1', '~', '/', 'é', '1' * 5, 'n'])
def test_text_that_is_no_rle_is_refused(text):
    annotation = {'segmentation': {'size': [8, 8], 'counts': text}}
    assert not is_readable(annotation, {'height': 8, 'width': 8})
