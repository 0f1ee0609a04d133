"""Images of any bands: chosen, scaled and normalised in every way of reading, in the commands and in exported files."""

import logging
import pickle

import numpy as np
import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone, create_backbone, export_state_dict, extract_pyramid
from swin_dense.commands._main import main
from swin_dense.export import export_model
from swin_dense.features import Extractor, Normalization, preset
from swin_dense.images.pixels import Pixels
from swin_dense.images.presets import IMAGENET_MEAN, IMAGENET_STD
from tests.checkpoint.helpers import prefixed
from tests.conftest import TINY, IfInstalled, assert_near, needs, photograph, randomize, tiny
from tests.features.helpers import close, load, maps_of
from tests.images.mutations import counts

onnxruntime, tifffile = IfInstalled('onnxruntime'), IfInstalled('tifffile')
ONE_BLOCK = {
    'embed_dims': 16,
    'depths': (1,),
    'num_heads': (1,),
    'strides': (4,),
}

BANDS, SCALE = (4, 0, 2, 1), (8160.0, 255.0, 10000.0, 3000.0)
MEAN, STD = (0.1, 0.2, 0.3, 0.4), (0.5, 0.6, 0.7, 0.8)
OPTIONS = {'mean': MEAN, 'std': STD, 'scale': SCALE, 'bands': BANDS}
HOW = Normalization(**OPTIONS)
ARGUMENTS = [part for name, values in OPTIONS.items() for part in (f'--{name}', *map(str, values))]

COUNTS = counts(61, 93, 5)


def tensor_of(pixels):
    """Return an array (H, W, C) as a float32 tensor (C, H, W)."""
    return torch.from_numpy(pixels.transpose(2, 0, 1)).float()


def expected_maps(backbone, values=COUNTS):
    chosen = values[:, :, BANDS].astype(np.float64)
    return maps_of(backbone, tensor_of((chosen / SCALE - MEAN) / STD))


@pytest.fixture
def backbone():
    return tiny(in_channels=4)


@pytest.fixture
def weights(backbone, tmp_path):
    torch.save(backbone.state_dict(), tmp_path / 'weights.pth')
    return str(tmp_path / 'weights.pth')


@pytest.fixture
def image(tmp_path):
    path = tmp_path / 'scene.tif'
    tifffile.imwrite(path, COUNTS, photometric='minisblack', planarconfig='contig')
    return path


def test_arrays_tensors_and_files(backbone, image):
    maps = expected_maps(backbone)
    tensor = tensor_of(COUNTS.astype(np.int32))
    for source in (COUNTS, tensor, COUNTS.astype(np.int32), image):
        close(extract_pyramid(backbone, source, normalization=HOW), maps, 1e-4)
    close(extract_pyramid(backbone, tensor.requires_grad_(), normalization=HOW, gradients=True), maps, 1e-4)


@needs('zarr')
def test_tiles_of_a_file(backbone, tmp_path):
    values = counts(450, 230, 5)
    path = tmp_path / 'scene.tif'
    tifffile.imwrite(
        path,
        values,
        photometric='minisblack',
        planarconfig='contig',
        tile=(64, 64),
    )
    pyramid = extract_pyramid(backbone, path, normalization=HOW, tile=224)
    close(pyramid, expected_maps(backbone, values), 1e-4)


def test_max_side_and_clamp(backbone):
    values = np.full((60, 90, 5), 30000, np.uint16)
    how = Normalization(mean=None, std=None, scale=8160, bands=BANDS, clamp=True)
    pyramid = extract_pyramid(backbone, values, normalization=how, max_side=45)
    close(pyramid, maps_of(backbone, torch.ones(4, 30, 45)))


def test_an_extractor(backbone, image, weights):
    extract = pickle.loads(pickle.dumps(Extractor(weights, device='cpu', normalization=HOW)))
    rows = extract({'path': [str(image)]})
    assert rows['error'][0] == ''
    for stride, level in expected_maps(backbone).items():
        assert_near(
            torch.from_numpy(rows[f'level_{stride}'][0]),
            level.mean((1, 2)),
            1e-3,
        )


