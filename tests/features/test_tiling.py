"""Tiles with enough overlap give the features of the whole image; receptive fields tell how much is enough."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_dense import SwinBackbone
from swin_dense.explore.receptive_field import token_receptive_fields
from swin_dense.features.pyramid import extract_pyramid
from swin_dense.features.tiling import exact_overlap, tile_alignment
from swin_dense.images.tiles import plan_tiles
from tests.conftest import assert_near, randomize, small_disk
from tests.features.helpers import in_a_process, tree

# Two stages with small windows: an alignment of 24 pixels, and little computation.
SMALL = {
    'embed_dims': 8,
    'depths': (2, 3),
    'num_heads': (1, 2),
    'window_size': 3,
}


def noise(height, width, seed=0):
    return np.random.default_rng(seed).random((height, width, 3))


@pytest.fixture(scope='module')
def small():
    return randomize(SwinBackbone(**SMALL)).double().eval()


def test_default_overlap_of_published_sizes():
    levels = (4, 8, 16, 32)
    with torch.device('meta'):
        tiny = SwinBackbone('t')
        assert tile_alignment(tiny) == (224, 224)
        assert tile_alignment(SwinBackbone('b', window_size=12)) == (384, 384)
        assert exact_overlap(tiny, (4,)) == (224, 224)
        assert exact_overlap(tiny, levels) == (672, 672)
        assert exact_overlap(SwinBackbone('l'), levels) == (1344, 1344)
        assert exact_overlap(SwinBackbone('t', use_shift=False), levels) == (0, 0)


@settings(max_examples=10)
@given(
    st.integers(1, 110),
    st.integers(1, 60),
    st.sampled_from([24, 48, (24, 72)]),
    st.sampled_from([None, (4,), (8,)]),
)
def test_tiles_are_exact_with_the_default_overlap(small, height, width, tile, levels):
    image = noise(height, width, seed=height * 131 + width)
    whole = extract_pyramid(small, image, levels=levels)
    tiled = extract_pyramid(small, image, levels=levels, tile=tile)
    assert tiled.image_size == whole.image_size
    for stride, level in whole.items():
        assert_near(tiled[stride], level, 1e-12)


def test_a_window_per_stage():
    backbone = randomize(SwinBackbone(**{**SMALL, 'window_size': [(2, 3), (3, 4)]})).double().eval()
    assert tile_alignment(backbone) == (24, 96)
    assert exact_overlap(backbone, (4, 8)) == (48, 96)
    image = noise(130, 300)
    whole = extract_pyramid(backbone, image)
    tiled = extract_pyramid(backbone, image, tile=(24, 96))
    for stride, level in whole.items():
        assert_near(tiled[stride], level, 1e-12)


@pytest.mark.parametrize('strides', [(4, 1), (4, 3), (4, 4)], ids=str)
def test_tiles_are_exact_behind_a_merging_of_any_stride(strides):
    options = {**SMALL, 'depths': (2, 2), 'window_size': 2, 'strides': strides, 'out_indices': (1,)}
    backbone = randomize(SwinBackbone(**options)).double().eval()
    image = noise(166, 185)
    whole = extract_pyramid(backbone, image)
    tiled = extract_pyramid(backbone, image, tile=tile_alignment(backbone))
    for stride, level in whole.items():
        assert_near(tiled[stride], level, 1e-12)


@pytest.mark.parametrize(
    'options',
    [
        SMALL,
        {**SMALL, 'window_size': 4},
        {**SMALL, 'depths': (1, 2)},
        {**SMALL, 'depths': (4, 4)},
        {**SMALL, 'patch_size': 2, 'strides': (2, 3)},
        {**SMALL, 'depths': (2, 2), 'window_size': 2, 'strides': (4, 3)},
        {**SMALL, 'depths': (2, 2), 'window_size': 2, 'strides': (4, 4)},
        {**SMALL, 'strides': (4, 1), 'out_indices': (1,)},
        {**SMALL, 'depths': (1, 2), 'strides': (4, 1), 'out_indices': (1,)},
        {**SMALL, 'window_size': (3, 5)},
        {**SMALL, 'use_shift': False},
    ],
    ids=str,
)
def test_the_default_overlap_is_the_reach_of_tokens_beside_a_cut(options):
    """The furthest token whose receptive field crosses a cut between tiles sets the overlap."""
    backbone = SwinBackbone(**options)
    alignment, overlaps = tile_alignment(backbone), exact_overlap(backbone, backbone.out_strides)
    fields = token_receptive_fields(backbone, [16 * period for period in alignment])
    for axis, period in enumerate(alignment):
        cut, reach = 8 * period, 0
        for stage, stride in zip(backbone.out_indices, backbone.out_strides, strict=True):
            last = fields[stage][-1]
            first_seen, end_seen = (last.rows, last.columns)[axis].unbind(1)
            starts = torch.arange(len(first_seen)) * stride
            before = cut - starts[(starts < cut) & (end_seen > cut)]
            behind = starts[(starts >= cut) & (first_seen < cut)] + stride - cut
            reach = max(
                [
                    reach,
                    *before.tolist(),
                    *behind.tolist(),
                ]
            )
        assert overlaps[axis] == -(-reach // period) * period


SIDES = st.integers(1, 300)


@given(
    SIDES,
    SIDES,
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_the_plan_covers_the_image_once(height, width, tile, overlap):
    covered = np.zeros((height, width), int)
    for part in plan_tiles((height, width), (24 * tile, 48 * tile), (24 * overlap, 0)):
        top, left, bottom, right = part.kept
        covered[top:bottom, left:right] += 1
        assert part.read[0] == max(top - 24 * overlap, 0)
        assert part.read[2] == min(bottom + 24 * overlap, height)
        assert part.read[1::2] == (left, right)
    assert (covered == 1).all()


def test_only_regions_are_read(small):
    class Recorder:
        shape = (150, 130, 3)
        largest = 0

        def __getitem__(self, region):
            height, width = (part.stop - part.start for part in region)
            self.largest = max(self.largest, height * width)
            return noise(height, width)

    recorder = Recorder()
    pyramid = extract_pyramid(small, recorder, tile=48, overlap=24)
    assert pyramid.image_size == (150, 130)
    assert recorder.largest == 96 * 96


@pytest.mark.parametrize('dtype', [torch.float16, torch.float64])
def test_written_to_memory_mapped_files_which_a_failure_leaves_unchanged(small, tmp_path, dtype):
    image, out = noise(77, 101), tmp_path / 'new' / 'folder'
    expected = extract_pyramid(small, image, tile=72, dtype=dtype)
    pyramid = extract_pyramid(small, image, tile=72, dtype=dtype, out=out)
    for stride, level in expected.items():
        assert torch.equal(pyramid[stride], level)
        assert np.array_equal(np.load(out / f'stride_{stride}.npy'), level.numpy())
    before = tree(out)
    image[70, 10] = np.nan
    with pytest.raises(ValueError, match='NaN'):
        extract_pyramid(small, image, tile=72, dtype=dtype, out=out)
    assert tree(out) == before


@pytest.mark.parametrize('is_in_files', [False, True])
def test_maps_stay_where_they_are_on_another_default_device(small, tmp_path, is_in_files):
    image, out = noise(77, 101), tmp_path if is_in_files else None
    expected = extract_pyramid(small, image, tile=72)
    with torch.device('meta'):
        pyramid = extract_pyramid(small, image, tile=72, out=out)
    for stride, level in expected.items():
        assert torch.equal(pyramid[stride], level)


def test_a_full_disk_raises_and_keeps_the_previous_maps(small, tmp_path):
    """If the space were not reserved, writing to a mapped page would kill the process with SIGBUS."""
    images = noise(48, 240), noise(480, 240)

    def fill_the_disk():
        extract_pyramid(small, images[0], tile=48, out=tmp_path)
        before = tree(tmp_path)
        with pytest.raises(OSError, match='No space left'):
            extract_pyramid(small, images[1], tile=48, out=tmp_path)
        return tree(tmp_path) != before

    with small_disk(tmp_path, '200k'):
        assert in_a_process(fill_the_disk) == 0


def test_a_pyramid_stays_valid_when_its_folder_is_reused(small, tmp_path):
    large, little = noise(480, 480), noise(24, 24)

    def reuse():
        first = extract_pyramid(small, large, tile=48, out=tmp_path)
        before = {stride: level.clone() for stride, level in first.items()}
        second = extract_pyramid(
            small,
            little,
            tile=48,
            out=tmp_path,
            levels=[8],
        )
        assert [path.name for path in tmp_path.iterdir()] == ['stride_8.npy']
        assert np.array_equal(np.load(tmp_path / 'stride_8.npy'), second[8].numpy())
        return not all(torch.equal(first[stride], level) for stride, level in before.items())

    assert in_a_process(reuse) == 0


BLACK = np.zeros((30, 30, 3), np.float32)


@pytest.mark.parametrize(
    ('image', 'options', 'message'),
    [
        ([BLACK], {}, 'maps of one image'),
        (BLACK, {'dtype': torch.bfloat16}, 'give dtype='),
        (BLACK, {'autocast': torch.bfloat16}, 'give dtype='),
    ],
)
def test_files_hold_the_maps_of_one_image_in_a_type_of_numpy(tmp_path, image, options, message):
    with pytest.raises(ValueError, match=message):
        extract_pyramid(
            SwinBackbone(**SMALL),
            image,
            tile=24,
            out=tmp_path / 'maps',
            **options,
        )
    assert not (tmp_path / 'maps').exists()


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'tile': 50}, 'tile must .* got 50; use 48 or 72'),
        ({'tile': 10}, 'use 24$'),
        ({'tile': 0}, 'at least 1'),
        ({'tile': 24, 'overlap': 12}, 'overlap must be a multiple of 24'),
        ({'tile': 24, 'overlap': -24}, 'at least 0'),
    ],
)
def test_invalid_tile_and_overlap(small, options, message):
    with pytest.raises(ValueError, match=message):
        extract_pyramid(small, BLACK, **options)
    with pytest.raises(ValueError, match='use_abs_pos_embed'):
        extract_pyramid(SwinBackbone(**SMALL, use_abs_pos_embed=True), BLACK, tile=24)
    with pytest.raises(ValueError, match='clamp_window'):
        extract_pyramid(SwinBackbone(**SMALL, clamp_window=True), BLACK, tile=24)
