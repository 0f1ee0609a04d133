"""OME-Zarr: ome_zarr_models validates the written files, and images of other writers are read plane by plane."""

import numpy as np
import pytest
from PIL import Image

from swin_dense.features.regions import open_large_image
from swin_dense.utils.pixels import ImageError
from tests.conftest import IfInstalled, photograph
from tests.features.helpers import command_line, rows_of

pytest.importorskip('ome_zarr_models')
zarr, v2_arrays, v3_arrays = IfInstalled('zarr'), IfInstalled('pydantic_zarr.v2'), IfInstalled('pydantic_zarr.v3')
v04, v05 = IfInstalled('ome_zarr_models.v04'), IfInstalled('ome_zarr_models.v05')
axes04, axes05 = IfInstalled('ome_zarr_models.v04.axes'), IfInstalled('ome_zarr_models.v05.axes')

PIXELS = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 37, 50), dtype=np.uint8)  # t, c, z, y, x
TYPES = {'t': 'time', 'c': 'channel', 'z': 'space', 'y': 'space', 'x': 'space'}


def write_image(path, version, axes='tczyx'):
    """Write an image of two levels with the given axes; of any other axis of PIXELS it takes index 0."""
    pixels = PIXELS[tuple(slice(None) if axis in axes else 0 for axis in 'tczyx')]
    image, axis, arrays = (v04, axes04, v2_arrays) if version == '0.4' else (v05, axes05, v3_arrays)
    names = {} if version == '0.4' else {'dimension_names': tuple(axes)}
    levels = [pixels, pixels[..., ::2, ::2]]
    described = image.Image.new(
        array_specs=[arrays.ArraySpec.from_array(level, **names) for level in levels],
        paths=['full', 'half'],
        axes=[axis.Axis(name=name, type=TYPES[name]) for name in axes],
        scales=[[1.0] * len(axes), [1.0] * (len(axes) - 2) + [2.0, 2.0]],
        translations=[None, None],
    )
    described.to_zarr(zarr.storage.LocalStore(path), path='')
    for name, level in zip(('full', 'half'), levels, strict=True):
        zarr.open_array(path / name, mode='r+')[...] = level
    return path


def centres_are_right(image, name, stride):
    """Return whether the metadata place each cell at the mean position of the pixels that it covers."""
    dataset = next(dataset for dataset in image.datasets[0] if dataset.path == name)
    scale, translation = dataset.coordinateTransformations
    pixels = np.arange(10 * stride).reshape(10, stride).mean(1)
    return all(
        np.array_equal(np.arange(10) * scale.scale[axis] + translation.translation[axis], pixels) for axis in (1, 2)
    )


@pytest.mark.parametrize('options', [[], ['--tile', '224', '--overlap', '0'], ['--levels', '8', '32']])
def test_features_are_a_valid_ome_zarr_image(tmp_path, monkeypatch, options):
    path = tmp_path / 'photo.png'
    Image.fromarray(photograph(230, 250)).save(path)
    run, _ = command_line(monkeypatch, tmp_path / 'out')
    assert run(path, '--format', 'zarr', *options) == 0
    group = zarr.open_group(tmp_path / 'out' / rows_of(tmp_path / 'out')[str(path)]['file'], mode='r')
    image = v05.Image.from_zarr(group)
    strides = [8, 32] if '--levels' in options else [4, 8, 16, 32]
    assert [dataset.path for dataset in image.datasets[0]] == list(map(str, strides))
    assert [axis.type for axis in image.ome_attributes.multiscales[0].axes] == ['channel', 'space', 'space']
    for stride in strides:
        assert group[str(stride)].shape[1:] == (-(-230 // stride), -(-250 // stride))
        assert group[str(stride)].metadata.dimension_names == ('c', 'y', 'x')
        assert centres_are_right(image, str(stride), stride)


@pytest.mark.parametrize('version', ['0.4', '0.5'])
@pytest.mark.parametrize('axes', ['yx', 'cyx', 'zyx', 'czyx', 'tczyx'])
def test_every_plane_with_any_axes(tmp_path, axes, version):
    path = write_image(tmp_path / 'x.zarr', version, axes)
    times, depths = (2 if 't' in axes else 1), (4 if 'z' in axes else 1)
    for page in range(times * depths):
        plane = PIXELS[page // depths, :, page % depths] if 'c' in axes else PIXELS[0, 0, page % depths]
        expected = np.moveaxis(plane, 0, 2) if 'c' in axes else plane
        with open_large_image(path, page=page) as image:
            assert image.size == (37, 50)
            assert np.array_equal(image.read(0, 0, 37, 50), expected)
            assert np.array_equal(image.read(3, 20, 30, 50), expected[3:30, 20:])
    with pytest.raises(ImageError, match=f'has {times * depths} pages'), open_large_image(path, page=times * depths):
        pass


def test_a_region_reads_only_its_chunks(tmp_path):
    path = write_image(tmp_path / 'x.zarr', '0.5', 'cyx')
    large = zarr.create_array(path / 'full', shape=(3, 64, 64), chunks=(3, 32, 32), dtype='uint8', overwrite=True)
    large[:] = 7
    (path / 'full' / 'c' / '0' / '1' / '1').write_bytes(b'damaged')
    with open_large_image(path) as image:
        assert (image.read(0, 0, 32, 64) == 7).all()
        with pytest.raises(ImageError, match=r'x\.zarr'):
            image.read(0, 0, 33, 64)


def test_layout_of_bioformats2raw(tmp_path):
    zarr.create_group(tmp_path / 'x.zarr', zarr_format=2, attributes={'bioformats2raw.layout': 3})
    write_image(tmp_path / 'x.zarr' / '0', '0.4')
    with open_large_image(tmp_path / 'x.zarr', page=5) as image:
        assert np.array_equal(image.read(0, 0, 37, 50), np.moveaxis(PIXELS[1, :, 1], 0, 2))


@pytest.mark.parametrize(
    ('attributes', 'message'),
    [
        ({}, 'without an OME-Zarr image'),
        ({'multiscales': [{'datasets': [{'path': 'missing'}]}]}, 'missing'),
        ({'multiscales': 3}, 'damaged'),
        ({'multiscales': [{'axes': ['x', 'y'], 'datasets': [{'path': 'a'}]}]}, 'the axes xy'),
        ({'multiscales': [{'axes': ['c', 'y', 'x'], 'datasets': [{'path': 'a'}]}]}, r'the axes cyx .* \(4, 5\)'),
        ({'bioformats2raw.layout': 3}, r'x\.zarr'),
    ],
)
def test_groups_without_an_image(tmp_path, attributes, message):
    group = zarr.create_group(tmp_path / 'x.zarr', attributes=attributes)
    group.create_array('a', data=np.zeros((4, 5), np.uint8))
    zarr.create_array(tmp_path / 'x', data=np.zeros((4, 5), np.uint8))
    with pytest.raises(ImageError, match=message), open_large_image(tmp_path / 'x.zarr'):
        pass
