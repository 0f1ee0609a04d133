"""Estimate the GPU memory of training Swin-L without a GPU, for a sequence of settings (rungs) that reduce it.

    python benchmarks/memory_ladder.py --json benchmarks/memory_ladder.json

The backbone runs forward and backward on torch's meta device, with the operations of a GPU (``gpu_estimate.py``). The
peak is that of all live memory allocated by operations: tensors saved for backward, temporaries of the backward pass,
and gradients. Weights and the two states of AdamW, all in float32, are added. This is not a measurement: overheads of
the caching allocator, workspaces of libraries and the CUDA context are not included.
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
# The name of each rung, and the settings that it changes from the previous rung.
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
_BYTES = 4  # per weight, gradient and state of AdamW


class PeakCounter(gpu_estimate.Counter):
    """Track the live bytes allocated by operations.

    Attributes:
        peak: the maximum number of live bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._most = 0  # upper bound of live bytes; freed storages are subtracted only when it exceeds the peak
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
    """Count the bytes and FLOPs of one training step.

    Args:
        settings: 'batch', 'dtype' of autocast, and options of the backbone.
        arch: architecture of the backbone.
        size: size of the images, (H, W) in pixels.
    """
    settings = dict(settings)
    batch, dtype = settings.pop('batch'), getattr(torch, settings.pop('dtype'))
    model = gpu_estimate.build('ours:sdpa', arch, size, window_size=WINDOW, **settings)
    for _ in range(2):  # the first pass also fills caches
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
    """Count all rungs. The changes of settings are cumulative."""
    settings: dict[str, Any] = {'batch': 2, 'dtype': 'float32', 'with_cp': False, 'frozen_stages': -1}
    rungs = []
    for name, change in RUNGS:
        settings.update(change)
        rungs.append({'name': name, 'settings': dict(settings), **count_rung(settings)})
        print(f'{name}: {rungs[-1]["total"] / 1e9:.1f} GB', flush=True)
    return rungs


def table(rungs: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table in the documentation. FLOPs are per image, relative to the first rung."""
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
    parser.add_argument('--json', type=Path, help='write all counts to this file')
    args = parser.parse_args()
    rungs = count_all()
    print(*table(rungs), sep='\n')
    if args.json:
        report = {'arch': ARCH, 'window': WINDOW, 'size': SIZE, 'torch': torch.__version__, 'rungs': rungs}
        args.json.write_text(json.dumps(report, indent=1) + '\n')


if __name__ == '__main__':
    main()
