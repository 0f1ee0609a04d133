"""Estimate the GPU memory of training without a GPU, or measure it on one.

Of Swin-L for a sequence of settings (rungs) that reduce it, and of Swin-T, B and L with adapters.

    python benchmarks/memory_ladder.py --json benchmarks/memory_ladder.json
    python benchmarks/memory_ladder.py --measure benchmarks/h200_memory.json

The backbone runs forward and backward on torch's meta device under the casting rules of CUDA autocast, with attention
as a GPU computes it: one operation that saves its inputs and its output, and one for its gradients. The peak is that of
all live memory allocated by operations: tensors saved for backward, temporaries of the backward pass, and gradients.
Weights and the two states of AdamW, all in float32, are added. This is not a measurement: overheads of the caching
allocator, workspaces of libraries and the CUDA context are not included.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from swin_dense import SwinBackbone
from swin_dense.ops import context

ARCH, WINDOW, SIZE = 'l', 12, (800, 1344)
DETECTOR_STAGES = (False, False, True, False)
ALL_STAGES = (True, True, True, True)
# The name of each rung, and the settings that it changes from the previous rung.
RUNGS: list[tuple[str, dict[str, Any]]] = [
    ('2 images, float32', {}),
    ('1 image, gradients of 2 accumulated', {'batch': 1}),
    ('bfloat16 by autocast', {'dtype': 'bfloat16'}),
    ("`with_cp='mlp'`", {'with_cp': 'mlp'}),
    ('`with_cp` in stage 3, which has 18 of 24 blocks', {'with_cp': DETECTOR_STAGES}),
    ('`with_cp` in all stages', {'with_cp': ALL_STAGES}),
    ('`frozen_stages=1`', {'frozen_stages': 1}),
    ('`frozen_stages=2`', {'frozen_stages': 2}),
    ('`frozen_stages=3`', {'frozen_stages': 3}),
]
# The window of each architecture, and ways to fine-tune it: one image per step, in bfloat16.
ARCHS = {'t': 7, 'b': 12, 'l': 12}
MONA, LORA = {'type': 'mona', 'dim': 64}, {'type': 'lora', 'rank': 8}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ('all weights', {}),
    ('all weights, `with_cp`', {'with_cp': ALL_STAGES}),
    ('all weights but `frozen_stages=2`', {'frozen_stages': 2}),
    ('Mona', {'adapter': MONA}),
    ('Mona, `with_cp`', {'adapter': MONA, 'with_cp': ALL_STAGES}),
    ('Mona in stages 3 and 4, `frozen_stages=2`', {'adapter': {**MONA, 'stages': (2, 3)}, 'frozen_stages': 2}),
    ('LoRA', {'adapter': LORA}),
    ('LoRA, `with_cp`', {'adapter': LORA, 'with_cp': ALL_STAGES}),
    ('LoRA in stages 3 and 4, `frozen_stages=2`', {'adapter': {**LORA, 'stages': (2, 3)}, 'frozen_stages': 2}),
]
_BYTES = 4  # per weight, gradient and state of AdamW


aten = torch.ops.aten
LOW_DTYPES = (torch.bfloat16, torch.float16)
# Functions used by the backbone that autocast runs in low precision, and those that it runs in float32.
TO_LOW = {F.linear, F.conv2d, torch.conv2d, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}
TO_FLOAT32 = {F.layer_norm, F.softmax, torch.softmax, torch.Tensor.softmax}


class Autocast(TorchFunctionMode):
    """The casting rules of CUDA autocast for tensors on the meta device. Casts of parameters are cached."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._parameters: dict[Tensor, Tensor] = {}

    def low(self, value: Any) -> Any:
        is_cast = (
            isinstance(value, Tensor) and value.dtype in (torch.float32, *LOW_DTYPES) and value.dtype != self.dtype
        )
        if not is_cast:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(self.dtype)
        if value not in self._parameters:
            self._parameters[value] = value.to(self.dtype)
        return self._parameters[value]

    def full(self, value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in LOW_DTYPES else value

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        cast = self.low if func in TO_LOW else self.full if func in TO_FLOAT32 else None
        if cast:
            args, kwargs = tuple(map(cast, args)), {key: cast(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


class _Attention(torch.autograd.Function):
    """scaled_dot_product_attention on a GPU: it saves its inputs and its output, and no weights."""

    @staticmethod
    def forward(ctx, q, k, v, mask):
        out = q.new_empty(q.shape)
        ctx.save_for_backward(q, k, v, out, mask)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, _, mask = ctx.saved_tensors
        return tuple(x.new_empty(x.shape) for x in (q, k, v, mask))


class PeakCounter(TorchDispatchMode):
    """Track the live bytes allocated by operations, and their FLOPs without those of attention.

    Attributes:
        peak: the maximum number of live bytes.
        flops: multiply-adds, each counted as two.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.flops = 0
        self._most = 0  # upper bound of live bytes; freed storages are subtracted only when it exceeds the peak
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._given: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._live:
                self._given[storage._cdata] = StorageWeakRef(storage)
        out = func(*args, **kwargs)
        if func is aten.convolution_backward.default:
            self.flops += _flops_of_gradients(*args)
        elif func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
        for storage in _storages(out):
            if storage._cdata not in self._given and storage._cdata not in self._live:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._most += storage.nbytes()
        if self._most > self.peak:
            self._most = self.live_bytes()
            self.peak = max(self.peak, self._most)
        return out

    def live_bytes(self, apart_from: tuple[Tensor, ...] = ()) -> int:
        """Return the bytes of allocated storages that still exist, without those of the given tensors."""
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        free = {storage._cdata for storage in _storages(apart_from)}
        return sum(nbytes for key, (_, nbytes) in self._live.items() if key not in free)


def _flops_of_gradients(grad, x, weight, _, *options) -> int:
    """Count the FLOPs of the gradients of a convolution; torch's count takes a depthwise one for a dense one."""
    *options, _, _, output_mask = options
    forward = flop_registry[aten.convolution](x, weight, None, *options, out_val=grad)
    return forward * sum(output_mask[:2])


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def prepare(
    settings: dict[str, Any], arch: str, size: tuple[int, int], device: str
) -> tuple[SwinBackbone, Tensor, torch.dtype]:
    """Return the backbone and the images of a training step on a device, and the dtype of autocast."""
    settings = dict(settings)
    batch, dtype = settings.pop('batch'), getattr(torch, settings.pop('dtype'))
    with torch.device(device):
        model = SwinBackbone(arch, **{'window_size': WINDOW, 'drop_path_rate': 0.0, **settings}).train()
        img = torch.zeros(batch, 3, *size)
    return model, img, dtype


def count_rung(settings: dict[str, Any], arch: str = ARCH, size: tuple[int, int] = SIZE) -> dict[str, Any]:
    """Count the bytes and FLOPs of one training step.

    Args:
        settings: 'batch', 'dtype' of autocast, and options of the backbone.
        arch: architecture of the backbone.
        size: size of the images, (H, W) in pixels.
    """
    model, img, dtype = prepare(settings, arch, size, 'meta')
    for _ in range(2):  # the first pass also fills caches
        counter = PeakCounter()
        model.zero_grad()
        kept = train_once(model, img, dtype, counter)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    result = {
        'weights': _BYTES * parameters,
        'gradients': _BYTES * trained,
        'optimizer': 2 * _BYTES * trained,
        'kept': kept,
        'peak': counter.peak,
        'flops': counter.flops,
    }
    return {**result, 'total': result['weights'] + result['optimizer'] + result['peak']}


def train_once(model: nn.Module, img: Tensor, dtype: torch.dtype, counter: PeakCounter) -> int:
    """Run a forward and a backward pass, and return the bytes that are live between them."""
    autocast = contextlib.nullcontext() if dtype == torch.float32 else Autocast(dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, **_: Any) -> Tensor:
        tensors = (q, k, v, attn_mask)
        return _Attention.apply(*(tensors if dtype == torch.float32 else map(autocast.low, tensors)))

    with (
        mock.patch.object(F, 'scaled_dot_product_attention', attend),
        mock.patch.object(context, 'needs_plain_operations', return_value=False),
        counter,
        autocast,  # in the backward pass too, where checkpoints compute again
    ):
        maps = model(img)
        kept = counter.live_bytes(apart_from=maps)
        trained = tuple(level for level in maps if level.requires_grad)  # frozen stages have none
        gradients = tuple(torch.empty_like(level) for level in trained)
        # torch.autograd.backward would disable the mode.
        torch.autograd.Variable._execution_engine.run_backward(trained, gradients, False, False, (), True, True)
    return kept


def measure_rung(settings: dict[str, Any]) -> dict[str, Any]:
    """Measure on a GPU what :func:`count_rung` counts, and the milliseconds of the step."""
    model, img, dtype = prepare(settings, ARCH, SIZE, 'cuda')
    img.normal_()
    for _ in range(3):  # the first pass also fills caches
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        with torch.autocast('cuda', dtype, enabled=dtype != torch.float32):
            maps = model(img)
        kept = torch.cuda.memory_allocated() - before - sum(level.nbytes for level in maps)
        trained = [level for level in maps if level.requires_grad]
        torch.autograd.backward(trained, [torch.ones_like(level) for level in trained])
        torch.cuda.synchronize()
        milliseconds = 1e3 * (time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() - before
        del maps, trained
    return {'kept': kept, 'peak': peak, 'milliseconds': milliseconds}


def ladder() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the settings of each rung. The changes of settings are cumulative."""
    settings: dict[str, Any] = {'batch': 2, 'dtype': 'float32', 'with_cp': False, 'frozen_stages': -1}
    for name, change in RUNGS:
        settings.update(change)
        yield name, dict(settings)


def count_all() -> list[dict[str, Any]]:
    """Count all rungs."""
    rungs = []
    for name, settings in ladder():
        rungs.append({'name': name, 'settings': settings, **count_rung(settings)})
        print(f'{name}: {rungs[-1]["total"] / 1e9:.1f} GB', flush=True)
    return rungs


def measure_all() -> list[dict[str, Any]]:
    """Measure all rungs, with torch's attention and with the kernel."""
    rungs = []
    for name, settings in ladder():
        for backend in ('sdpa', 'triton'):
            rungs.append({'name': name, 'backend': backend, **measure_rung({**settings, 'attn_backend': backend})})
            kept, peak, milliseconds = (rungs[-1][key] for key in ('kept', 'peak', 'milliseconds'))
            print(f'{name}, {backend}: {kept / 1e9:.2f} GB, {peak / 1e9:.2f} GB, {milliseconds:.0f} ms', flush=True)
    return rungs


def count_methods() -> list[dict[str, Any]]:
    """Count all ways to fine-tune each architecture."""
    counted = []
    for arch, window in ARCHS.items():
        for name, options in METHODS:
            settings = {'batch': 1, 'dtype': 'bfloat16', 'window_size': window, **options}
            counted.append({'arch': arch, 'name': name, 'settings': settings, **count_rung(settings, arch)})
            print(f'{arch}, {name}: {counted[-1]["total"] / 1e9:.2f} GB', flush=True)
    return counted


def table_of_methods(counted: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the table of adapters in the documentation. FLOPs are relative to those of all weights."""
    yield '| | trained | weights | gradients | AdamW | saved for backward | peak with gradients | total | FLOPs |'
    yield '| --- | --- | --- | --- | --- | --- | --- | --- | --- |'
    for row in counted:
        if row['name'] == METHODS[0][0]:
            first = row['flops']
            yield f'| **Swin-{row["arch"].upper()}**, window {row["settings"]["window_size"]} | | | | | | | | |'
        parts = ('weights', 'gradients', 'optimizer', 'kept', 'peak', 'total')
        yield (
            f'| {row["name"]} | {row["gradients"] / row["weights"]:.1%} | '
            + ' | '.join(f'{row[part] / 1e9:.2f} GB' for part in parts)
            + f' | {row["flops"] / first:.2f} |'
        )


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
    parser.add_argument('--measure', type=Path, help='run the settings of Swin-L on a GPU, and write what they need')
    args = parser.parse_args()
    if args.measure:
        measured = {'device': torch.cuda.get_device_name(), 'torch': torch.__version__, 'rungs': measure_all()}
        args.measure.write_text(json.dumps(measured, indent=1) + '\n')
        return
    rungs = count_all()
    print(*table(rungs), sep='\n')
    methods = count_methods()
    print(*table_of_methods(methods), sep='\n')
    if args.json:
        facts = {'arch': ARCH, 'window': WINDOW, 'size': SIZE, 'torch': torch.__version__}
        report = {**facts, 'rungs': rungs, 'methods': methods}
        args.json.write_text(json.dumps(report, indent=1) + '\n')


if __name__ == '__main__':
    main()
