"""Images through a DataLoader: ready tensors, batches of equal size, every image in exactly one rank."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from swin_dense.features.dataset import ChunkSampler, Collate, ImageDataset, chunk_shares
from swin_dense.features.images import IMAGENET_MEAN, IMAGENET_STD, ImageError, normalize, read_image
from swin_dense.features.inference import Inference


@pytest.fixture
def paths(tmp_path):
    """Seven images of three sizes and a broken one."""
    generator = np.random.default_rng(0)
    files = []
    for index, size in enumerate([(8, 9), (12, 9), (8, 9), (8, 9), (12, 9), (5, 5), (8, 9)]):
        files.append(tmp_path / f'{index}.png')
        Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8)).save(files[-1])
    files.insert(3, tmp_path / 'broken.png')
    files[3].write_text('no image')
    return files


def test_samples_are_ready_and_carry_their_size(paths):
    dataset = ImageDataset(paths, 3, Inference())
    assert len(dataset) == 8
    sample = dataset[1]
    assert sample.size == (12, 9)
    assert torch.equal(sample.image, normalize(read_image(paths[1]), IMAGENET_MEAN, IMAGENET_STD))
    with pytest.raises(ImageError, match='broken'):
        dataset[3]
    broken = ImageDataset(paths, 3, Inference(), skip_broken=True)[3]
    assert broken.image is None
    with pytest.raises(ImageError, match='broken'):
        _ = broken.size


@pytest.mark.parametrize('workers', [0, 2])
def test_batches_hold_equal_sizes(paths, workers):
    loader = DataLoader(
        ImageDataset(paths, 3, Inference(), skip_broken=True), batch_size=8, collate_fn=Collate(2), num_workers=workers
    )
    ((batches, broken),) = list(loader)
    assert [sample.index for sample in broken] == [3]
    assert [batch.indices for batch in batches] == [[0, 2], [4, 7], [1, 5], [6]]
    for batch in batches:
        for index, image in zip(batch.indices, batch.images, strict=True):
            assert torch.equal(image, normalize(read_image(paths[index]), IMAGENET_MEAN, IMAGENET_STD))


def test_other_channels_and_no_normalisation(tmp_path):
    Image.fromarray(np.full((4, 5), 51, np.uint8)).save(tmp_path / 'grey.png')
    sample = ImageDataset([tmp_path / 'grey.png'], 1, Inference(mean=None, std=None))[0]
    torch.testing.assert_close(sample.image, torch.full((1, 4, 5), 0.2))


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 9), st.integers(1, 5))
def test_every_pending_image_goes_to_exactly_one_rank(pending, chunk_size, world_size):
    samplers = [ChunkSampler(pending, chunk_size, rank, world_size) for rank in range(world_size)]
    chunks = list(itertools.chain.from_iterable(samplers))
    given_out = list(itertools.chain.from_iterable(chunks))
    assert len(given_out) == len(set(given_out))
    assert {index for index, is_pending in enumerate(pending) if is_pending} <= set(given_out)
    # An image has the same company whatever is finished and however many ranks there are.
    for chunk in chunks:
        first = chunk[0]
        assert first % chunk_size == 0
        assert chunk == list(range(first, min(first + chunk_size, len(pending))))
        assert any(pending[index] for index in chunk)
    assert sum(map(len, samplers)) == len(chunks)


@pytest.mark.parametrize('rank', [-1, 2])
def test_rank_out_of_range(rank):
    with pytest.raises(ValueError, match='rank must lie between 0 and world_size - 1 = 1'):
        chunk_shares(5, 1, rank, 2)