@needs('pyarrow')
@needs('safetensors')
def test_the_command_features(backbone, image, weights, tmp_path, capsys):
    given = ['features', str(image), '--checkpoint', weights, '--device', 'cpu', '--out']
    out = tmp_path / 'out'
    assert main([*given, str(out), *ARGUMENTS]) == 0
    (file,) = out.rglob('*.safetensors')
    maps, _ = load(file)
    close(dict(sorted(maps.items())), expected_maps(backbone), 1e-4)
    assert main([*given, str(out), *ARGUMENTS, '--clamp']) == 2  # other features in one folder
    assert main([*given, str(tmp_path / 'other')]) == 2
    printed = capsys.readouterr().err
    assert "the backbone takes 4 channels, but ImageNet's mean and std are for 3; give normalization=" in printed


def test_the_command_explore(image, weights, tmp_path):
    out = tmp_path / 'page.html'
    assert main(['explore', str(image), '--checkpoint', weights, '--out', str(out), *ARGUMENTS]) == 0
    assert out.stat().st_size > 1000


@pytest.mark.parametrize(
    ('arguments', 'options'),
    [
        (['--scale', '200'], {'scale': 200}),
        (['--mean', '0.5', '--std', '0.2'], {'mean': 0.5, 'std': 0.2}),
        (['--bands', '2', '1', '0'], {'bands': (2, 1, 0)}),
        (['--normalization', 'satlas-rgb'], preset('satlas-rgb')),
    ],
)
def test_the_options_of_export_mean_what_they_mean_in_features(tmp_path, capsys, arguments, options):
    """The file takes what the image file stores, and gives what `features` gives."""
    backbone = randomize(SwinBackbone(**ONE_BLOCK)).eval()
    weights, out = tmp_path / 'weights.pth', tmp_path / 'model.ts'
    torch.save(backbone.state_dict(), weights)
    given = ['export', str(weights), '--out', str(out), '--no-check', '--size', '32']
    assert main([*given, *arguments]) == 0
    pixels = photograph(40, 48)
    (found,) = torch.jit.load(out)(tensor_of(pixels)[None])
    assert_near(
        found[0],
        extract_pyramid(backbone, pixels, normalization=Normalization(**options))[4],
        1e-3,
    )


@needs('onnx')
@needs('onnxscript')
def test_an_exported_file_takes_stored_values(tmp_path):
    backbone = randomize(SwinBackbone(**ONE_BLOCK, in_channels=4)).eval()
    session = onnxruntime.InferenceSession
    export_model(backbone, tmp_path / 'model.onnx', normalization=HOW)
    img = tensor_of(COUNTS.astype(np.int32))[None].numpy()
    model = session(tmp_path / 'model.onnx', providers=['CPUExecutionProvider'])
    (out,) = model.run(None, {'img': img})
    close(
        {4: torch.from_numpy(out[0])},
        expected_maps(backbone),
        2e-3,
    )


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'scale': 0}, 'scale must be above 0'),
        ({'scale': (1, 2)}, 'scale must be .* per channel, that is 4'),
        ({'bands': (0, 1)}, r'bands must be one per .*, got \(0, 1\)'),
        ({'bands': (0, 1, 2, 5)}, 'no band 5; it has 5, counted from 0'),
        ({'bands': (0, 1, 2, -1)}, 'every entry of bands must be at least 0'),
        ({'mean': 1500, 'std': 800}, 'mean and std must be on the scale 0 to 1'),
        ({'mean': IMAGENET_MEAN, 'std': IMAGENET_STD}, "takes 4 channels, but ImageNet's mean"),
    ],
)
def test_wrong_numbers_are_refused(backbone, options, message):
    with pytest.raises(ValueError, match=message):
        extract_pyramid(backbone, COUNTS, normalization=Normalization(**{'mean': 0, 'std': 1, **options}))
    with pytest.raises(ValueError, match=r'cut off .*; give mean= and std='):
        Normalization(clamp=True, scale=255)
    with pytest.raises(ValueError, match='bgr= and bands= both choose an order'):
        extract_pyramid(backbone, COUNTS, normalization=HOW, bgr=True)


def test_statistics_of_counts_need_a_scale_of_1(backbone):
    mean, std = (1500, 1, 2, 3000), (800, 3, 4, 900)
    found = extract_pyramid(backbone, COUNTS, normalization=Normalization(mean, std, scale=1, bands=BANDS))
    normalised = (COUNTS[:, :, BANDS] - np.array(mean)) / std
    close(found, maps_of(backbone, tensor_of(normalised)), 1e-4)


