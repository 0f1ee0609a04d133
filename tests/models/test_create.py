"""Options that are inferred from a checkpoint."""

import pytest

from swin_dense import SwinBackbone, create_backbone
from swin_dense.checkpoint import CheckpointError
from swin_dense.checkpoint.convert import convert
from swin_dense.checkpoint.infer import infer_options
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
    given = {'num_heads': (1, 2, 4, 8), 'window_size': 7}
    assert infer_options(weights, given).items() >= given.items()
