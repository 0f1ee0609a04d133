"""The pyramid of an image equals the backbone's output for that image alone, in any batch and from any thread."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from swin_dense import SwinBackbone
from swin_dense.features.pyramid import Pyramid, extract_pyramid
from swin_dense.images.presets import IMAGENET_MEAN, IMAGENET_STD
from tests.conftest import TINY, assert_near, photograph, randomize, tiny

PHOTOGRAPH = photograph(97, 131)


@pytest.fixture(scope='module')
def backbone():
    return tiny(drop_path_rate=0.5)


def alone(backbone, image):
    """Return the expected pyramid: normalise explicitly and run the backbone on one image."""
    tensor = torch.from_numpy(image.copy()).permute(2, 0, 1) / 255
    with torch.no_grad():
        outs = backbone(normalized(tensor)[None])
    return {stride: out[0] for stride, out in zip(backbone.out_strides, outs, strict=True)}


def normalized(image):
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (IMAGENET_MEAN, IMAGENET_STD))
    return (image - mean) / std


def assert_same(pyramid, expected, tolerance=1e-5):
    assert list(pyramid) == list(expected)
    for stride, level in expected.items():
        assert_near(pyramid[stride], level, tolerance)


def relative_error(one, other):
    return ((one - other).norm() / other.norm()).item()


def test_one_image_is_one_mapping(backbone):
    pyramid = extract_pyramid(backbone, PHOTOGRAPH)
    assert isinstance(pyramid, Pyramid)
    assert pyramid.image_size == (97, 131)
    assert pyramid[4].shape == (16, 25, 33)
    assert pyramid[8].shape == (32, 13, 17)
    assert pyramid[16].shape == (64, 7, 9)
    assert pyramid[32].shape == (128, 4, 5)
    assert_same(pyramid, alone(backbone, PHOTOGRAPH))


@settings(max_examples=12)
@given(st.data())
def test_features_do_not_depend_on_the_batch(backbone, data):
    sides, offsets = st.sampled_from([1, 3, 28, 33, 56, 61]), st.integers(0, 36)
    boxes = data.draw(st.lists(st.tuples(offsets, sides, sides), min_size=1, max_size=7))
    images = [PHOTOGRAPH[at : at + height, at : at + width] for at, height, width in boxes]
    pyramids = extract_pyramid(backbone, images, batch_size=data.draw(st.integers(1, 4)))
    for image, pyramid in zip(images, pyramids, strict=True):
        assert pyramid.image_size == image.shape[:2]
        assert_same(pyramid, alone(backbone, image))


def test_containers_of_several_images(backbone):
    parts = [PHOTOGRAPH[:32, :32], PHOTOGRAPH[32:64, 32:64]]
    batch = torch.from_numpy(np.stack(parts)).permute(0, 3, 1, 2)
    expected = [alone(backbone, part) for part in parts]
    for images in (batch, list(batch), tuple(batch), iter(batch)):
        pyramids = extract_pyramid(backbone, images)
        assert len(pyramids) == 2
        for pyramid, maps in zip(pyramids, expected, strict=True):
            assert_same(pyramid, maps)
    assert extract_pyramid(backbone, []) == []
    assert len(extract_pyramid(backbone, batch[:1])) == 1


def test_levels_mean_and_bgr(backbone):
    assert list(extract_pyramid(backbone, PHOTOGRAPH, levels=(32, 8))) == [8, 32]
    assert_same(extract_pyramid(backbone, PHOTOGRAPH[:, :, ::-1], bgr=True), alone(backbone, PHOTOGRAPH))
    normalised = (PHOTOGRAPH / 255 - IMAGENET_MEAN) / IMAGENET_STD
    assert_same(extract_pyramid(backbone, normalised, mean=None, std=None), alone(backbone, PHOTOGRAPH))
    with pytest.raises(ValueError, match=r'levels must be one of .*, got 5'):
        extract_pyramid(backbone, PHOTOGRAPH, levels=[5])


def test_maps_are_ordinary_tensors_with_separate_storage(backbone):
    first, second = extract_pyramid(backbone, [PHOTOGRAPH[:32, :32], PHOTOGRAPH[32:64, :32]])
    level = first[32]
    assert not level.requires_grad
    assert level.untyped_storage().nbytes() == level.nbytes
    head = torch.nn.Linear(128, 2)
    head(level.mean((1, 2))).sum().backward()  # fails on an inference tensor
    assert head.weight.grad is not None
    before = second[4].clone()
    first[4].zero_()
    assert torch.equal(second[4], before)


def test_gradients_reach_every_parameter_and_the_image(backbone):
    image = torch.rand(3, 61, 45, requires_grad=True)
    pyramid = extract_pyramid(backbone, image, gradients=True)
    inputs = [image, *backbone.parameters()]
    found = torch.autograd.grad(loss_of(pyramid.values()), inputs)
    expected = torch.autograd.grad(loss_of(backbone(normalized(image)[None])), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def loss_of(maps):
    return sum(level.square().mean() for level in maps)


def test_without_gradients_an_image_that_requires_them_is_like_any_other(backbone):
    grey = torch.rand(1, 61, 45)
    for options in {}, {'max_side': 30}:
        pyramid = extract_pyramid(backbone, grey.clone().requires_grad_(), **options)
        assert_same(pyramid, extract_pyramid(backbone, grey, **options))


def test_dtype_and_autocast(backbone):
    expected = alone(backbone, PHOTOGRAPH)
    half = extract_pyramid(backbone, PHOTOGRAPH, dtype=torch.float16)
    for stride, level in half.items():
        assert torch.equal(level, extract_pyramid(backbone, PHOTOGRAPH)[stride].half())
    mixed = extract_pyramid(backbone, PHOTOGRAPH, autocast=torch.bfloat16, dtype=torch.float32)
    for stride, level in mixed.items():
        assert 0 < relative_error(level, expected[stride]) < 0.1  # close to float32, but not equal
    double = extract_pyramid(randomize(SwinBackbone(**TINY)).double(), PHOTOGRAPH)
    assert double[4].dtype == torch.float64


@pytest.mark.parametrize('dtype', ['float16', torch.float16, np.float16, np.dtype('float16')])
def test_dtype_as_text_or_object(backbone, dtype):
    assert extract_pyramid(backbone, PHOTOGRAPH[:32, :32], dtype=dtype)[32].dtype == torch.float16


@pytest.mark.parametrize('options', [{'dtype': torch.int8}, {'dtype': 'half'}, {'autocast': 'float32'}, {'dtype': 16}])
def test_unsupported_dtypes_are_refused(backbone, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be one of .*'bfloat16'"):
        extract_pyramid(backbone, PHOTOGRAPH, **options)


def test_wrapped_for_data_parallelism(backbone, tmp_path):
    expected = alone(backbone, PHOTOGRAPH)
    assert_same(extract_pyramid(torch.nn.DataParallel(backbone), PHOTOGRAPH), expected)
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/meeting', rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(backbone)
        assert_same(extract_pyramid(parallel, PHOTOGRAPH), expected)
        tiled = extract_pyramid(parallel, PHOTOGRAPH, tile=224)
    finally:
        torch.distributed.destroy_process_group()
    assert_same(tiled, expected)
    with pytest.raises(TypeError, match=r'backbone must be .*, got Linear'):
        extract_pyramid(torch.nn.Linear(1, 1), PHOTOGRAPH)


def test_an_open_file_is_one_image(backbone, tmp_path):
    Image.fromarray(PHOTOGRAPH).save(tmp_path / 'image.png')
    with (tmp_path / 'image.png').open('rb') as file:
        assert_same(extract_pyramid(backbone, file), alone(backbone, PHOTOGRAPH))
    with (tmp_path / 'image.png').open('rb') as file:
        assert_same(extract_pyramid(backbone, file, tile=224), alone(backbone, PHOTOGRAPH))


def test_images_of_equal_size_and_different_types(backbone):
    deep = PHOTOGRAPH.astype(np.uint16) * 257
    pyramids = extract_pyramid(backbone, [PHOTOGRAPH, deep, PHOTOGRAPH / 255, deep])
    for pyramid in pyramids:
        assert_same(pyramid, alone(backbone, PHOTOGRAPH))


@pytest.mark.parametrize('image', [PHOTOGRAPH, PHOTOGRAPH.astype(np.uint16) * 257, PHOTOGRAPH / 255])
def test_max_side_shrinks_larger_images(backbone, image):
    pyramid = extract_pyramid(backbone, image, max_side=66)
    assert pyramid.image_size == (round(97 * 66 / 131), 66)
    small = np.array(Image.fromarray(PHOTOGRAPH).resize((66, 49), Image.Resampling.BILINEAR))
    expected = alone(backbone, small)
    for stride, level in pyramid.items():
        assert relative_error(level, expected[stride]) < 0.02
    assert_same(extract_pyramid(backbone, image, max_side=131), alone(backbone, PHOTOGRAPH))
    assert extract_pyramid(backbone, image, max_side=1).image_size == (1, 1)
    with pytest.raises(ValueError, match='leave tile= out'):
        extract_pyramid(backbone, image, max_side=66, tile=224)


def test_page(backbone, tmp_path):
    frames = [Image.fromarray(PHOTOGRAPH[i : 40 + i, :32]) for i in range(2)]
    frames[0].save(tmp_path / 'pages.tif', save_all=True, append_images=frames[1:])
    for options in ({}, {'tile': 224}):
        pyramid = extract_pyramid(backbone, tmp_path / 'pages.tif', page=1, **options)
        assert_same(pyramid, alone(backbone, np.array(frames[1])))


@pytest.mark.parametrize(('value', 'message'), [(255.0, 'between 0 and 1'), (float('nan'), 'NaN')])
def test_images_with_gradients_are_checked_for_range(backbone, value, message):
    image = torch.rand(3, 40, 40)
    image[1, 2, 3] = value
    with pytest.raises(ValueError, match=message):
        extract_pyramid(backbone, image.requires_grad_(), gradients=True)


def test_training_mode_is_disabled_and_restored():
    backbone = randomize(SwinBackbone(**TINY, drop_path_rate=0.9, frozen_stages=1)).train()
    modes = [module.training for module in backbone.modules()]
    assert any(modes)
    assert not all(modes)
    first = extract_pyramid(backbone, PHOTOGRAPH)
    assert [module.training for module in backbone.modules()] == modes
    assert torch.equal(first[32], extract_pyramid(backbone, PHOTOGRAPH)[32])
    with pytest.raises(ValueError, match='channels'):
        extract_pyramid(backbone, np.zeros((4, 4, 5), np.uint8))
    assert [module.training for module in backbone.modules()] == modes


def test_threads():
    backbone = tiny(drop_path_rate=0.9)
    images = [PHOTOGRAPH[i : i + 30 + i, i : i + 45] for i in range(12)]
    expected = [extract_pyramid(backbone, image) for image in images]
    found = {}

    def work(offset):
        for index in range(offset, len(images), 4):
            found[index] = extract_pyramid(backbone, images[index])

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, pyramid in enumerate(expected):
        assert_same(found[index], dict(pyramid))


def test_compiled():
    backbone = randomize(SwinBackbone(embed_dims=16, depths=(2,), num_heads=(2,))).eval()
    compiled = torch.compile(backbone, backend='eager')
    images = [PHOTOGRAPH[:32, :40], PHOTOGRAPH[32:64, :40]]
    for image, pyramid in zip(images, extract_pyramid(compiled, images), strict=True):
        assert_same(pyramid, alone(backbone, image))


def test_a_pyramid_names_its_strides(backbone):
    pyramid = extract_pyramid(backbone, PHOTOGRAPH)
    with pytest.raises(KeyError, match='the strides are'):
        pyramid[5]
    assert '4: (16, 25, 33)' in repr(pyramid)


def test_maps_of_equal_stride_are_refused():
    backbone = SwinBackbone(**TINY, strides=(4, 2, 2, 1))
    with pytest.raises(ValueError, match='2 of the maps have stride 16'):
        extract_pyramid(backbone, PHOTOGRAPH)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'overlap': 224}, 'need tile='),
        ({'out': 'x'}, 'need tile='),
        ({'tile': 224, 'gradients': True}, 'gradients=True'),
        ({'batch_size': 0}, 'batch_size must be at least 1'),
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


def test_an_unavailable_device():
    with pytest.raises(ValueError, match=r'device=.* cannot be used'):
        extract_pyramid(SwinBackbone(**TINY), torch.rand(3, 32, 32), device='cuda:4096')


@pytest.mark.parametrize('device', [0.5, torch.float64])
def test_an_invalid_device_does_not_change_the_dtype_of_the_backbone(backbone, device):
    with pytest.raises(TypeError):
        extract_pyramid(backbone, PHOTOGRAPH, device=device)
    assert next(backbone.parameters()).dtype == torch.float32
