"""Reading ahead yields all images in order within a memory limit, and batches hold images of equal size."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from swin_dense.features import runner
from swin_dense.features.extraction import Extraction
from swin_dense.features.runner import Item, Runner, batches, read_ahead
from tests.conftest import photograph, tiny


@pytest.fixture
def paths(tmp_path):
    """Create seven images of three sizes, a broken file, and the path of a missing one."""
    for name, height in zip('abcefgh', (8, 12, 8, 8, 12, 5, 8), strict=True):
        Image.fromarray(photograph(height, 9)).save(tmp_path / f'{name}.png')
    (tmp_path / 'broken.png').write_text('no image')
    names = ['a', 'b', 'c', 'broken', 'missing', 'e', 'f', 'g', 'h']
    return [str(tmp_path / f'{name}.png') for name in names]


def items_of(paths):
    return (Item(path, path) for path in paths)


def read(item):
    return Runner(Extraction(tiny()))._read(item)


@pytest.mark.parametrize('workers', [0, 1, 3])
def test_images_are_yielded_in_order_and_as_stored(paths, workers):
    samples = list(read_ahead(items_of(paths), read, workers))
    assert [item.name for item, _ in samples] == paths
    for item, image in samples:
        if 'broken' in item.name or 'missing' in item.name:
            assert item.name in image
        else:
            assert image.dtype == torch.uint8
            stored = np.array(Image.open(item.name))
            assert np.array_equal(image.permute(1, 2, 0), stored)


def test_images_read_ahead_fit_into_the_limit(monkeypatch):
    """For each image, the images begun by then and not yet consumed fit into the limit, or are a single image."""
    limit = runner._AHEAD_BYTES
    tenths = zip('abcdefg', (5, 3, 3, 30, 4, 4, 2), strict=True)
    costs = {name: limit * share // 10 for name, share in tenths}
    monkeypatch.setattr(runner, 'decoded_bytes', costs.get)
    begun = {name: threading.Event() for name in costs}

    def note(item):
        begun[item.name].set()
        return item.name

    groups = []
    items = iter([Item(name, name) for name in costs])
    reader = read_ahead(items, note, workers=4)
    for item, _ in reader:
        for future in reader.gi_frame.f_locals['images']:
            future.result()  # let the readers read as far ahead as they can
        groups.append([name for name in costs if begun[name].is_set() and name >= item.name])
    for group in groups:
        assert sum(costs[name] for name in group) <= limit or len(group) == 1


def test_closing_the_generator_and_an_error_of_the_item_iterator(paths):
    before = set(threading.enumerate())
    reader = read_ahead(items_of(paths), read, workers=2)
    next(reader)
    reader.close()
    assert not set(threading.enumerate()) - before

    def items():
        yield from items_of(paths[:1])
        raise RuntimeError('a defect')

    with pytest.raises(RuntimeError, match='a defect'):
        list(read_ahead(items(), read, workers=2))


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 2))


@given(st.lists(st.one_of(SIZES, st.none())), st.integers(1, 4))
def test_every_image_is_in_one_batch_with_images_of_equal_size(sizes, batch_size):
    images = ['broken' if size is None else torch.full((3, *size), at) for at, size in enumerate(sizes)]
    seen = []
    for members, batch in batches(enumerate(images), batch_size):
        seen += members
        if batch == 'broken':
            assert [sizes[member] for member in members] == [None]
            continue
        assert len(members) <= batch_size
        for member, image in zip(members, batch, strict=True):
            assert torch.equal(image, images[member])
    assert sorted(seen) == list(range(len(sizes)))


def test_an_image_alone_in_its_batch_is_not_copied_and_one_of_unique_size_does_not_wait_for_ever(monkeypatch):
    image = torch.zeros(3, 4, 5)
    ((_, batch),) = batches([(0, image)], 8)
    assert batch.shape == (1, 3, 4, 5)
    assert batch.data_ptr() == image.data_ptr()

    def of_rising_width(channels, height):
        for width in range(1, 100):
            yield width, torch.zeros(channels, height, width, dtype=torch.uint8)

    monkeypatch.setattr(runner, '_WAITING_BYTES', 100)
    samples = of_rising_width(3, 2)
    next(batches(samples, 8))
    assert next(samples)[0] <= 7
    samples = of_rising_width(1, 1)
    monkeypatch.setattr(runner, '_WAITING_BYTES', 1 << 20)
    next(batches(samples, 2))
    assert next(samples)[0] <= 2 * runner._WAITING_BATCHES + 1
