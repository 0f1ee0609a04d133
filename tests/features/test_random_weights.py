"""Features of weights that no training has changed are said to be random."""

import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone, create_backbone, extract_pyramid
from swin_dense.features.pyramid import has_random_weights, warn_of_random_weights
from tests.conftest import TINY


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
        'These weights are untrained, so all results are random; give a checkpoint to load trained weights'
    ]
