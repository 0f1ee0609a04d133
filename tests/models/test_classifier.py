"""SwinClassifier: a backbone, a mean and a linear layer."""

import pytest
import torch

from swin_dense import SwinBackbone, SwinClassifier, SwinV2Backbone, load_checkpoint
from tests.conftest import TINY, equal_weights, randomize


def test_output_is_a_linear_layer_on_the_mean_of_the_last_map():
    classifier = randomize(SwinClassifier(TINY, num_classes=3)).eval()
    img = torch.randn(2, 3, 60, 70)
    dense = SwinBackbone(TINY, out_indices=(3,), clamp_window=True).eval()
    dense.load_state_dict(classifier.backbone.state_dict())
    means = dense(img)[0].flatten(2).mean(2)
    torch.testing.assert_close(classifier(img), classifier.head(means))
    assert classifier.backbone.clamp_window


def test_the_backbone_has_the_version_of_the_name_and_returns_the_last_map():
    with torch.device('meta'):
        v2 = SwinClassifier('swinv2_t')
        short = SwinClassifier(
            embed_dims=16,
            depths=(1, 1),
            num_heads=(1, 1),
            strides=(4, 2),
            num_classes=5,
        )
    assert type(v2.backbone) is SwinV2Backbone
    assert sum(p.numel() for p in v2.parameters()) == 28_347_154
    assert v2.backbone.out_indices == (3,)
    assert short.backbone.out_indices == (1,)


def test_wrong_options():
    with pytest.raises(TypeError, match='leave out_indices out'):
        SwinClassifier(TINY, out_indices=(0,))
    with pytest.raises(ValueError, match='num_classes must be at least 1'):
        SwinClassifier(TINY, num_classes=0)


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        (TINY, {}),
        ('swinv2_t', TINY),
    ],
)
def test_its_own_state_dict_loads(name, options):
    first = randomize(SwinClassifier(name, 3, window_size=4, **options), 1)
    second = randomize(SwinClassifier(name, 3, window_size=4, **options), 2)
    load_checkpoint(second, {'state_dict': first.state_dict()}, log=None)
    assert equal_weights(first, second)


def test_a_new_head_is_small_and_has_no_bias():
    head = SwinClassifier(TINY).head
    assert head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not head.bias.any()
