"""The hook UseGraphs in mmengine's runner."""

import pytest
import torch
from mmengine.registry import HOOKS
from torch import nn

from swin_dense import SwinDense
from swin_dense.models import graphs
from tests.conftest import TINY


class Runner:
    def __init__(self, model):
        self.model = model


def model_with(backbone):
    model = nn.Module()
    model.backbone = backbone
    return model


@pytest.mark.parametrize('is_wrapped', [False, True])
def test_the_hook_gives_the_backbone_graphs(is_wrapped, tmp_path):
    backbone = SwinDense(**TINY)
    model = model_with(backbone)
    if is_wrapped:
        torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(model)
    try:
        HOOKS.build({'type': 'UseGraphs'}).before_run(Runner(model))
    finally:
        if is_wrapped:
            torch.distributed.destroy_process_group()
    assert isinstance(backbone.forward, graphs._Graphed)
    assert len(backbone(torch.rand(1, 3, 32, 32))) == 4


def test_a_model_without_a_backbone_is_an_error():
    with pytest.raises(ValueError, match='UseGraphs needs a model with a backbone, and Linear has none'):
        HOOKS.build({'type': 'UseGraphs'}).before_run(Runner(nn.Linear(1, 1)))
