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
    expected = dense(img)[0].flatten(2).mean(2) @ classifier.head.weight.T + classifier.head.bias
    torch.testing.assert_close(classifier(img), expected)
    assert classifier.backbone.clamp_window


def test_names_and_wrong_options():
    with torch.device('meta'):
        v2 = SwinClassifier('swinv2_t')
    assert type(v2.backbone) is SwinV2Backbone
    assert sum(p.numel() for p in v2.parameters()) == 28_347_154
    with pytest.raises(TypeError, match='leave out_indices out'):
        SwinClassifier(TINY, out_indices=(0,))
    with pytest.raises(ValueError, match='num_classes must be at least 1'):
        SwinClassifier(TINY, num_classes=0)


@pytest.mark.parametrize('name', [TINY, 'swinv2_t'])
def test_its_own_state_dict_loads(name):
    options = TINY if name == 'swinv2_t' else {}
    first, second = (randomize(SwinClassifier(name, 3, window_size=4, **options), seed).eval() for seed in (1, 2))
    load_checkpoint(second, {'state_dict': first.state_dict()}, log=None)
    assert equal_weights(first, second)
