"""Options that are inferred from a checkpoint."""

import pytest
import torch

from swin_dense import SwinBackbone, create_backbone, extract_pyramid
from swin_dense.checkpoint import CheckpointError
from swin_dense.checkpoint.infer import infer_options
from swin_dense.checkpoint.load import find_backbone
from swin_dense.create import warn_of_random_weights
from tests.conftest import TINY


def test_a_size_that_the_parameters_do_not_show_is_named():
    state = {name: tensor for name, tensor in SwinBackbone(TINY).state_dict().items() if 'qkv' not in name}
    with pytest.raises(CheckpointError, match='cannot infer embed_dims'):
        create_backbone(checkpoint=state)


def test_without_position_biases_the_number_of_heads_must_be_given():
    found = find_backbone(SwinBackbone(TINY, use_rel_pos_bias=False).state_dict())
    with pytest.raises(CheckpointError, match='cannot infer the number of heads'):
        infer_options(found, {})
    assert infer_options(found, {'num_heads': (1, 2, 4, 8)})['num_heads'] == (1, 2, 4, 8)


def test_features_of_random_weights_are_said_to_be_random_once(caplog):
    image = torch.rand(3, 32, 32)
    trained, loaded, saved = create_backbone(TINY).train(), create_backbone(TINY), create_backbone(TINY)
    loaded.load_state_dict(saved.state_dict())
    warn_of_random_weights.cache_clear()
    for backbone in (trained, loaded, create_backbone(checkpoint=saved.state_dict())):
        extract_pyramid(backbone, image)
    assert 'RANDOM' not in caplog.text
    caplog.clear()
    for _ in range(2):
        extract_pyramid(saved, image)
    assert [record.getMessage() for record in caplog.records] == [
        'WARNING: no checkpoint was given, so the weights and all results are RANDOM'
    ]
