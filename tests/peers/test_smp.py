"""The SwinDense encoders with every decoder of segmentation_models_pytorch."""

import pytest
import torch

from tests.conftest import TINY

from .detection import train
from .peer import needed

huggingface_hub = needed('huggingface_hub')
smp = needed('segmentation_models_pytorch')
import swin_dense.integrations.timm  # noqa: E402, F401

DECODERS = ['Unet', 'UnetPlusPlus', 'MAnet', 'Linknet', 'FPN', 'PSPNet', 'PAN', 'DeepLabV3', 'DeepLabV3Plus', 'UPerNet',
            'Segformer', 'DPT']  # fmt: skip
DPT = {'decoder_readout': 'ignore', 'decoder_intermediate_channels': (16,) * 4, 'decoder_fusion_channels': 16}
# If a decoder does not use a map, the norm of that map gets no gradient.
UNUSED = {
    'PSPNet': {'norm0'},
    'DeepLabV3': {'norm0', 'norm1', 'norm2'},
    'DeepLabV3Plus': {'norm1', 'norm2'},
}


def build(decoder, encoder='tu-swin_dense_t', **options):
    options = {**(DPT if decoder == 'DPT' else {}), **TINY, **options}
    return getattr(smp, decoder)(encoder, **{'encoder_weights': None, 'classes': 2, **options})


@pytest.mark.parametrize('decoder', DECODERS)
def test_every_decoder_trains_and_predicts(decoder):
    model = build(decoder)
    target = torch.zeros(2, 2, 128, 128)
    target[:, 1, 32:96, 32:96] = 1
    image = target[:, 1:].expand(-1, 3, -1, -1) + 0.1 * torch.randn(2, 3, 128, 128)
    compute_loss = torch.nn.functional.binary_cross_entropy_with_logits
    losses = train(
        model,
        lambda: {'loss': compute_loss(model(image), target)},
        steps=5,
        lr=2e-3,
    )
    assert losses[-1] < losses[0]
    unused = {name.split('.')[3] for name, parameter in model.named_parameters() if parameter.grad is None}
    assert decoder == 'DPT' or unused == UNUSED.get(decoder, set())
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
@pytest.mark.parametrize('decoder', ['DeepLabV3', 'DeepLabV3Plus', 'PAN'])
@pytest.mark.parametrize('depth', [4, 5])
def test_an_output_stride_and_a_depth_as_for_a_resnet(decoder, depth):
    """timm's Swin raises TypeError for output_stride."""
    options = {'encoder_output_stride': 16, 'encoder_depth': depth, 'in_channels': 1}
    with pytest.raises(TypeError, match='output_stride'):
        getattr(smp, decoder)('tu-swin_tiny_patch4_window7_224', encoder_weights=None, img_size=128, **options)
    model = build(decoder, **options).eval()
    assert model(torch.rand(2, 1, 128, 128)).shape == (2, 2, 128, 128)


def test_preprocessing():
    """As in smp's tutorials; Swins are trained with the mean and standard deviation of ImageNet."""
    expected = smp.encoders.get_preprocessing_params('tu-swin_tiny_patch4_window7_224')
    found = smp.encoders.get_preprocessing_params('tu-swin_dense_t')
    assert {key: found[key] for key in ('mean', 'std')} == {key: expected[key] for key in ('mean', 'std')}
