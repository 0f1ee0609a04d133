"""Image files read ahead: all of them, in order, within a limit of memory; and every image in exactly one rank."""

import itertools
import multiprocessing
import resource
import sys
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from swin_dense.features import dataset
from swin_dense.features.dataset import chunk_shares, read_ahead
from swin_dense.features.images import read_pixels


@pytest.fixture
def paths(tmp_path):
    """Seven images of three sizes and two that cannot be read."""
    generator = np.random.default_rng(0)
    files = []
    for index, size in enumerate([(8, 9), (12, 9), (8, 9), (8, 9), (12, 9), (5, 5), (8, 9)]):
        files.append(str(tmp_path / f'{index}.png'))
        Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)).save(files[-1])
    (tmp_path / 'broken.png').write_text('no image')
    return [*files[:3], str(tmp_path / 'broken.png'), str(tmp_path / 'missing.png'), *files[3:]]


def read(path):
    return read_pixels(path, 3)


@pytest.mark.parametrize('workers', [0, 1, 3])
def test_in_order_and_as_stored(paths, workers):
    order = [8, 1, 3, 0, 4, 7]
    samples = list(read_ahead(paths, order, read, workers))
    assert [sample.index for sample in samples] == order
    for sample in samples:
        if sample.index in (3, 4):
            assert sample.image is None
            assert paths[sample.index] in sample.error
        else:
            assert sample.image.dtype == torch.uint8
            assert torch.equal(sample.image, read(paths[sample.index]))


def test_no_more_at_once_than_the_limit_allows(paths, monkeypatch):
    images = [path for path in paths if path.endswith('.png') and path[-5].isdigit()]
    limit = 1 << 30
    costs = dict(zip(images, [limit * tenths // 10 for tenths in (5, 3, 3, 30, 4, 4, 2)], strict=True))
    monkeypatch.setattr(dataset, 'decoded_bytes', costs.get)
    lock, held, most = threading.Lock(), set(), []

    def note(path):
        with lock:
            held.add(path)
            most.append((sum(costs[path] for path in held), len(held)))
        time.sleep(0.01)
        return torch.zeros(1)

    for sample in read_ahead(images, range(len(images)), note, workers=4):
        time.sleep(0.02)
        with lock:
            held.discard(images[sample.index])
    assert all(cost <= limit or count == 1 for cost, count in most)
    assert max(count for _, count in most) > 1


def test_camera_photographs_take_what_the_limit_says(tmp_path):
    """Of 16 photographs of 12 megapixels, half a GiB as they are stored and 2.1 as floats."""
    Image.effect_noise((4000, 3000), 50).convert('RGB').save(tmp_path / 'photo.jpg', quality=30)

    def measure():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in read_ahead([str(tmp_path / 'photo.jpg')] * 16, range(16), read, workers=2):
            time.sleep(0.01)
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10

    process = multiprocessing.get_context('fork').Process(target=lambda: sys.exit(measure() > 600))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_left_in_the_middle(paths):
    before = set(threading.enumerate())
    reader = read_ahead(paths, range(len(paths)), read, workers=2)
    next(reader)
    reader.close()
    assert not set(threading.enumerate()) - before


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 5))
def test_every_image_goes_to_exactly_one_rank(images, chunk_size, world_size):
    shares = [chunk_shares(images, chunk_size, rank, world_size) for rank in range(world_size)]
    chunks = list(itertools.chain.from_iterable(shares))
    assert sorted(itertools.chain.from_iterable(chunks)) == list(range(images))
    # An image has the same company however many ranks there are.
    assert sorted(chunks) == chunk_shares(images, chunk_size, 0, 1)


@pytest.mark.parametrize('rank', [-1, 2])
def test_rank_out_of_range(rank):
    with pytest.raises(ValueError, match='rank must lie between 0 and world_size - 1 = 1'):
        chunk_shares(5, 1, rank, 2)
