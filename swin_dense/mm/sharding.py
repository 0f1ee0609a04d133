"""Under mmengine's FSDP strategy: a model cut up block by block, and a training that can be resumed."""

from __future__ import annotations

from typing import Any

from mmengine._strategy import FSDPStrategy
from mmengine.registry import FUNCTIONS, STRATEGIES
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from swin_dense.models.block import SwinBlock


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


@STRATEGIES.register_module()
class ResumableFSDPStrategy(FSDPStrategy):  # type: ignore[misc]
    """mmengine's FSDPStrategy, that with ``state_dict_cfg='full'`` can also go on from a checkpoint.

    ``swin-dense train`` puts it in the other's place. mmengine 0.10.7 hands the state of the optimizer over in the
    order of torch 2.0, which torch has changed since.
    """

    def load_optim_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state that an optimizer had in a checkpoint, each process its part of it."""
        optimizer = self.optim_wrapper.optimizer
        own = FullyShardedDataParallel.optim_state_dict_to_load(
            model=self.model, optim=optimizer, optim_state_dict=state_dict
        )
        self.optim_wrapper.load_state_dict(own)
