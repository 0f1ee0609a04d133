"""Support for mmengine's FSDP strategy: sharding by block, and resuming."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from swin_dense.models.block import SwinBlock
from swin_dense.utils import private_mm

_FSDPStrategy: Any = private_mm.fsdp_strategy()
if _FSDPStrategy is None:
    raise ImportError('there is no FSDPStrategy in mmengine._strategy with these versions of mmengine and torch')


def swin_auto_wrap_policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Wrap every Swin block in its own FSDP unit; the rest of the model forms one unit.

    In a config: ``strategy = dict(type='FSDPStrategy', model_wrapper=dict(auto_wrap_policy='swin_auto_wrap_policy'))``.
    FSDP asks with ``recurse`` whether to visit the children of a module, and without it whether to wrap the module.
    """
    return recurse or isinstance(module, SwinBlock)


class ResumableFSDPStrategy(_FSDPStrategy):  # type: ignore[misc]
    """mmengine's FSDPStrategy that can also resume from a checkpoint with ``state_dict_cfg='full'``.

    ``swin-dense train`` replaces FSDPStrategy by this class. mmengine 0.10.7 passes the optimiser state with the
    argument order of torch 2.0, which torch has changed since.
    """

    def load_optim_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimiser state of a checkpoint; each process loads its shard."""
        optimizer = self.optim_wrapper.optimizer
        own = FullyShardedDataParallel.optim_state_dict_to_load(
            model=self.model, optim=optimizer, optim_state_dict=state_dict
        )
        self.optim_wrapper.load_state_dict(own)
