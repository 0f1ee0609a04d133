"""Images of any bands: chosen, scaled and normalised in every way of reading, in the commands and in exported files."""

import logging

import numpy as np
import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone, create_backbone, export_state_dict, extract_pyramid
from swin_dense.commands._main import main
from swin_dense.export import export_model
from swin_dense.features import Extractor, Normalization, preset
from swin_dense.images.pixels import Pixels
from swin_dense.images.presets import IMAGENET_MEAN, IMAGENET_STD
from tests.conftest import TINY, IfInstalled, assert_near, needs, photograph, randomize, tiny

tifffile = IfInstalled('tifffile')
ONE_BLOCK = {'embed_dims': 16, 'depths': (1,), 'num_heads': (1,), 'strides': (4,)}

BANDS, SCALE = (4, 0, 2, 1), (8160.0, 255.0, 10000.0, 3000.0)
MEAN, STD = (0.1, 0.2, 0.3, 0.4), (0.5, 0.6, 0.7, 0.8)
OPTIONS = {'mean': MEAN, 'std': STD, 'scale': SCALE, 'bands': BANDS}
ARGUMENTS = [part for name, values in OPTIONS.items() for part in (f'--{name}', *map(str, values))]


def counts(height=61, width=93, bands=5):
    return np.random.default_rng(0).integers(0, 9000, (height, width, bands), dtype=np.uint16)


def expected_input(values):
    chosen = values[:, :, BANDS].astype(np.float64)
    return torch.from_numpy(((chosen / SCALE - MEAN) / STD).transpose(2, 0, 1))[None].float()


def maps_of(backbone, img):
    with torch.no_grad():
        return dict(zip(backbone.out_strides, backbone(img), strict=True))


def expected_maps(backbone, values):
    return maps_of(backbone, expected_input(values))


def close(pyramid, maps):
    assert pyramid.keys() == maps.keys()
    for stride, level in maps.items():
        assert_near(pyramid[stride], level[0], 1e-4)


@pytest.fixture
def backbone():
    return tiny(in_channels=4)


@pytest.fixture
def image(tmp_path):
    path = tmp_path / 'scene.tif'
    tifffile.imwrite(path, counts(), photometric='minisblack', planarconfig='contig')
    return path


def test_arrays_tensors_and_files(backbone, image):
    values = counts()
    maps = expected_maps(backbone, values)
    tensor = torch.from_numpy(values.astype(np.float32)).permute(2, 0, 1)
    for source in (values, tensor, values.astype(np.int32), image):
        close(extract_pyramid(backbone, source, **OPTIONS), maps)
    close(extract_pyramid(backbone, tensor.requires_grad_(), gradients=True, **OPTIONS), maps)


@needs('zarr')
def test_tiles_of_a_file(backbone, tmp_path):
    values = counts(450, 230)
    path = tmp_path / 'scene.tif'
    tifffile.imwrite(path, values, photometric='minisblack', planarconfig='contig', tile=(64, 64))
    close(extract_pyramid(backbone, path, tile=224, **OPTIONS), expected_maps(backbone, values))


def test_max_side_and_clamp(backbone):
    values = np.full((60, 90, 5), 30000, np.uint16)
    pyramid = extract_pyramid(backbone, values, mean=None, std=None, scale=8160, bands=BANDS, clamp=True, max_side=45)
    close(pyramid, maps_of(backbone, torch.ones(1, 4, 30, 45)))


@pytest.mark.parametrize('options', [OPTIONS, {'normalization': Normalization(**OPTIONS)}], ids=['short', 'one'])
def test_an_extractor(backbone, image, tmp_path, options):
    torch.save(backbone.state_dict(), tmp_path / 'weights.pth')
    rows = Extractor(tmp_path / 'weights.pth', device='cpu', **options)({'path': [str(image)]})
    assert rows['error'][0] == ''
    for stride, level in expected_maps(backbone, counts()).items():
        np.testing.assert_allclose(rows[f'level_{stride}'][0], level[0].mean((1, 2)), rtol=1e-3, atol=1e-4)


@needs('safetensors')
@needs('pyarrow')
def test_the_command_features(backbone, image, tmp_path, capsys):
    from safetensors.torch import load_file

    torch.save(backbone.state_dict(), tmp_path / 'weights.pth')
    weights, out = str(tmp_path / 'weights.pth'), str(tmp_path / 'out')
    given = ['features', str(image), '--checkpoint', weights, '--device', 'cpu', '--out']
    assert main([*given, out, *ARGUMENTS]) == 0
    (file,) = (tmp_path / 'out').rglob('*.safetensors')
    maps = {int(name): level for name, level in load_file(file).items()}
    close(maps, expected_maps(backbone, counts()))
    assert main([*given, out, *ARGUMENTS, '--clamp']) == 2  # other features in one folder
    assert main([*given, str(tmp_path / 'other')]) == 2
    printed = capsys.readouterr().err
    assert "the backbone takes 4 channels, but ImageNet's mean and std are for 3; give --mean, --std" in printed


