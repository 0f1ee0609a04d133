"""The SwinDense encoders with every decoder of segmentation_models_pytorch."""

import pytest
import torch

from swin_dense import SwinBackbone, load_checkpoint
from tests.conftest import TINY, equal_weights, randomize

from .detection import train
from .peer import largest_difference, needed

huggingface_hub = needed('huggingface_hub')
smp = needed('segmentation_models_pytorch')
import swin_dense.integrations.smp  # noqa: E402
import swin_dense.integrations.timm  # noqa: E402, F401

DECODERS = ['Unet', 'UnetPlusPlus', 'MAnet', 'Linknet', 'FPN', 'PSPNet', 'PAN', 'DeepLabV3', 'DeepLabV3Plus', 'UPerNet',
            'Segformer', 'DPT']  # fmt: skip
DPT = {'decoder_readout': 'ignore', 'decoder_intermediate_channels': (16,) * 4, 'decoder_fusion_channels': 16}
# If a decoder does not use a map, the norm of that map gets no gradient.
UNUSED = {
    'DPT': {'head', 'backbone'},
    'PSPNet': {'norm0'},
    'DeepLabV3': {'norm0', 'norm1', 'norm2'},
    'DeepLabV3Plus': {'norm1', 'norm2'},
}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    for network in ('swin', 'swinv2'):
        entry = {**smp.encoders.encoders[f'{network}_dense_t'], 'params': {'network': network, 'arch': 't', **TINY}}
        monkeypatch.setitem(smp.encoders.encoders, f'{network}_dense_tiny', entry)


@pytest.fixture
def weights(tmp_path):
    backbone = randomize(SwinBackbone('t', **TINY))
    torch.save({'model': backbone.state_dict()}, tmp_path / 'swin.pth')
    return tmp_path / 'swin.pth', backbone


def build(decoder, encoder='swin_dense_tiny', **options):
    if decoder == 'DPT':  # supports only encoders of timm
        encoder, options = 'tu-swin_dense_t', {**DPT, **TINY, **options}
    return getattr(smp, decoder)(encoder, **{'encoder_weights': None, 'classes': 2, **options})


@pytest.mark.parametrize('decoder', DECODERS)
def test_every_decoder_trains_and_predicts(decoder):
    model = build(decoder)
    target = torch.zeros(2, 2, 128, 128)
    target[:, 1, 32:96, 32:96] = 1
    image = target[:, 1:].expand(-1, 3, -1, -1) + 0.1 * torch.randn(2, 3, 128, 128)
    compute_loss = torch.nn.functional.binary_cross_entropy_with_logits
    losses = train(model, lambda: {'loss': compute_loss(model(image), target)}, steps=5, lr=2e-3)
    assert losses[-1] < losses[0]
    unused = {name.split('.')[2] for name, parameter in model.named_parameters() if parameter.grad is None}
    assert unused == UNUSED.get(decoder, set())
    with torch.no_grad():
        assert model.eval()(torch.rand(1, 3, 224, 224)).shape == (1, 2, 224, 224)


@torch.no_grad()
def test_sizes_that_are_not_multiples_of_32():
    """Unet accepts any size; other decoders require multiples of the encoder's stride and name it in the error."""
    assert build('Unet').eval()(torch.rand(1, 3, 97, 133)).shape == (1, 2, 97, 133)
    assert build('DeepLabV3').eval()(torch.rand(2, 3, 104, 136)).shape == (2, 2, 104, 136)  # its stride is 8
    with pytest.raises(RuntimeError, match='divisible by 32'):
        build('FPN').eval()(torch.rand(1, 3, 80, 112))


@torch.no_grad()
def test_weights_are_loaded_into_the_backbone(weights):
    path, backbone = weights
    model = build('Unet').eval()
    load_checkpoint(model.encoder.backbone, path)
    assert equal_weights(backbone, model.encoder.backbone)
    grey = build('FPN', in_channels=1).eval()
    load_checkpoint(grey.encoder.backbone, path)
    image = torch.rand(1, 1, 64, 64)
    expected = backbone.eval()(image.expand(-1, 3, -1, -1))
    assert largest_difference(grey.encoder(image)[2:], expected) < 1e-4


@pytest.mark.parametrize('name', ['imagenet', 'swin.pth'])
def test_weights_named_to_smp_are_refused_with_an_explanation(name):
    with pytest.raises(ValueError, match=f"weights '{name}' .* call load_checkpoint"):
        smp.Unet('swin_dense_t', encoder_weights=name)
    with pytest.raises(ValueError, match="name the encoder 'tu-swin_dense_t'"):
        smp.encoders.get_preprocessing_params('swin_dense_t', name)


def test_preprocessing():
    """As in smp's tutorials; Swins are trained with the mean and standard deviation of ImageNet."""
    expected = smp.encoders.get_preprocessing_params('tu-swin_tiny_patch4_window7_224')
    found = smp.encoders.get_preprocessing_params('tu-swin_dense_t')
    assert {key: found[key] for key in ('mean', 'std')} == {key: expected[key] for key in ('mean', 'std')}


@torch.no_grad()
def test_depths_strides_channels_and_export():
    encoder = build('Unet', encoder_depth=3, decoder_channels=(32, 16, 8)).encoder
    assert encoder.out_channels == [3, 0, 16, 32]
    assert [x.shape[2] for x in encoder(torch.rand(1, 3, 64, 64))] == [64, 32, 16, 8]
    assert build('DeepLabV3Plus', encoder_output_stride=8).encoder(torch.rand(1, 3, 64, 64))[-1].shape[2] == 8
    assert build('Unet', 'swinv2_dense_tiny', in_channels=5).eval()(torch.rand(1, 5, 64, 64)).shape == (1, 2, 64, 64)
    with pytest.raises(ValueError, match='encoder_depth must be between 2 and 5'):
        build('Unet', encoder_depth=1, decoder_channels=(8,))
    model, image = build('FPN').eval(), torch.rand(1, 3, 64, 64)
    exported = torch.export.export(model, (image,)).module()
    assert (exported(image) - model(image)).abs().max() < 1e-5


def test_save_pretrained_of_smp(tmp_path):
    model = randomize(build('FPN', in_channels=4)).eval()
    model.save_pretrained(tmp_path / 'saved')
    loaded = smp.from_pretrained(tmp_path / 'saved').eval()
    image = torch.rand(1, 4, 64, 96)
    with torch.no_grad():
        assert torch.equal(loaded(image), model(image))


@torch.no_grad()
def test_a_saved_backbone_of_an_encoder_keeps_its_channels(tmp_path):
    pytest.importorskip('safetensors')
    backbone = build('Unet', in_channels=5).encoder.backbone.eval()
    backbone.save_pretrained(tmp_path)
    image = torch.rand(1, 5, 64, 96)
    loaded = SwinBackbone.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(loaded(image), backbone(image), strict=True))
