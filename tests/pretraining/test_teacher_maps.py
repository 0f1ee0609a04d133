"""Stored maps: those of the teacher for the same crops, in any folder; what does not fit is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from swin_dense import FeatureDistillation, SwinBackbone, Teacher
from swin_dense.features.images import normalize
from swin_dense.pretraining.teacher_maps import StoredMaps, store_maps
from swin_dense.pretraining.unlabelled import UnlabelledImages
from swin_dense.utils.choices import IMAGENET_MEAN, IMAGENET_STD
from swin_dense.utils.pixels import ImageError
from tests.conftest import TINY, randomize

SIDE = 40


@pytest.fixture
def photos(tmp_path):
    """Twelve images of different sizes, of which some are in subfolders with equal names."""
    generator = np.random.default_rng(0)
    for index in range(12):
        folder = tmp_path / 'photos' / f'part {index % 3}'
        folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 255, (60 + index, 90, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f'{index // 3}.png')
    return tmp_path / 'photos'


def teacher():
    torch.manual_seed(3)
    first = nn.Conv2d(3, 8, 14, 14)
    second = nn.Sequential(nn.Conv2d(3, 5, 14, 14), nn.AvgPool2d(3, 1, 1))  # with context, as attention has
    return Teacher(lambda x: [first(x), second(x)], [8, 5], [14, 14], multiple=14)


def splits(photos, **options):
    return [
        UnlabelledImages(str(photos), SIDE, split=split, held_out=0.2, **options) for split in ('train', 'held_out')
    ]


def write(photos, folder, dtype=torch.float32, **options):
    return sum(
        store_maps(teacher(), splits(photos, views=3), folder, name='mine', batch_size=4, dtype=dtype, **options)
    )


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_live_and_stored_teachers_give_equal_losses_and_gradients(photos, tmp_path, dtype):
    """Also of photographs and maps that were moved to another folder."""
    assert write(photos, tmp_path / 'maps', dtype, licence='MIT') == 9 * 3 + 3
    (tmp_path / 'elsewhere').mkdir()
    for folder in ('photos', 'maps'):
        shutil.move(tmp_path / folder, tmp_path / 'elsewhere' / folder)
    folder = str(tmp_path / 'elsewhere' / 'maps')
    stored = StoredMaps(folder)
    assert (stored.teacher, stored.licence, stored.out_channels) == ('mine', 'MIT', (8, 5))
    tolerance = {'atol': 1e-6, 'rtol': 1e-5} if dtype == torch.float32 else {'atol': 1e-3, 'rtol': 1e-2}
    for images in splits(tmp_path / 'elsewhere' / 'photos', maps=folder):
        assert images.views == 3
        for batch in DataLoader(images, batch_size=3):
            results = []
            for source, maps in ((teacher(), None), (stored, batch['maps'])):
                torch.manual_seed(0)
                model = FeatureDistillation(randomize(SwinBackbone(**TINY, window_size=4, drop_path_rate=0.0)), source)
                img = normalize(batch['inputs'], IMAGENET_MEAN, IMAGENET_STD)
                loss = model(img, maps)['loss_features']
                results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
            torch.testing.assert_close(*results, **tolerance)


def test_crops_are_fixed_differ_and_are_all_taken(photos, tmp_path):
    train, held = splits(photos, views=3)
    assert list(train.view_numbers) == [1, 2, 3]
    assert list(held.view_numbers) == [0]
    image = train.read(0)
    crops = [train.crop(image, 0, view) for view in (1, 2, 3)]
    assert all(torch.equal(crop, train.crop(image, 0, view)) for view, crop in enumerate(crops, 1))
    assert len({crop.sum().item() for crop in crops}) == 3
    torch.manual_seed(0)
    taken = [train[0]['inputs'] for _ in range(40)]
    seen = [[torch.equal(one, crop) for crop in crops] for one in taken]
    assert all(sum(one) == 1 for one in seen)
    assert all(map(any, zip(*seen, strict=True)))
    assert torch.equal(held[0]['inputs'], held.crop(held.read(0), 0, 0))
    other = splits(photos)[0]  # without views, every crop is new
    assert not torch.equal(other[0]['inputs'], other[0]['inputs'])
    (photos / 'a new part').mkdir()
    Image.new('RGB', (60, 60)).save(photos / 'a new part' / '0.png')
    more = UnlabelledImages(str(photos), SIDE, held_out=0.0, views=3)  # another number of this image, the same crops
    number = [more.key(index) for index in range(13)].index(train.key(0))
    assert torch.equal(more.crop(image, number, 1), crops[0])
    assert len({train.key(index) for index in range(9)} | {held.key(index) for index in range(3)}) == 12


def test_an_interrupted_run_continues_and_a_missing_map_is_written_again(photos, tmp_path):
    for _ in store_maps(teacher(), splits(photos, views=3), tmp_path / 'maps', name='mine', batch_size=4):
        break
    assert len(list(tmp_path.glob('maps/maps/*/*.npz'))) == 4
    assert write(photos, tmp_path / 'maps', torch.float16) == 26
    assert write(photos, tmp_path / 'maps', torch.float16) == 0
    next(tmp_path.glob('maps/maps/*/*.npz')).unlink()
    assert write(photos, tmp_path / 'maps', torch.float16) == 1


def test_images_without_maps_are_reported_before_the_training(photos, tmp_path):
    write(photos, tmp_path / 'maps')
    train, held = splits(photos, maps=str(tmp_path / 'maps'))
    train.check()
    held.check()
    paths = [train.maps.path_of(train.key(index), 2) for index in (1, 4)]
    paths[0].unlink()
    train.check()  # one image is replaced by another, with a warning
    paths[1].write_bytes(paths[1].read_bytes()[:-50])
    with pytest.raises(ImageError, match=r'2 of 9 images cannot be read.* are damaged'):
        [train[4] for _ in range(30)]
    shutil.rmtree(tmp_path / 'maps' / 'maps')
    with pytest.raises(ImageError, match='has no maps of it'):
        splits(photos, maps=str(tmp_path / 'maps'))[0].check()


def test_a_damaged_image_gets_no_maps(photos, tmp_path, caplog):
    path = photos / 'part 0' / '0.png'
    path.write_bytes(path.read_bytes()[:500])
    assert write(photos, tmp_path / 'maps') in (29, 27)  # of a held-out image one crop, of another three
    assert 'it gets no maps' in caplog.text


def test_what_does_not_fit_is_refused(photos, tmp_path):
    folder = tmp_path / 'maps'
    write(photos, folder)
    with pytest.raises(ValueError, match='maps of other crops: crop_size 40 there, 48 now'):
        UnlabelledImages(str(photos), 48, maps=str(folder))
    with pytest.raises(ValueError, match=r'views=3 crops of each image, got views=4'):
        UnlabelledImages(str(photos), SIDE, maps=str(folder), views=4)
    with pytest.raises(ValueError, match=r"another teacher or of other crops \(teacher 'mine' there, 'yours' now\)"):
        next(store_maps(teacher(), splits(photos, views=3), folder, name='yours', dtype=torch.float32))
    with pytest.raises(ValueError, match='fixed crops only; give UnlabelledImages views=4'):
        next(store_maps(teacher(), splits(photos), tmp_path / 'new', name='mine'))
    with pytest.raises(FileNotFoundError, match=r'has no maps\.json'):
        StoredMaps(photos)
    model = FeatureDistillation(SwinBackbone(**TINY, window_size=4), StoredMaps(folder))
    with pytest.raises(ValueError, match='give maps='):
        model(torch.zeros(1, 3, SIDE, SIDE))
    large = Teacher(lambda x: 1e6 * x[:, :, ::8, ::8], [3], [8])
    with pytest.raises(ValueError, match=r'not finite in torch\.float16; store them in float32'):
        next(store_maps(large, splits(photos, views=1), tmp_path / 'large', name='large'))
    manifest = folder / 'maps.json'
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, 'format': 2}))
    with pytest.raises(ValueError, match='format 2 of a later version'):
        StoredMaps(folder)
    manifest.write_text('{}')
    with pytest.raises(ValueError, match='is damaged'):
        StoredMaps(folder)