def test_the_command_explore(backbone, image, tmp_path):
    torch.save(backbone.state_dict(), tmp_path / 'weights.pth')
    weights, out = tmp_path / 'weights.pth', tmp_path / 'page.html'
    assert main(['explore', str(image), '--checkpoint', str(weights), '--out', str(out), *ARGUMENTS]) == 0
    assert out.stat().st_size > 1000


@pytest.mark.parametrize(
    ('arguments', 'options'),
    [
        (['--scale', '200'], {'scale': 200}),
        (['--mean', '0.5', '--std', '0.2'], {'mean': 0.5, 'std': 0.2}),
        (['--bands', '2', '1', '0'], {'bands': (2, 1, 0)}),
        (['--preset', 'satlas-rgb'], preset('satlas-rgb')),
    ],
)
def test_the_options_of_export_mean_what_they_mean_in_features(tmp_path, capsys, arguments, options):
    """The file takes what the image file stores, and gives what `features` gives."""
    backbone = randomize(SwinBackbone(**ONE_BLOCK)).eval()
    torch.save(backbone.state_dict(), tmp_path / 'weights.pth')
    given = ['export', str(tmp_path / 'weights.pth'), '--out', str(tmp_path / 'model.ts'), '--no-check']
    assert main([*given, '--size', '32', *arguments]) == 0
    pixels = photograph(40, 48)
    img = torch.from_numpy(pixels).permute(2, 0, 1)[None].float()
    (out,) = torch.jit.load(tmp_path / 'model.ts')(img)
    assert_near(out[0], extract_pyramid(backbone, pixels, **options)[4], 1e-3)


def test_clamp_needs_a_mean():
    with pytest.raises(ValueError, match=r'cut off .*; give mean= and std='):
        Normalization(clamp=True, scale=255)


@pytest.mark.parametrize(
    ('suffix', 'options'),
    [('.onnx', OPTIONS), ('.ts', {'normalization': Normalization(**OPTIONS)})],
    ids=['onnx', 'torchscript'],
)
def test_an_exported_file_takes_stored_values(tmp_path, suffix, options):
    """One block suffices: the export takes a time for each, and normalises before the first."""
    backbone = randomize(SwinBackbone(**ONE_BLOCK, in_channels=4)).eval()
    for package in ('onnx', 'onnxscript', 'onnxruntime') if suffix == '.onnx' else ():
        pytest.importorskip(package)
    path = tmp_path / f'model{suffix}'
    export_model(backbone, path, **options)
    img = counts().transpose(2, 0, 1)[None].astype(np.float32)
    if suffix == '.onnx':
        import onnxruntime

        outs = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider']).run(None, {'img': img})
    else:
        outs = [out.numpy() for out in torch.jit.load(path)(torch.from_numpy(img))]
    for out, level in zip(outs, expected_maps(backbone, counts()).values(), strict=True):
        np.testing.assert_allclose(out, level, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'scale': 0}, 'scale must be above 0'),
        ({'scale': (1, 2)}, 'scale must be .* per channel, that is 4'),
        ({'bands': (0, 1)}, r'bands must be one per .*, got \(0, 1\)'),
        ({'bands': (0, 1, 2, 5)}, 'no band 5; it has 5, counted from 0'),
        ({'bands': (0, 1, 2, -1)}, 'every entry of bands must be at least 0'),
        ({'bgr': True, 'bands': BANDS}, 'bgr= and bands= both choose an order'),
        ({'mean': 1500, 'std': 800}, 'mean and std must be on the scale 0 to 1'),
        ({'mean': IMAGENET_MEAN, 'std': IMAGENET_STD}, "takes 4 channels, but ImageNet's mean"),
    ],
)
def test_wrong_numbers_are_refused(backbone, options, message):
    with pytest.raises(ValueError, match=message):
        extract_pyramid(backbone, counts(), **{'mean': 0, 'std': 1, **options})


