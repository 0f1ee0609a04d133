"""Run lengths of masks, compared with pycocotools, and masks beside their boxes."""

import numpy as np
import pytest

from swin_dense.workbench.configs.segmentations import bounds_of, check_mask, decode_rle
from swin_dense.workbench.configs.stated import StatedObject

mask_tools = pytest.importorskip('pycocotools.mask')


def random_mask(generator):
    """Return a mask of random size: noise, or a rectangle, which has long runs."""
    height, width = generator.integers(1, 70, 2)
    if generator.random() < 0.5:
        return generator.random((height, width)) < generator.random()
    mask = np.zeros((height, width), bool)
    mask[height // 3 : height // 2, width // 4 :] = True
    return mask


def text_of(mask):
    return mask_tools.encode(np.asfortranarray(mask.astype(np.uint8)))['counts'].decode()


def test_run_lengths_of_random_masks():
    generator = np.random.default_rng(0)
    for _ in range(500):
        mask = random_mask(generator)
        height, width = mask.shape
        lengths = decode_rle(text_of(mask))
        assert lengths.sum() == height * width
        assert (np.repeat(np.arange(len(lengths)) % 2, lengths) == mask.ravel(order='F')).all()
        rows, columns = mask.any(1).nonzero()[0], mask.any(0).nonzero()[0]
        expected = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1) if len(rows) else (0, 0, 0, 0)
        for counts in (text_of(mask), lengths.tolist()):
            assert bounds_of({'size': [height, width], 'counts': counts}) == expected


@pytest.mark.parametrize('text', ['', 'o', 'oooooooooooooooo1', '~', '/', 'é', '1' * 5, 'n'])
def test_text_that_is_no_rle_is_refused(text):
    assert decode_rle(text).sum() != 64


def stated(bbox, segmentation):
    """Return an object of a file in COCO's format."""
    x, y, width, height = bbox
    return StatedObject('0.png', 'apple', (x, y, x + width, y + height), {'segmentation': segmentation})


def rle(mask, is_text, order='F'):
    """Return a mask in run lengths, a list or text, of which pycocotools reads those in columns."""
    if order == 'C':
        mask = mask.ravel().reshape(mask.shape, order='F')
    counts = text_of(mask)
    return {'size': list(mask.shape), 'counts': counts if is_text else decode_rle(counts).tolist()}


@pytest.mark.parametrize('is_text', [False, True])
@pytest.mark.parametrize('shape', [(48, 64), (64, 48), (64, 64)])
def test_run_lengths_of_another_object_or_along_rows(shape, is_text):
    boxes = [[4, 20, 12, 9], [30, 6, 10, 12]]
    masks = [np.zeros(shape, bool) for _ in boxes]
    for mask, (left, top, width, height) in zip(masks, boxes, strict=True):
        mask[top : top + height, left : left + width] = True
    for index, box in enumerate(boxes):
        assert check_mask(stated(box, rle(masks[index], is_text))) == ('', 0, 1)
        assert 'lies elsewhere than bbox' in check_mask(stated(box, rle(masks[1 - index], is_text))).fault
        by_rows = rle(masks[index], is_text, 'C')
        assert "run along rows, but COCO's run down columns" in check_mask(stated(box, by_rows)).fault


def test_polygons_that_mmdet_leaves_out_have_no_place():
    square = [4, 4, 20, 4, 20, 20, 4, 20]
    for short in ([], [40, 4], [40, 4, 20, 20], [40, 4, 20, 4, 20]):
        assert check_mask(stated([4, 4, 16, 16], [short, square])) == ('', 0, 1)
        assert 'the mask covers nothing' in check_mask(stated([4, 4, 16, 16], [short])).fault
    assert check_mask(stated([4, 4, 10, 16], [square])) == ('', 6, 1)
    assert check_mask(stated([4, 4, 16, 32], [square])) == ('', 0, 0.5)
