"""The data set for pretraining: any place of images, random crops of the authors' shapes, held-out images."""

import tarfile

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from swin_dense.pretraining.unlabelled import UnlabelledImages
from swin_dense.utils.pixels import ImageError
from tests.conftest import needs


@pytest.fixture
def photos(tmp_path):
    """Twenty images of one colour each, which tells them apart, some of them in a tar file."""
    folder = tmp_path / 'photos'
    folder.mkdir()
    for index in range(20):
        Image.new('RGB', (60 + index, 50), (10 * index, 0, 0)).save(folder / f'{index:02}.png')
    with tarfile.open(folder / 'more.tar', 'w') as archive:
        for path in sorted(folder.glob('1*.png')):
            archive.add(path, f'inside/{path.name}')
            path.unlink()
    return folder


def colours(dataset):
    return [round(item['inputs'][0].mean().item() * 25.5) for item in dataset]


def test_every_image_is_in_one_split_also_those_in_tar_files(photos, tmp_path):
    train, held = (UnlabelledImages(str(photos), 32, split=split, held_out=0.15) for split in ('train', 'held_out'))
    assert (len(train), len(held)) == (17, 3)
    assert sorted(colours(train) + colours(held)) == list(range(20))
    assert all(item['inputs'].shape == (3, 32, 32) for item in train)
    assert [item['index'] for item in held] == [0, 1, 2]
    train.check()
    names = tmp_path / 'list.txt'
    names.write_text('\n'.join(str(path) for path in sorted(photos.glob('0*.png'))[:4]))
    for places in (str(names), [str(photos / '00.png'), str(photos / '0[123].png')]):
        assert sorted(colours(UnlabelledImages(places, 32, held_out=0.0))) == [0, 1, 2, 3]


def test_worker_processes_read_the_tar_file(photos):
    loader = DataLoader(UnlabelledImages(str(photos / 'more.tar'), 32, held_out=0.0), 4, num_workers=2)
    assert sorted(round(25.5 * mean) for batch in loader for mean in batch['inputs'][:, 0].mean((1, 2)).tolist()) == [
        *range(10, 20)
    ]


def test_crops_have_the_shares_and_shapes_of_random_resized_crop(photos):
    dataset = UnlabelledImages(str(photos), 32)
    torch.manual_seed(0)
    boxes = torch.tensor([dataset._random_box(300, 400) for _ in range(2000)], dtype=torch.float)
    top, left, height, width = boxes.T
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 300).all()
    assert (left + width <= 400).all()
    share, ratio = height * width / 120_000, width / height
    assert share.min() > 0.66
    assert share.max() <= 1
    assert ratio.min() > 0.745
    assert ratio.max() < 1.34
    assert share.max() > 0.95
    assert ratio.max() > 1.3
    assert top.unique().numel() > 30
    assert dataset._random_box(10, 1000) == (0, 495, 10, 10)  # no such crop fits, so the centre is taken


def test_a_crop_is_what_its_box_contains(tmp_path, monkeypatch):
    """At the scale 1, a crop equals the pixels; half of the crops are flipped; a held-out crop never changes."""
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    for name in 'ab':
        Image.fromarray(pixels).save(tmp_path / f'{name}.png')
    dataset = UnlabelledImages(str(tmp_path), 32, held_out=0.5)
    monkeypatch.setattr(dataset, '_random_box', lambda height, width, generator: (5, 20, 32, 32))
    expected = torch.from_numpy(pixels[5:37, 20:52]).permute(2, 0, 1) / 255
    torch.manual_seed(0)
    flipped = 0
    for _ in range(200):
        crop = dataset[0]['inputs']
        is_flipped = not torch.allclose(crop, expected, atol=1e-6)
        torch.testing.assert_close(crop.flip(-1) if is_flipped else crop, expected, atol=1e-6, rtol=0)
        flipped += is_flipped
    assert 70 < flipped < 130
    held = UnlabelledImages(str(tmp_path), 40, split='held_out', held_out=0.5)
    torch.testing.assert_close(
        held[0]['inputs'], torch.from_numpy(pixels[:, 10:50]).permute(2, 0, 1) / 255, atol=1e-6, rtol=0
    )
    assert torch.equal(held[0]['inputs'], held[0]['inputs'])


def test_images_smaller_than_a_crop_are_refused_by_name(photos):
    Image.new('RGB', (200, 31)).save(photos / 'narrow.png')
    with pytest.raises(ValueError, match=r"of 32 pixels: '.*narrow.png' \(31\)"):
        UnlabelledImages(str(photos), 32, held_out=0.0).check()
    shares = [UnlabelledImages(str(photos), 32, held_out=0.0) for _ in range(2)]
    refused = 0
    for rank, dataset in enumerate(shares):
        try:
            dataset.check(rank, 2)
        except ValueError:
            refused += 1
    assert refused == 1  # each of two processes checks half of the images


