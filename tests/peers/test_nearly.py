"""Networks of other libraries that are nearly a Swin, and states of one that are not its weights, are named."""

import pytest
import torch

from swin_dense import CheckpointError, SwinBackbone, SwinV2Backbone, create_backbone, load_checkpoint

from .peer import needed

timm = needed('timm')

SIZE = {'embed_dim': 16, 'depths': (1, 1, 1, 1), 'num_heads': (1, 2, 2, 4)}
OURS = {'embed_dims': 16, 'depths': (1, 1, 1, 1), 'num_heads': (1, 2, 2, 4)}


def cr():
    return timm.create_model('swinv2_cr_tiny_224', **SIZE)


def audio():
    from transformers import ClapAudioConfig, ClapAudioModel

    options = {'patch_embeds_hidden_size': 16, 'hidden_size': 128, 'depths': [1, 1, 1, 1]}
    return ClapAudioModel(ClapAudioConfig(**options, num_attention_heads=[1, 2, 2, 4]))


def quantised():
    model = timm.create_model('swin_tiny_patch4_window7_224', **SIZE)
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})


@pytest.mark.parametrize(
    ('build', 'message'),
    [
        (cr, 'no Swin has: .*use the code of that network'),
        (audio, 'no Swin has: .*use the code of that network'),
        (quantised, 'no Swin has: .*before a model is quantised'),
    ],
)
@pytest.mark.filterwarnings('ignore')
def test_what_is_nearly_a_swin_is_named(tmp_path, build, message):
    state = build().state_dict()
    torch.save(state, tmp_path / 'a.pth')
    for checkpoint in (state, tmp_path / 'a.pth'):
        with pytest.raises(CheckpointError, match=message):
            create_backbone(checkpoint=checkpoint)
        for network in (SwinBackbone, SwinV2Backbone):
            with pytest.raises(CheckpointError, match=message):
                load_checkpoint(network(**OURS), checkpoint)
