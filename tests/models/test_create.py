"""Options that are inferred from a checkpoint."""

import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone, create_backbone, extract_pyramid
from swin_dense.checkpoint import CheckpointError
from swin_dense.checkpoint.convert import convert
from swin_dense.checkpoint.infer import infer_options
from swin_dense.features.pyramid import has_random_weights, warn_of_random_weights
from tests.conftest import TINY


def test_a_size_that_the_parameters_do_not_show_is_named():
    whole = SwinBackbone(TINY).state_dict()
    state = {name: tensor for name, tensor in whole.items() if 'qkv' not in name}
    with pytest.raises(CheckpointError, match='cannot infer embed_dims'):
        create_backbone(checkpoint=state)


def test_without_position_biases_the_number_of_heads_must_be_given():
    weights = convert(SwinBackbone(TINY, use_rel_pos_bias=False).state_dict(), 'the given dict')
    with pytest.raises(CheckpointError, match='cannot infer the number of heads'):
        infer_options(weights, {})
    assert infer_options(weights, {'num_heads': (1, 2, 4, 8)})['num_heads'] == (1, 2, 4, 8)


def train(backbone):
    """Train for two steps; in the first, the blocks of a Swin V2 are the identity, and their MLPs have no gradient."""
    optimizer = torch.optim.SGD(backbone.train().parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        outs = backbone(torch.rand(2, 3, 32, 32))
        loss = sum(out.square().sum() for out in outs)
        loss.backward()
        optimizer.step()
    return backbone


@pytest.mark.parametrize('kind', [SwinBackbone, SwinV2Backbone])
def test_weights_are_random_until_they_are_trained(kind):
    backbone = kind(TINY, drop_path_rate=0.0)
    assert has_random_weights(backbone)
    assert not has_random_weights(train(backbone))


def test_features_of_random_weights_are_said_to_be_random_once(caplog):
    image = torch.rand(3, 32, 32)
    warn_of_random_weights.cache_clear()
    trained = train(SwinBackbone(TINY, drop_path_rate=0.0))
    for backbone in (trained, create_backbone(checkpoint=trained.state_dict())):
        extract_pyramid(backbone, image)
    assert 'RANDOM' not in caplog.text
    caplog.clear()
    new = SwinBackbone(TINY)
    loaded = create_backbone(checkpoint=new.state_dict())
    caplog.clear()
    for backbone in (new, loaded):
        extract_pyramid(backbone, image)
    assert [record.getMessage() for record in caplog.records] == [
        'WARNING: the weights are untrained, and all results RANDOM; give checkpoint= trained ones'
    ]