@pytest.fixture
def damaged(tmp_path):
    """Two hundred images, of which one is truncated: its header tells its size, but it cannot be decoded."""
    folder = tmp_path / 'damaged'
    folder.mkdir()
    generator = np.random.default_rng(0)
    for index in range(200):
        Image.fromarray(generator.integers(0, 255, (40, 40, 3), dtype=np.uint8)).save(folder / f'{index:03}.jpg')
    cut(folder / '007.jpg')
    return folder


def cut(path):
    path.write_bytes(path.read_bytes()[:-400])


def test_another_image_takes_the_place_of_a_damaged_one(damaged, caplog):
    dataset = UnlabelledImages(str(damaged), 32, held_out=0.0)
    for _ in range(2):
        assert dataset[7]['inputs'].shape == (3, 32, 32)
    (record,) = caplog.records  # once, although it was read twice
    assert '007.jpg' in record.getMessage()
    assert 'another image takes its place' in record.getMessage()
    # Workers read it too; the order of random numbers is that of the seed.
    assert sum(len(batch['inputs']) for batch in DataLoader(dataset, 50, num_workers=2)) == 200


def test_the_place_of_a_held_out_image_takes_always_the_same(damaged):
    dataset = UnlabelledImages(str(damaged), 32, split='held_out', held_out=0.99)
    index = [image.name.endswith('007.jpg') for image in dataset.images].index(True)
    before = torch.get_rng_state()
    assert torch.equal(dataset[index]['inputs'], dataset[index + 1]['inputs'])
    assert torch.equal(torch.get_rng_state(), before)


def test_more_than_one_damaged_image_in_a_hundred_ends_the_training(damaged):
    cut(damaged / '050.jpg')
    (damaged / '100.jpg').write_bytes(b'')
    dataset = UnlabelledImages(str(damaged), 32, held_out=0.0)
    dataset[7]
    dataset[50]
    with pytest.raises(ImageError, match=r'3 of 200 images cannot .*100\.jpg'):
        dataset[100]
    assert UnlabelledImages([str(damaged / '007.jpg'), str(damaged / '008.jpg')], 32, held_out=0.0)[0]
    with pytest.raises(ImageError, match='1 of 1 images cannot be read'):
        UnlabelledImages(str(damaged / '007.jpg'), 32, held_out=0.0)[0]


def test_the_check_decodes_a_sample_or_every_image(damaged, caplog):
    dataset = UnlabelledImages(str(damaged), 32, held_out=0.0)
    assert dataset.check() == ['200 training images: read the headers of 200, decoded 50, of which 0 cannot be read']
    assert 'decoded 200, of which 1 cannot be read' in dataset.check(every_image=True)[0]
    assert '007.jpg' in caplog.text
    for path in damaged.iterdir():
        cut(path)
    with pytest.raises(ImageError, match='images cannot be read'):
        UnlabelledImages(str(damaged), 32, held_out=0.0).check()


@needs('tifffile')
@pytest.mark.parametrize(
    ('values', 'options', 'advice'),
    [
        (np.arange(1600, dtype=np.int16).reshape(40, 40), {'scale': 3200.0}, 'give scale='),
        (np.arange(1600, dtype=np.float32).reshape(40, 40), {'scale': 3200.0}, 'give scale='),
        (np.stack([np.full((40, 40), 9, np.uint8), np.zeros((40, 40), np.uint8)]), {'page': 1}, 'give page='),
    ],
)
def test_images_of_other_types_are_refused_before_training_and_read_with_an_option(tmp_path, values, options, advice):
    import tifffile

    for index in range(20):
        tifffile.imwrite(tmp_path / f'{index}.tif', values, photometric='minisblack')
    given = {'data_root': str(tmp_path), 'crop_size': 40, 'in_channels': 1, 'held_out': 0.0}
    with pytest.raises(ImageError, match=advice):
        UnlabelledImages(**given).check()
    dataset = UnlabelledImages(**given, **options)
    dataset.check()
    dataset.is_training = False  # the whole image
    expected = values[1] if 'page' in options else values / 3200
    np.testing.assert_allclose(dataset[3]['inputs'][0].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ('options', 'error', 'words'),
    [
        ({'data_root': 'empty'}, ValueError, 'there is no image in'),
        ({'data_root': 'nowhere'}, FileNotFoundError, 'does not exist'),
        ({'data_root': 'one'}, ValueError, 'leaves none for split'),
        ({'split': 'val'}, ValueError, 'split must be one of'),
        ({'held_out': 1.0}, ValueError, 'held_out must be a share'),
        ({'area': (0.5, 2)}, ValueError, 'area must be two shares'),
        ({'page': -1}, ValueError, 'page must be at least 0'),
    ],
)
def test_wrong_inputs_are_one_clear_error(tmp_path, options, error, words):
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'one').mkdir()
    Image.new('RGB', (40, 40)).save(tmp_path / 'one' / 'a.png')
    options = {'crop_size': 32, **options, 'data_root': str(tmp_path / options.get('data_root', 'one'))}
    with pytest.raises(error, match=words):
        UnlabelledImages(**options)