# Formulas of https://github.com/allenai/satlas Normalization.md and of torchgeo's transforms.
SENTINEL2 = np.array([255] * 3 + [8160] * 6)
SATLAS = {
    'satlas-rgb': (3, lambda x: x / 255),
    'satlas-sentinel1': (2, lambda x: np.clip(x / 255, 0, 1)),
    'satlas-sentinel2-ms': (9, lambda x: np.clip(x / SENTINEL2, 0, 1)),
    'satlas-landsat': (11, lambda x: np.clip((x - 4000) / 16320, 0, 1)),
}


@pytest.mark.parametrize('name', SATLAS)
def test_presets(name):
    channels, formula = SATLAS[name]
    most = 256 if name == 'satlas-rgb' else 30000
    values = counts(6, 7, channels, most=most)
    how = Normalization(**preset(name))
    img = how.prepare(how.stored(Pixels(values), channels))
    expected = formula(values.astype(float)).transpose(2, 0, 1)
    np.testing.assert_allclose(img, expected, atol=1e-6)


class TestPublishedWeights:
    """Weights say by their file's name, or by the names in it, how their images are normalised."""

    @pytest.fixture
    def made(self, tmp_path, caplog):
        """Return a function that makes the backbone of a file of torchvision's Swin V2."""
        caplog.set_level(logging.INFO)

        def make(name, channels, prefix=''):
            options = {**TINY, 'in_channels': channels, 'window_size': 4, 'pretrained_window_size': 4}
            state = export_state_dict(randomize(SwinV2Backbone(**options)), 'torchvision')
            torch.save(prefixed(prefix, state), tmp_path / name)
            return create_backbone(None, tmp_path / name, num_heads=TINY['num_heads'])

        return make

    @pytest.mark.parametrize(
        ('name', 'channels', 'prefix', 'expected'),
        [
            ('sentinel2_swint_mi_ms-of_torchgeo.pth', 9, '', 'satlas-sentinel2-ms'),
            ('landsat_swinb_si-copy.pth', 11, '', 'satlas-landsat'),
            ('sentinel1_swinb_si.pth', 2, 'backbone.backbone.', 'satlas-sentinel1'),
        ],
    )
    def test_theirs_is_the_default(self, made, caplog, name, channels, prefix, expected):
        backbone = made(name, channels, prefix)
        assert backbone.input_preset == expected
        assert f"normalization='{expected}'" in caplog.text
        caplog.clear()
        values = counts(32, 32, channels)
        found = extract_pyramid(backbone, values)
        img = SATLAS[expected][1](values.astype(float))
        close(found, maps_of(backbone, tensor_of(img)), 1e-4)
        close(extract_pyramid(backbone, values, normalization=expected), found, 0)
        assert not caplog.records
        with pytest.raises(ValueError, match=f"ImageNet's mean .*normalization='{expected}'"):
            extract_pyramid(backbone, values, normalization='imagenet')

    def test_another_of_three_channels_is_a_warning(self, made, caplog):
        backbone = made('renamed.pth', 3, 'backbone.backbone.')
        assert backbone.input_preset == 'satlas-rgb'
        extract_pyramid(backbone, photograph(32, 32))
        assert 'do not expect' not in caplog.text
        extract_pyramid(backbone, photograph(32, 32), normalization=Normalization(list(IMAGENET_MEAN), IMAGENET_STD))
        assert "which these weights do not expect: give normalization='satlas-rgb'" in caplog.text

    def test_other_weights_say_nothing(self, made, caplog):
        backbone = made('mine.pth', 9)
        assert backbone.input_preset is None
        assert 'normalization=' not in caplog.text
        with pytest.raises(ValueError, match=r'give normalization=Normalization'):
            extract_pyramid(backbone, np.full((32, 32, 9), 200, np.uint8))


def test_a_normalisation_is_an_object_or_a_name(backbone):
    rgb = Normalization(**preset('satlas-rgb'))
    values = photograph(40, 48)
    three = tiny()
    close(
        extract_pyramid(three, values, normalization='satlas-rgb'), extract_pyramid(three, values, normalization=rgb), 0
    )
    close(extract_pyramid(three, values), extract_pyramid(three, values, normalization='imagenet'), 0)
    with pytest.raises(ValueError, match=r"normalization must be one of .*'landsat'"):
        extract_pyramid(backbone, COUNTS, normalization='landsat')
    with pytest.raises(TypeError, match=r'normalization must be a .*, got dict'):
        extract_pyramid(backbone, COUNTS, normalization=OPTIONS)
