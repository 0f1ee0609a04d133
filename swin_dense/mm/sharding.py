"""How mmengine's FSDP strategy cuts a model up: block by block."""

from __future__ import annotations

from mmengine.registry import FUNCTIONS
from torch import nn

from swin_dense.block import SwinBlock


@FUNCTIONS.register_module()
def swin_auto_wrap_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Shard every block of a Swin of its own; what is left of the model is sharded as a whole.

    In a config: ``strategy = dict(type='FSDPStrategy', model_wrapper=dict(auto_wrap_policy='swin_auto_wrap_policy'))``.

    Args:
        module: that is asked about.
        recurse: whether its children shall be asked about too.
        nonwrapped_numel: parameters in it that are not sharded yet.
    """
    return recurse or isinstance(module, SwinBlock)
