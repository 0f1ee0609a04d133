"""A model of transformers trains with the backbone, which it takes from timm's registry."""

import torch

from tests.conftest import TINY, equal_weights

from .detection import train
from .peer import needed

tf = needed('transformers')
timm = needed('timm')
import swin_dense.integrations.timm  # noqa: E402, F401

IMAGE = torch.rand(2, 3, 96, 128)
SMALL = {'encoder_layers': 1, 'decoder_layers': 2, 'num_attention_heads': 2, 'dim_feedforward': 32,
         'encoder_feedforward_dim': 32, 'num_queries': 5, 'hidden_dim': 32, 'feature_size': 32,
         'mask_feature_size': 32}  # fmt: skip


@timm.models.register_model
def small_swin(pretrained=False, **options):
    """A name of one's own, for options that a TimmBackboneConfig does not take."""
    return timm.create_model('swin_dense_t', pretrained, **TINY, **options)


def test_mask2former_trains_and_is_saved_and_loaded(tmp_path):
    """The code of docs/elsewhere.md, which test_page.py runs, does so with UperNet, but does not train it."""
    backbone = tf.TimmBackboneConfig(backbone='small_swin', out_indices=[0, 1, 2, 3])
    model = tf.Mask2FormerForUniversalSegmentation(tf.Mask2FormerConfig(backbone_config=backbone, **SMALL))
    labels = {'mask_labels': [torch.ones(1, 96, 128)] * 2, 'class_labels': [torch.tensor([1])] * 2}
    losses = train(model.train(), lambda: {'loss': model(pixel_values=IMAGE, **labels).loss}, steps=6)
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    assert equal_weights(model, type(model).from_pretrained(tmp_path))
