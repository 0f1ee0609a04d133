"""Run lengths of masks, compared with pycocotools, and bounds of masks."""

import numpy as np
import pytest

from swin_dense.workbench.checking.segmentations import bounds_of, decode_rle

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
        for counts in (text_of(mask), text_of(mask).encode(), lengths.tolist()):
            assert bounds_of({'size': [height, width], 'counts': counts}) == expected


@pytest.mark.parametrize('text', ['', 'o', 'oooooooooooooooo1', '~', '/', 'é', '1' * 5, 'n'])
def test_text_that_is_no_rle_is_refused(text):
    assert decode_rle(text).sum() != 64


def rle(mask, is_text, order='F'):
    """Return a mask in run lengths, a list or text, of which pycocotools reads those in columns."""
    if order == 'C':
        mask = mask.ravel().reshape(mask.shape, order='F')
    counts = text_of(mask)
    return {'size': list(mask.shape), 'counts': counts if is_text else decode_rle(counts).tolist()}


@pytest.mark.parametrize('is_text', [False, True])
@pytest.mark.parametrize('shape', [(48, 64), (64, 48), (64, 64)])
def test_bounds_of_run_lengths_along_rows(shape, is_text):
    mask = np.zeros(shape, bool)
    mask[20:29, 4:16] = True
    assert bounds_of(rle(mask, is_text)) == (4, 20, 16, 29)
    assert bounds_of(rle(mask, is_text, 'C')) != (4, 20, 16, 29)
    assert bounds_of(rle(mask, is_text, 'C'), rows_first=True) == (4, 20, 16, 29)


def test_polygons_that_mmdet_leaves_out_have_no_place():
    square = [4, 5, 20, 5, 20, 30, 4, 30]
    for short in ([], [40, 4], [40, 4, 20, 20], [40, 4, 20, 4, 20]):
        assert bounds_of([short, square]) == (4, 5, 20, 30)
        assert bounds_of([short, square], rows_first=True) == (5, 4, 30, 20)
        assert bounds_of([short]) == (0, 0, 0, 0)
