"""Train with DDP, FSDP2 and mmengine's FSDP over gloo, and compare the losses with those of one process."""

import gc
import sys
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.nn.parallel import DistributedDataParallel

from swin_dense import SwinBackbone
from swin_dense.models.block import SwinBlock
from tests.conftest import TINY, randomize

CASES = {
    **{f'out_indices={stage}': {'out_indices': (stage,)} for stage in range(4)},
    'all outputs': {},
    'frozen_stages=2': {'frozen_stages': 2},
    'with_cp': {'with_cp': True},
    'drop_path': {'drop_path_rate': 0.3},
}
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}
# The effects of float32 show in one case.
RUNS = [*((name, torch.float64) for name in CASES), ('all outputs', torch.float32)]


class Losses(nn.Module):
    """A backbone that returns its loss: the sum over the maps of a mean square, which is a mean over the images too."""

    def __init__(self, options):
        super().__init__()
        options = {'drop_path_rate': 0.0, **options}
        self.backbone = SwinBackbone(**TINY, **options)

    def forward(self, images):
        maps = self.backbone(images)
        return torch.stack([(out - 0.1).square().mean() for out in maps]).sum()


def make(options, dtype):
    return randomize(Losses(options).to(dtype))


def train(model, parts):
    """Return the losses of two steps, each the mean over the parts of a batch; the keys are seeds for drop path."""
    states = {seed: torch.Generator().manual_seed(seed).get_state() for seed in parts}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(torch.zeros((), dtype=torch.float64))
        for seed, images in parts.items():
            torch.set_rng_state(states[seed])
            loss = model(images) / len(parts)
            states[seed] = torch.get_rng_state()
            loss.backward()
            losses[-1] += loss.detach()
        optimizer.step()
    return losses


def train_together(model, images):
    """Return the losses averaged over the processes, each of which trains on its part of the images."""
    rank = dist.get_rank()
    losses = train(model, {rank: images.chunk(dist.get_world_size())[rank]})
    for loss in losses:
        dist.all_reduce(loss)
    return [loss / dist.get_world_size() for loss in losses]


def train_alone(model, images, *, by_parts):
    """Return the losses of one process: the whole batch in one pass, or the parts of all processes in sequence."""
    return train(model, dict(enumerate(images.chunk(dist.get_world_size()))) if by_parts else {0: images})


def shard(model):
    for stage in model.backbone.stages:
        for block in stage.blocks:
            fsdp.fully_shard(block)
    fsdp.fully_shard(model)
    return model


def shard_parts(model):
    """Apply fully_shard to each attention and MLP, each stage with its patch merging, then to the model."""
    for stage in model.backbone.stages:
        for block in stage.blocks:
            fsdp.fully_shard(block.attn.w_msa)
            fsdp.fully_shard(block.ffn)
        fsdp.fully_shard(stage)
    fsdp.fully_shard(model)
    return model


def shard_by_mmengine(model):
    """Shard each block, then the model, as mmengine's FSDPStrategy does with swin_auto_wrap_policy."""
    from mmengine.registry import MODEL_WRAPPERS

    wrapper = {'type': 'MMFullyShardedDataParallel', 'auto_wrap_policy': 'swin_auto_wrap_policy', 'device_id': 'cpu'}
    blocks = count(model, SwinBlock)
    sharded = MODEL_WRAPPERS.build(wrapper, default_args={'module': model})
    assert count(sharded, fsdp.FullyShardedDataParallel) == blocks + 1
    return sharded


def count(model, kind):
    return sum(isinstance(module, kind) for module in model.modules())


WRAPPERS = {'DDP': DistributedDataParallel}
if torch.__version__ >= '2.6':
    WRAPPERS['FSDP2'] = shard
    WRAPPERS['FSDP2 of parts'] = shard_parts
if find_spec('mmengine') and '__init__' in vars(torch.cpu.Stream):  # FSDP on a CPU needs it; torch 2.1 lacks it
    WRAPPERS['FSDP of mmengine'] = shard_by_mmengine


def main():
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    for name, dtype in RUNS:
        options, tolerance = CASES[name], TOLERANCES[dtype]
        images = torch.randn(4, 3, 40, 56, generator=torch.Generator().manual_seed(0)).to(dtype)
        expected = train_alone(make(options, dtype), images, by_parts='drop_path_rate' in options)
        for wrapper, wrap in WRAPPERS.items():
            model = make(options, dtype)
            model = wrap(model)
            found = train_together(model, images)
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)
            if dist.get_rank() == 0:
                print(f'{wrapper}, {name}, {dtype}: passed', flush=True)
    gc.collect()  # reference cycles keep models alive, and with them gloo's threads, which must end before Python does
    dist.destroy_process_group()


if __name__ == '__main__':
    sys.exit(main())
