"""Run lengths of masks, compared with pycocotools."""

import numpy as np
import pytest

from swin_dense.workbench.configs.segmentations import check_mask, decode_rle, place_of_runs

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
        place = place_of_runs(lengths, height)
        rows, columns = mask.any(1).nonzero()[0], mask.any(0).nonzero()[0]
        if len(rows):
            assert place == (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        else:
            assert place == (0, 0, 0, 0)


@pytest.mark.parametrize('text', ['', 'o', 'oooooooooooooooo1', '~', '/', 'é', '1' * 5, 'n'])
def test_text_that_is_no_rle_is_refused(text):
    annotation = {'bbox': [0, 0, 8, 8], 'segmentation': {'size': [8, 8], 'counts': text}}
    assert 'lengths that sum to height times width' in check_mask(annotation, {'height': 8, 'width': 8}, False).fault


def rle(mask, is_text, order='F'):
    """Return a mask in run lengths, a list or text, of which pycocotools reads those in columns."""
    if order == 'C':
        mask = mask.ravel().reshape(mask.shape, order='F')
    counts = text_of(mask)
    return {'size': list(mask.shape), 'counts': counts if is_text else decode_rle(counts).tolist()}


@pytest.mark.parametrize('is_text', [False, True])
@pytest.mark.parametrize('shape', [(48, 64), (64, 48), (64, 64)])
def test_run_lengths_of_another_object_or_along_rows(shape, is_text):
    image = {'height': shape[0], 'width': shape[1]}
    boxes = [[4, 20, 12, 9], [30, 6, 10, 12]]
    masks = [np.zeros(shape, bool) for _ in boxes]
    for mask, (left, top, width, height) in zip(masks, boxes, strict=True):
        mask[top : top + height, left : left + width] = True
    for index, box in enumerate(boxes):
        right = {'bbox': box, 'segmentation': rle(masks[index], is_text)}
        assert check_mask(right, image, True)[:3] == (None, 0, 0)
        other = {'bbox': box, 'segmentation': rle(masks[1 - index], is_text)}
        assert 'lies elsewhere than bbox' in check_mask(other, image, True).fault
        by_rows = {'bbox': box, 'segmentation': rle(masks[index], is_text, 'C')}
        assert "run along rows, but COCO's run down columns" in check_mask(by_rows, image, True).fault


def test_polygons_that_mmdet_leaves_out_or_an_evaluation_cannot_read():
    """mmdet reads masks with them, but pycocotools takes the first for a box, or raises an error."""
    square = [4, 4, 20, 4, 20, 20, 4, 20]
    image = {'height': 32, 'width': 32}
    for short in ([], [4, 4], [4, 4, 20, 20], [4, 4, 20, 4, 20]):
        annotation = {'bbox': [4, 4, 16, 16], 'segmentation': [short, square]}
        assert check_mask(annotation, image, False)[:3] == (None, 1, 0)
        assert 'fewer than three points' in check_mask(annotation, image, True).fault
    right = {'bbox': [4, 4, 16, 16], 'segmentation': [square, square]}
    assert check_mask(right, image, True)[:3] == (None, 0, 0)
    wide = {'bbox': [4, 4, 10, 16], 'segmentation': [square]}
    assert check_mask(wide, image, True)[:3] == (None, 0, 6)
