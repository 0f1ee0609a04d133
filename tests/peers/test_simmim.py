"""SimMIM against mmpretrain and transformers: the same weights, images and masks give the same loss and gradients."""

import copy

import pytest
import torch

from swin_dense import SimMIM, SwinBackbone, SwinV2Backbone, load_checkpoint
from tests.conftest import randomize

from .peer import needed

# With windows of 4, the maps have sides of 32, 16, 8 and 4 tokens: the last is one window, which must not be shifted.
SIDE = 128
ARCH = {'embed_dims': 16, 'depths': (2, 2, 2, 2), 'num_heads': (1, 2, 4, 8)}
IMAGES = torch.randn(2, 3, SIDE, SIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
KINDS = {'swin': SwinBackbone, 'swinv2': SwinV2Backbone}


def build(kind):
    options = {'window_size': 4, 'out_indices': (3,), 'clamp_window': True, 'drop_path_rate': 0.0}
    return SimMIM(KINDS[kind](**ARCH, **options)).double()


def differences(kind, theirs, names, token, decoder, loss, mask):
    """Return the difference of the losses, and the largest one of any gradient, relative to the largest gradient.

    Args:
        kind: key of ``KINDS``.
        theirs: the peer's model after a backward pass.
        names: function from a parameter's name in the peer to that in a checkpoint of its backbone, or None.
        token: the peer's mask token.
        decoder: the peer's 1x1 convolution.
        loss: the peer's loss.
        mask: hidden cells, (B, rows, columns).
    """
    ours = build(kind)
    wanted = copy.deepcopy(ours.backbone)  # its parameters become the peer's gradients, in our names and order
    parameters = {names(name): p for name, p in theirs.named_parameters() if names(name)}
    gradients = {name: p.grad for name, p in parameters.items()}
    with torch.no_grad():
        for backbone, state in ((ours.backbone, parameters), (wanted, gradients)):
            has_norm3 = any('norm3' in name for name in state)  # mmpretrain's name; transformers has a final norm
            load_checkpoint(backbone, dict(state), final_norm=not has_norm3, log=None)
        ours.mask_token.copy_(token.flatten())
        ours.decoder.load_state_dict(decoder.state_dict())
    (ours_loss,) = ours(IMAGES, mask).values()
    ours_loss.backward()
    pairs = [(p.grad, q) for p, q in zip(ours.backbone.parameters(), wanted.parameters(), strict=True)]
    pairs += [(ours.mask_token.grad, token.grad.flatten())]
    pairs += [(ours.decoder.weight.grad, decoder.weight.grad), (ours.decoder.bias.grad, decoder.bias.grad)]
    assert all(gradient.abs().max() > 0 for gradient, _ in pairs)
    largest = max(expected.abs().max() for _, expected in pairs)
    return (ours_loss - loss).abs().item(), max((a - b).abs().max() / largest for a, b in pairs).item()


def test_mmpretrain():
    needed('mmpretrain.models.backbones')
    from mmpretrain.models.heads import SimMIMHead
    from mmpretrain.models.necks import SimMIMLinearDecoder
    from mmpretrain.models.selfsup.simmim import SimMIMSwinTransformer
    from mmpretrain.registry import MODELS  # noqa: F401  registers the loss

    theirs = SimMIMSwinTransformer(
        arch={**ARCH}, img_size=SIDE, stage_cfgs={'block_cfgs': {'window_size': 4}}, drop_path_rate=0.0
    )
    neck = SimMIMLinearDecoder(in_channels=128, encoder_stride=32)
    head = SimMIMHead(patch_size=4, loss={'type': 'PixelReconstructionLoss', 'criterion': 'L1', 'channel': 3})
    theirs = randomize(theirs.double(), 1)
    randomize(neck.double(), 2)
    mask = build('swin').draw_mask(IMAGES, torch.Generator().manual_seed(0))
    patches = mask.repeat_interleave(8, 1).repeat_interleave(8, 2)
    loss = head.loss(neck(theirs(IMAGES, patches.double())[0]), IMAGES, patches.double())
    loss.backward()

    def names(name):
        return None if 'mask_token' in name else f'backbone.{name}'

    found = differences('swin', theirs, names, theirs.mask_token, neck.decoder[0], loss, mask)
    assert found[0] < 1e-12
    assert found[1] < 1e-12


@pytest.mark.parametrize('kind', KINDS)
def test_transformers(kind):
    tf = needed('transformers')
    config, model = {
        'swin': (tf.SwinConfig, tf.SwinForMaskedImageModeling),
        'swinv2': (tf.Swinv2Config, tf.Swinv2ForMaskedImageModeling),
    }[kind]
    sizes = {'embed_dim': 16, 'depths': [2, 2, 2, 2], 'num_heads': [1, 2, 4, 8], 'window_size': 4}
    theirs = model(config(image_size=SIDE, encoder_stride=32, drop_path_rate=0.0, **sizes)).double()
    randomize(theirs, 1)
    mask = build(kind).draw_mask(IMAGES, torch.Generator().manual_seed(0))
    patches = mask.repeat_interleave(8, 1).repeat_interleave(8, 2).flatten(1)
    loss = theirs(IMAGES, bool_masked_pos=patches).loss
    loss.backward()

    def names(name):
        return name if name.startswith(kind) and 'mask_token' not in name else None

    token = getattr(theirs, kind).embeddings.mask_token
    found = differences(kind, theirs, names, token, theirs.decoder[0], loss, mask)
    # transformers adds 1e-5 to the number of hidden pixels, as the authors do.
    assert found[0] < 1e-9 * loss.item() + 1e-12
    assert found[1] < 1e-8
