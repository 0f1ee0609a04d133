"""What a training of Swin-L takes of a GPU's memory, counted without one, rung by rung of what makes it less.

    python benchmarks/memory_ladder.py --json benchmarks/memory_ladder.json

The backbone alone runs forward and backward on torch's meta device, with the operations that it runs on a GPU
(``gpu_estimate.py``). The peak is that of all memory which the operations made and which was still there: what is kept
for the backward pass, what a step of it makes, and gradients. Weights and the two states of AdamW, all in float32, are
added. A caching allocator, workspaces of libraries and the context of CUDA come on top; it is no measurement.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_estimate
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

ARCH, WINDOW, SIZE = 'l', 12, (800, 1344)
DETECTOR_STAGES = (False, False, True, False)
ALL_STAGES = (True, True, True, True)
# What each rung is called, and what of the training it changes from the one before.
RUNGS: list[tuple[str, dict[str, Any]]] = [
    ('2 images, float32', {}),
    ('1 image, gradients of 2 accumulated', {'batch': 1}),
    ('bfloat16 by autocast', {'dtype': 'bfloat16'}),
    ('`with_cp` in stage 3, which has 18 of 24 blocks', {'with_cp': DETECTOR_STAGES}),
    ('`with_cp` in all stages', {'with_cp': ALL_STAGES}),
    ('`frozen_stages=1`', {'frozen_stages': 1}),
    ('`frozen_stages=2`', {'frozen_stages': 2}),
    ('`frozen_stages=3`', {'frozen_stages': 3}),
]
_BYTES = 4  # of a weight, a gradient and each state of AdamW


class PeakCounter(gpu_estimate.Counter):
    """Watch how many bytes of what operations made are there at a time.

    Attributes:
        peak: the most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._most = 0  # as many bytes may be there: those of what is gone are taken off when it matters
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._live:
                self._given[storage._cdata] = StorageWeakRef(storage)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        for storage in _storages(out):
            if storage._cdata not in self._given and storage._cdata not in self._live:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._most += storage.nbytes()
        if self._most > self.peak:
            self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
            self._most = sum(nbytes for _, nbytes in self._live.values())
            self.peak = max(self.peak, self._most)
        return out


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def count_rung(settings: dict[str, Any], arch: str = ARCH, size: tuple[int, int] = SIZE) -> dict[str, Any]:
    """Count the bytes and the products of one training step.

    Args:
        settings: 'batch', 'dtype' of autocast, and options of the backbone.
        arch: its size.
        size: of the images, (H, W) in pixels.
    """
    settings = dict(settings)
    batch, dtype = settings.pop('batch'), getattr(torch, settings.pop('dtype'))
    model = gpu_estimate.build('ours:sdpa', arch, size, window_size=WINDOW, **settings)
    for _ in range(2):  # the first pass also builds what is kept from pass to pass
        counter = PeakCounter()
        done = gpu_estimate.count(model, (batch, 3, *size), True, dtype, counter=counter)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    result = {
        'weights': _BYTES * parameters,
        'optimizer': 2 * _BYTES * trained,
        'kept': done.total('kept_bytes'),
        'peak': counter.peak,
        'flops': done.total('flops'),
    }
    return {**result, 'total': result['weights'] + result['optimizer'] + result['peak']}


def count_all() -> list[dict[str, Any]]:
    """Count every rung, each with what the ones before it changed."""
    settings: dict[str, Any] = {'batch': 2, 'dtype': 'float32', 'with_cp': False, 'frozen_stages': -1}
    rungs = []
    for name, change in RUNGS:
        settings.update(change)
        rungs.append({'name': name, 'settings': dict(settings), **count_rung(settings)})
        print(f'{name}: {rungs[-1]["total"] / 1e9:.1f} GB', flush=True)
    return rungs


def table(rungs: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page's table; products are per image, relative to the first rung."""
    yield '| setting, cumulative | weights, AdamW | saved for backward | peak with gradients | total | FLOPs |'
    yield '| --- | --- | --- | --- | --- | --- |'
    first = rungs[0]['flops'] / rungs[0]['settings']['batch']
    for rung in rungs:
        numbers = (rung['weights'] + rung['optimizer'], rung['kept'], rung['peak'], rung['total'])
        products = rung['flops'] / rung['settings']['batch'] / first
        yield (
            f'| {rung["name"]} | ' + ' | '.join(f'{number / 1e9:.1f} GB' for number in numbers) + f' | {products:.2f} |'
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--json', type=Path, help='write all counts into this file')
    args = parser.parse_args()
    rungs = count_all()
    print(*table(rungs), sep='\n')
    if args.json:
        report = {'arch': ARCH, 'window': WINDOW, 'size': SIZE, 'torch': torch.__version__, 'rungs': rungs}
        args.json.write_text(json.dumps(report, indent=1) + '\n')


if __name__ == '__main__':
    main()
