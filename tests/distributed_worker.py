"""Two processes over gloo: losses and gradients under DDP and FSDP2 equal those of one process with the whole batch."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from swin_dense import SwinBackbone
from tests.conftest import TINY, randomize

CASES = {
    **{f'out_indices={stage}': {'out_indices': (stage,)} for stage in range(4)},
    'all outputs': {},
    'frozen_stages=2': {'frozen_stages': 2},
    'with_cp': {'with_cp': True},
    'drop_path': {'drop_path_rate': 0.3},
}
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}


class Losses(nn.Module):
    """A backbone whose output is its loss: the mean square of its maps, which is a mean over the images too."""

    def __init__(self, options: dict) -> None:
        super().__init__()
        self.backbone = SwinBackbone(**TINY, **{'drop_path_rate': 0.0, **options})

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.stack([(out - 0.1).square().mean() for out in self.backbone(images)]).sum()


def make(options: dict, dtype: torch.dtype) -> Losses:
    """Return the same model in every process."""
    return randomize(Losses(options).to(dtype))


def train(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """Return the losses of three steps, of all processes together where there are several."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(images)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def train_together(model: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    """Return the means over the processes, each of which has its part of the images."""
    losses = train(model, images.chunk(dist.get_world_size())[dist.get_rank()])
    for loss in losses:
        dist.all_reduce(loss)
    return [loss / dist.get_world_size() for loss in losses]


def shard(model: Losses) -> Losses:
    """Shard every block, and then the whole."""
    for stage in model.backbone.layers:
        for block in stage.blocks:
            fully_shard(block)
    fully_shard(model)
    return model


def main() -> None:
    """Run every case and say which are well."""
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    for name, options in CASES.items():
        for dtype, tolerance in TOLERANCES.items():
            images = torch.randn(4, 3, 40, 56, generator=torch.Generator().manual_seed(0)).to(dtype)
            ways = {'DDP': lambda model: DistributedDataParallel(model)}
            if dtype == torch.float32 and name in ('all outputs', 'with_cp'):
                ways['FSDP2'] = shard
            for way, wrap in ways.items():
                found = train_together(wrap(make(options, dtype)), images)
                if name == 'drop_path':  # drawn apart in each process
                    assert all(loss.isfinite() for loss in found)
                else:
                    torch.testing.assert_close(found, train(make(options, dtype), images), rtol=tolerance, atol=0)
                if dist.get_rank() == 0:
                    print(f'{way}, {name}, {dtype}: well', flush=True)
    dist.destroy_process_group()


if __name__ == '__main__':
    sys.exit(main())
