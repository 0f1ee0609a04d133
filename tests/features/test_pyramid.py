"""The pyramid of an image equals the backbone's output for that image alone, in any batch and from any thread."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from swin_dense import SwinBackbone
from swin_dense.features.pyramid import extract_pyramid
from swin_dense.images.normalization import Normalization
from swin_dense.images.presets import IMAGENET_MEAN, IMAGENET_STD
from tests.conftest import TINY, photograph, randomize, tiny
from tests.features.helpers import close, maps_of

PHOTOGRAPH = photograph(97, 131)
PARTS = [PHOTOGRAPH[:32, :40], PHOTOGRAPH[32:64, 32:72]]


@pytest.fixture(scope='module')
def backbone():
    return tiny(drop_path_rate=0.5)


MEAN, STD = (torch.tensor(numbers)[:, None, None] for numbers in (IMAGENET_MEAN, IMAGENET_STD))


def alone(backbone, image):
    """Return the expected pyramid: normalise explicitly and run the backbone on one image."""
    tensor = torch.from_numpy(image.copy()).permute(2, 0, 1) / 255
    return maps_of(backbone, (tensor - MEAN) / STD)


def relative_error(one, other):
    return ((one - other).norm() / other.norm()).item()


@settings(max_examples=12)
@given(st.data())
def test_features_do_not_depend_on_the_batch(backbone, data):
    sides = st.sampled_from([1, 3, 28, 33, 56, 61])
    boxes = data.draw(st.lists(st.tuples(st.integers(0, 36), sides, sides), min_size=1, max_size=7))
    batch_size = data.draw(st.integers(1, 4))
    images = [PHOTOGRAPH[at : at + height, at : at + width] for at, height, width in boxes]
    of_other_types = [images[0] / 255, images[0].astype(np.uint16) * 257]
    pyramids = extract_pyramid(backbone, [*images, *of_other_types], batch_size=batch_size)
    for image, pyramid in zip([*images, images[0], images[0]], pyramids, strict=True):
        assert pyramid.image_size == image.shape[:2]
        close(pyramid, alone(backbone, image))


def test_containers_of_several_images(backbone):
    batch = torch.from_numpy(np.stack(PARTS)).permute(0, 3, 1, 2)
    for images in (batch, list(batch), tuple(batch), iter(batch)):
        for pyramid, part in zip(extract_pyramid(backbone, images), PARTS, strict=True):
            close(pyramid, alone(backbone, part))
    assert extract_pyramid(backbone, []) == []
    assert len(extract_pyramid(backbone, batch[:1])) == 1


def test_levels_mean_and_bgr(backbone):
    assert list(extract_pyramid(backbone, PHOTOGRAPH, levels=(32, 8))) == [8, 32]
    expected = alone(backbone, PHOTOGRAPH)
    close(extract_pyramid(backbone, PHOTOGRAPH[:, :, ::-1], bgr=True), expected)
    normalised = (PHOTOGRAPH / 255 - IMAGENET_MEAN) / IMAGENET_STD
    close(extract_pyramid(backbone, normalised, normalization=Normalization(None, None)), expected)


def test_maps_are_ordinary_tensors_with_separate_storage(backbone):
    first, second = extract_pyramid(backbone, PARTS)
    level = first[32]
    assert not level.requires_grad
    assert level.untyped_storage().nbytes() == level.nbytes
    head = torch.nn.Linear(128, 2)
    head(level.mean((1, 2))).sum().backward()  # fails on an inference tensor
    assert head.weight.grad is not None
    before = second[4].clone()
    first[4].zero_()
    assert torch.equal(second[4], before)


def test_gradients_reach_every_parameter_and_the_image_if_asked_for(backbone):
    image = torch.rand(3, 61, 45, requires_grad=True)
    pyramid = extract_pyramid(backbone, image, gradients=True)
    inputs = [image, *backbone.parameters()]
    found = torch.autograd.grad(loss_of(pyramid.values()), inputs)
    outs = backbone(((image - MEAN) / STD)[None])
    expected = torch.autograd.grad(loss_of(outs), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    grey = torch.rand(1, 61, 45)
    for options in {}, {'max_side': 30}:
        pyramid = extract_pyramid(backbone, grey.clone().requires_grad_(), **options)
        close(pyramid, extract_pyramid(backbone, grey, **options))


def loss_of(maps):
    return sum(level.square().mean() for level in maps)


def test_dtype_and_autocast(backbone):
    expected = alone(backbone, PHOTOGRAPH)
    whole = extract_pyramid(backbone, PHOTOGRAPH)
    for dtype in ('float16', torch.float16, np.float16, np.dtype('float16')):
        half = extract_pyramid(backbone, PHOTOGRAPH, dtype=dtype)
        assert all(torch.equal(half[stride], level.half()) for stride, level in whole.items())
    mixed = extract_pyramid(backbone, PHOTOGRAPH, autocast=torch.bfloat16, dtype=torch.float32)
    for stride, level in mixed.items():
        assert 0 < relative_error(level, expected[stride]) < 0.1  # close to float32, but not equal
    double = extract_pyramid(randomize(SwinBackbone(**TINY)).double(), PHOTOGRAPH)
    assert double[4].dtype == torch.float64


def test_wrapped_for_data_parallelism_and_compiled(backbone, tmp_path):
    expected = alone(backbone, PHOTOGRAPH)
    close(extract_pyramid(torch.nn.DataParallel(backbone), PHOTOGRAPH), expected)
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/meeting', rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(backbone)
        close(extract_pyramid(parallel, PHOTOGRAPH), expected)
        tiled = extract_pyramid(parallel, PHOTOGRAPH, tile=224)
    finally:
        torch.distributed.destroy_process_group()
    close(tiled, expected)
    with pytest.raises(TypeError, match=r'backbone must be .*, got Linear'):
        extract_pyramid(torch.nn.Linear(1, 1), PHOTOGRAPH)
    backbone = randomize(SwinBackbone(embed_dims=16, depths=(2,), num_heads=(2,))).eval()
    compiled = torch.compile(backbone, backend='eager')
    for image, pyramid in zip(PARTS, extract_pyramid(compiled, PARTS), strict=True):
        close(pyramid, alone(backbone, image))


@pytest.mark.parametrize(
    'options',
    [{}, {'tile': 224}],
    ids=['whole', 'tiles'],
)
def test_an_open_file_is_one_image(backbone, tmp_path, options):
    pages = [Image.fromarray(image) for image in (PHOTOGRAPH[::-1], PHOTOGRAPH)]
    pages[0].save(
        tmp_path / 'pages.tif',
        save_all=True,
        append_images=pages[1:],
    )
    with (tmp_path / 'pages.tif').open('rb') as file:
        close(extract_pyramid(backbone, file, page=1, **options), alone(backbone, PHOTOGRAPH))


DEEP = PHOTOGRAPH.astype(np.uint16) * 257


@pytest.mark.parametrize('image', [PHOTOGRAPH, DEEP, PHOTOGRAPH / 255])
def test_max_side_shrinks_larger_images(backbone, image):
    pyramid = extract_pyramid(backbone, image, max_side=66)
    assert pyramid.image_size == (round(97 * 66 / 131), 66)
    small = Image.fromarray(PHOTOGRAPH).resize((66, 49), Image.Resampling.BILINEAR)
    expected = alone(backbone, np.array(small))
    for stride, level in pyramid.items():
        assert relative_error(level, expected[stride]) < 0.02
    close(extract_pyramid(backbone, image, max_side=131), alone(backbone, PHOTOGRAPH))
    assert extract_pyramid(backbone, image, max_side=1).image_size == (1, 1)


@pytest.mark.parametrize(('value', 'message'), [(255.0, 'between 0 and 1'), (float('nan'), 'NaN')])
def test_images_with_gradients_are_checked_for_range(backbone, value, message):
    image = torch.rand(3, 40, 40)
    image[1, 2, 3] = value
    with pytest.raises(ValueError, match=message):
        extract_pyramid(backbone, image.requires_grad_(), gradients=True)


def test_training_mode_is_disabled_and_restored():
    backbone = randomize(SwinBackbone(**TINY, drop_path_rate=0.9, frozen_stages=1)).train()

    def training_modes():
        return [module.training for module in backbone.modules()]

    modes = training_modes()
    assert set(modes) == {True, False}
    first = extract_pyramid(backbone, PHOTOGRAPH)
    assert training_modes() == modes
    assert torch.equal(first[32], extract_pyramid(backbone, PHOTOGRAPH)[32])
    with pytest.raises(ValueError, match='channels'):
        extract_pyramid(backbone, np.zeros((4, 4, 5), np.uint8))
    assert training_modes() == modes


def test_threads(backbone):
    images = [PHOTOGRAPH[i : i + 30 + i, i : i + 45] for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda image: extract_pyramid(backbone, image), images))
    for image, pyramid in zip(images, found, strict=True):
        close(pyramid, alone(backbone, image))


def test_strides_are_named_and_distinct(backbone):
    pyramid = extract_pyramid(backbone, PHOTOGRAPH)
    with pytest.raises(KeyError, match='the strides are'):
        pyramid[5]
    assert '4: (16, 25, 33)' in repr(pyramid)
    with pytest.raises(ValueError, match='2 of the maps have stride 16'):
        extract_pyramid(SwinBackbone(**TINY, strides=(4, 2, 2, 1)), PHOTOGRAPH)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'overlap': 224}, 'need tile='),
        ({'out': 'x'}, 'need tile='),
        ({'tile': 224, 'gradients': True}, 'gradients=True'),
        ({'batch_size': 0}, 'batch_size must be at least 1'),
        ({'levels': [5]}, 'levels must be one of .*, got 5'),
        ({'dtype': torch.int8}, "dtype must be one of .*'bfloat16'"),
        ({'dtype': 16}, "dtype must be one of .*'bfloat16'"),
        ({'autocast': 'float32'}, "autocast must be one of .*'bfloat16'"),
        ({'device': 'cuda:4096'}, 'device=.* cannot be used'),
        ({'max_side': 66, 'tile': 224}, 'leave tile= out'),
    ],
)
def test_contradictory_options(backbone, options, message):
    with pytest.raises(ValueError, match=message):
        extract_pyramid(backbone, PHOTOGRAPH, **options)


def test_device(backbone):
    assert extract_pyramid(backbone, PHOTOGRAPH, device='cpu')[4].device.type == 'cpu'
    meta = extract_pyramid(SwinBackbone(**TINY, attn_backend='reference'), PHOTOGRAPH, device='meta')
    assert meta[32].shape == (128, 4, 5)
    assert meta[32].is_meta
    for device in (0.5, torch.float64):
        with pytest.raises(TypeError):
            extract_pyramid(backbone, PHOTOGRAPH, device=device)
        assert next(backbone.parameters()).dtype == torch.float32