def test_statistics_of_counts_need_a_scale_of_1(backbone):
    values = counts()
    options = {'mean': (1500, 1, 2, 3000), 'std': (800, 3, 4, 900), 'scale': 1, 'bands': BANDS}
    normalized = (values[:, :, BANDS] - np.array(options['mean'])) / options['std']
    img = torch.from_numpy(normalized.transpose(2, 0, 1))[None].float()
    close(extract_pyramid(backbone, values, **options), maps_of(backbone, img))


# Formulas of https://github.com/allenai/satlas Normalization.md and of torchgeo's transforms.
SATLAS = {
    'satlas-rgb': (3, lambda x: x / 255),
    'satlas-sentinel1': (2, lambda x: np.clip(x / 255, 0, 1)),
    'satlas-sentinel2-ms': (9, lambda x: np.clip(x / np.array([255] * 3 + [8160] * 6), 0, 1)),
    'satlas-landsat': (11, lambda x: np.clip((x - 4000) / 16320, 0, 1)),
}


@pytest.mark.parametrize('name', SATLAS)
def test_presets(name):
    channels, formula = SATLAS[name]
    most = 256 if name == 'satlas-rgb' else 30000
    values = np.random.default_rng(1).integers(0, most, (6, 7, channels), np.uint16)
    how = Normalization(**preset(name))
    img = how.prepare(how.stored(Pixels(values), channels))
    np.testing.assert_allclose(img, formula(values.astype(float)).transpose(2, 0, 1), atol=1e-6)


@pytest.mark.parametrize(
    ('name', 'channels', 'prefix', 'expected'),
    [
        ('sentinel2_swint_mi_ms-of_torchgeo.pth', 9, '', 'satlas-sentinel2-ms'),
        ('landsat_swinb_si-copy.pth', 11, '', 'satlas-landsat'),
        ('sentinel1_swinb_si.pth', 2, 'backbone.backbone.', 'satlas-sentinel1'),
        ('renamed.pth', 3, 'backbone.backbone.', 'satlas-rgb'),
        ('mine.pth', 9, '', None),
    ],
)
def test_published_weights_say_what_they_expect(tmp_path, caplog, name, channels, prefix, expected):
    options = {**TINY, 'in_channels': channels, 'window_size': 4}
    state = export_state_dict(randomize(SwinV2Backbone(**options, pretrained_window_size=4)), 'torchvision')
    torch.save({prefix + key: value for key, value in state.items()}, tmp_path / name)
    with caplog.at_level(logging.INFO):
        backbone = create_backbone(None, tmp_path / name, num_heads=TINY['num_heads'])
    assert backbone.input_preset == expected
    assert (f"normalised by preset('{expected}')" in caplog.text) == (expected is not None)
    caplog.clear()
    values = np.full((32, 32, channels), 200, np.uint8)
    if channels == 3:
        extract_pyramid(backbone, values)
        assert "which these weights do not expect: give normalization='satlas-rgb'" in caplog.text
    else:
        with pytest.raises(ValueError, match=f"normalization='{expected}'" if expected else 'or a preset'):
            extract_pyramid(backbone, values)
    caplog.clear()
    if expected:
        short = extract_pyramid(backbone, values, **preset(expected))
        for normalization in (expected, Normalization(**preset(expected))):
            assert torch.equal(extract_pyramid(backbone, values, normalization=normalization)[4], short[4])
        assert not caplog.records


def same(pyramid, other):
    assert pyramid.keys() == other.keys()
    assert all(torch.equal(level, other[stride]) for stride, level in pyramid.items())


def test_a_normalisation_is_one_argument_or_its_short_form(backbone):
    values, how = counts(), Normalization(**OPTIONS)
    expected = extract_pyramid(backbone, values, **OPTIONS)
    same(extract_pyramid(backbone, values, normalization=how), expected)
    bands = {'normalization': 'satlas-rgb', 'bands': OPTIONS['bands']}
    short = {'scale': 255.0, 'clamp': True, 'mean': None, 'std': None, 'bands': OPTIONS['bands']}
    same(extract_pyramid(backbone, values, **bands), extract_pyramid(backbone, values, **short))
    with pytest.raises(ValueError, match='normalization= contains mean'):
        extract_pyramid(backbone, values, normalization=how, scale=1)
    with pytest.raises(ValueError, match='leave them out'):
        extract_pyramid(backbone, values, normalization=how, bands=(0,))
    with pytest.raises(ValueError, match=r"preset must be one of .*'landsat'"):
        extract_pyramid(backbone, values, normalization='landsat')
    with pytest.raises(TypeError, match=r'normalization must be a .*, got dict'):
        extract_pyramid(backbone, values, normalization=OPTIONS)
