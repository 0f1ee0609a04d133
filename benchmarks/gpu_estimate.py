"""Estimate the kernel launches, memory traffic, saved memory and time of a Swin on a GPU, without a GPU.

    python benchmarks/gpu_estimate.py mmdet ours:auto                          inference, 1 x 800 x 1344
    python benchmarks/gpu_estimate.py mmdet ours:auto --train --batch 2        a training step
    python benchmarks/gpu_estimate.py ours:auto --detail --json counts.json    operation by operation

The model runs on torch's meta device, so nothing is computed. Each operation that would launch a kernel is counted with
the bytes that it reads and writes and with its FLOPs, under the casting rules of CUDA autocast. torch's scaled
dot-product attention counts as one kernel forward and two backward. Operators of this package have the costs given in
``operator_costs.py``; a missing entry is an error. The estimated time is the sum over kernels of the maximum of launch
time, bytes / bandwidth and FLOPs / peak. For training, the memory saved for backward is also counted.

The result is for comparing two implementations of the same work. It is not a measurement.

``ours:auto`` takes the path of a GPU on which all kernels were verified; see ``pretend_gpu``.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from operator_costs import COSTS, OperatorCost
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from swin_dense.ops import context
from swin_dense.ops.triton import gpu

# Achievable values of an H100 SXM, lower than its data sheet: bytes/s, FLOP/s, seconds between launches.
BANDWIDTH, PEAK_LOW, PEAK_FLOAT32, LAUNCH = 2.8e12, 600e12, 50e12, 5e-6
MULTIPROCESSORS = 132

LOW_DTYPES = (torch.bfloat16, torch.float16)
# torch's own operations with more than one kernel.
LAUNCHES = {'aten::native_layer_norm_backward': 2, 'estimate::sdpa_backward': 2}
# Functions used by the models that autocast runs in low precision, and those that it runs in float32.
# tests/tools/test_gpu_estimate.py compares them with torch's own autocast.
TO_LOW = {
    F.linear,
    F.conv2d,
    torch.conv2d,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.mm,
    torch.bmm,
}
TO_LOW |= {torch.addmm, torch.baddbmm, torch.addbmm}
TO_FLOAT32 = {F.layer_norm, F.softmax, torch.softmax, torch.Tensor.softmax}


class Autocast(TorchFunctionMode):
    """The casting rules of CUDA autocast for tensors on the meta device. Casts of parameters are cached."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._parameters: dict[Tensor, Tensor] = {}

    def low(self, value: Any) -> Any:
        if (
            not isinstance(value, Tensor)
            or value.dtype not in (torch.float32, *LOW_DTYPES)
            or value.dtype == self.dtype
        ):
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


@dataclass
class Row:
    """The total cost of all calls of one operation."""

    launches: int = 0
    bytes: int = 0
    flops: int = 0
    seconds: float = 0.0
    kept_bytes: int = 0


class Counter(TorchDispatchMode):
    """Count kernels by operation, and record which operation allocated which memory."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[str, Row] = collections.defaultdict(Row)
        self._storages: dict[int, tuple[StorageWeakRef, int, str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        out = func(*args, **kwargs)
        name = func._schema.name
        made = _tensors(out)
        for tensors, is_new in ((given, False), (made, True)):
            for storage in (tensor.untyped_storage() for tensor in tensors):
                # The weak reference prevents reuse of the address.
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes() if is_new else 0, name
        if func.is_view or _is_free(name):
            return out
        cost = _cost(func, name, args, kwargs, out)
        peak = PEAK_LOW if (made or given)[0].dtype in LOW_DTYPES else PEAK_FLOAT32
        row = self.rows[name]
        row.launches += cost.launches
        row.bytes += cost.bytes
        row.flops += cost.flops
        row.seconds += max(cost.launches * LAUNCH, cost.bytes / BANDWIDTH, cost.flops / peak)
        return out

    def weigh(self, outs: tuple[Tensor, ...]) -> None:
        """Record the bytes that are still live, except those of the outputs, by the operation that allocated them."""
        free = {out.untyped_storage()._cdata for out in outs}
        for key, (storage, nbytes, name) in self._storages.items():
            if nbytes and key not in free and not storage.expired():
                self.rows[name].kept_bytes += nbytes


def _is_free(name: str) -> bool:
    """Return whether an operation that is not a view nevertheless costs nothing on a GPU."""
    words = ('prim::', 'detach', 'aten::empty', 'new_empty', 'empty_like', '_unsafe_view', 'alias')
    return any(word in name for word in words)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _cost(func: Any, name: str, args: tuple, kwargs: dict, out: Any) -> OperatorCost:
    if name in COSTS:
        return COSTS[name](*args, **kwargs)
    if name.startswith('swin_dense::'):
        raise RuntimeError(f'the operator {name} has no cost; add it to benchmarks/operator_costs.py')
    moved = sum(_bytes(t) for t in _tensors((args, kwargs, out)))
    return OperatorCost(LAUNCHES.get(name, 1), moved, _flops(func, name, args, kwargs, out))


def _bytes(t: Tensor) -> int:
    """Return the bytes of memory of a tensor. Expanded dimensions count once."""
    return math.prod(size for size, stride in zip(t.shape, t.stride(), strict=True) if stride) * t.element_size()


def _flops(func: Any, name: str, args: tuple, kwargs: dict, out: Any) -> int:
    if func.overloadpacket in flop_registry:
        return flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
    if name == 'estimate::sdpa':
        return 4 * args[0].numel() * args[0].shape[-2]
    if name == 'estimate::sdpa_backward':
        return 10 * args[1].numel() * args[1].shape[-2]
    return 0


@torch.library.custom_op('estimate::sdpa', mutates_args=())
def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    raise NotImplementedError('for the meta device')


@_sdpa.register_fake
def _(q, k, v, mask):
    return q.new_empty(q.shape)


@torch.library.custom_op('estimate::sdpa_backward', mutates_args=())
def _sdpa_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raise NotImplementedError('for the meta device')


@_sdpa_backward.register_fake
def _(grad, q, k, v, out, mask):
    return tuple(t.new_empty(t.shape) for t in (q, k, v, q[:0] if mask is None else mask))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3], output, inputs[3])


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, mask = ctx.saved_tensors
    *grads, grad_mask = _sdpa_backward(grad, q, k, v, out, mask)
    return *grads, None if mask is None else grad_mask


_sdpa.register_autograd(_gradients, setup_context=_save)


@dataclass
class Count:
    """The cost of one pass of a model, by operation."""

    model: str
    rows: dict[str, Row] = field(default_factory=dict)

    def total(self, name: str) -> Any:
        return sum(getattr(row, name) for row in self.rows.values())


def count(
    model: nn.Module,
    shape: tuple[int, ...],
    train: bool,
    dtype: torch.dtype,
    name: str = '',
    counter: Counter | None = None,
) -> Count:
    """Count one pass of a model on the meta device under autocast.

    Args:
        model: a model that returns its maps as a tuple or a list.
        shape: shape of the image, (B, 3, H, W).
        train: whether to include the backward pass for the gradients of the parameters.
        dtype: dtype of autocast; torch.float32 disables it.
        name: name of the model in the result.
        counter: the counter to use, if the caller needs more than the result.
    """
    img = torch.empty(shape, device='meta')
    autocast = contextlib.nullcontext() if dtype == torch.float32 else Autocast(dtype)

    def attend(q, k, v, attn_mask=None, *args, **kwargs):
        tensors = (q, k, v, attn_mask)
        return _sdpa(*(tensors if dtype == torch.float32 else map(autocast.low, tensors)))

    model.train(train)
    with (
        torch.set_grad_enabled(train),
        mock.patch.object(F, 'scaled_dot_product_attention', attend),
        pretend_gpu(dtype),
        counter or Counter() as counter,
    ):
        with autocast:
            outs = tuple(model(img))
        if train:
            counter.weigh(outs)
            with autocast:  # gradient checkpointing recomputes under the autocast of the forward pass
                trained = tuple(out for out in outs if out.requires_grad)  # excludes frozen stages
                grads = tuple(torch.empty_like(out) for out in trained)
                # Call the engine directly, because torch.autograd.backward would disable the mode.
                torch.autograd.Variable._execution_engine.run_backward(trained, grads, False, False, (), True, True)
            model.zero_grad(set_to_none=True)
    return Count(name, dict(counter.rows))


@contextlib.contextmanager
def pretend_gpu(dtype: torch.dtype) -> Iterator[None]:
    """Make this package's models take the path of a GPU with verified kernels on the meta device."""
    from swin_dense.ops import plan, sdpa
    from swin_dense.ops.triton import verdicts

    plans: dict[tuple, plan.Plan] = {}

    def plan_windows(height, width, window, shift, device):
        key = height, width, window, shift
        if key not in plans:
            made = plan.plan_windows(*key, torch.device('cpu'))
            groups = [
                plan.Group(*(t if t is None else t.to('meta') for t in (g.tokens, g.padding, g.mask)))
                for g in made.groups
            ]
            plans[key] = plan.Plan(tuple(groups), made.slots.to('meta'))
        return plans[key]

    with (
        mock.patch.object(gpu, 'unsupported_reason', return_value=None),
        mock.patch.object(gpu, 'is_gpu', return_value=True),
        mock.patch.object(verdicts, '_reason_against', return_value=None),
        mock.patch.object(gpu, 'multiprocessors', return_value=MULTIPROCESSORS),
        mock.patch.object(gpu, 'autocast_dtype', return_value=None if dtype == torch.float32 else dtype),
        mock.patch.object(context, 'has_values', return_value=True),
        mock.patch.object(sdpa, 'plan_windows', plan_windows),
    ):
        yield


def build(name: str, arch: str, size: tuple[int, int], **options: Any) -> nn.Module:
    """Build a model on the meta device, without stochastic depth. ``options`` are for our backbone only."""
    from swin_dense import SwinBackbone
    from swin_dense.archs import resolve_arch

    a = resolve_arch(arch)
    if name.startswith('ours:'):
        backend = name.removeprefix('ours:')
        return SwinBackbone(arch, attn_backend=backend, drop_path_rate=0.0, **options).to('meta')
    if name == 'mmdet':
        from mmdet.models.backbones.swin import SwinTransformer

        options = {'embed_dims': a.embed_dims, 'depths': a.depths, 'num_heads': a.num_heads, 'drop_path_rate': 0.0}
        return SwinTransformer(**options).to('meta')
    if name == 'timm':
        import timm

        full = {'t': 'tiny', 's': 'small', 'b': 'base', 'l': 'large'}[arch]
        options = {'features_only': True, 'img_size': size, 'drop_path_rate': 0.0}
        return timm.create_model(f'swin_{full}_patch4_window7_224', **options).to('meta')
    raise SystemExit(
        f'models must be of mmdet, timm, ours:auto, ours:sdpa, ours:triton and ours:reference, got {name!r}'
    )


def line(done: Count, first: Count) -> str:
    """Return one line with the totals of a model, compared with the first model."""
    launches, gb, gflops = done.total('launches'), done.total('bytes') / 1e9, done.total('flops') / 1e9
    kept, kept_by_first = done.total('kept_bytes'), first.total('kept_bytes')
    keeps = f'keeps {kept / 1e9:5.2f} GB ({kept / kept_by_first:.2f} of {first.model}), ' if kept_by_first else ''
    seconds, times = done.total('seconds'), first.total('seconds') / done.total('seconds')
    return (
        f'{done.model:14s} {launches:5d} launches {gb:7.2f} GB {gflops:7.0f} GFLOP, {keeps}'
        f'estimated {1e3 * seconds:6.2f} ms, {times:.2f} times {first.model}'
    )


def detail(done: Count, most: int = 25) -> Iterator[str]:
    for name, row in sorted(done.rows.items(), key=lambda item: -item[1].seconds)[:most]:
        yield (
            f'    {name:48s} {row.launches:5d} {row.bytes / 1e9:8.3f} GB {row.flops / 1e9:7.1f} GFLOP '
            f'{1e3 * row.seconds:7.3f} ms, keeps {row.kept_bytes / 1e9:6.3f} GB'
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('models', nargs='+', help='mmdet, timm or ours:BACKEND')
    parser.add_argument('--arch', default='t', choices=('t', 's', 'b', 'l'))
    parser.add_argument('--batch', type=int, default=1)
    parser.add_argument('--size', type=int, nargs=2, default=[800, 1344], metavar=('HEIGHT', 'WIDTH'), help='in pixels')
    parser.add_argument('--train', action='store_true', help='count a training step instead of inference')
    parser.add_argument('--dtype', default='bfloat16', choices=('bfloat16', 'float16', 'float32'), help='for autocast')
    parser.add_argument('--detail', action='store_true', help='also print the counts by operation')
    parser.add_argument('--json', type=Path, help='write all counts to this file')
    args = parser.parse_args()
    shape, dtype = (args.batch, 3, *args.size), getattr(torch, args.dtype)
    counts: list[Count] = []
    for name in args.models:
        model = build(name, args.arch, tuple(args.size))
        for _ in range(2):  # the first pass also fills caches
            done = count(model, shape, args.train, dtype, name)
        counts.append(done)
        print(line(done, counts[0]))
        if args.detail:
            print(*detail(done), sep='\n')
    if args.json:
        report = {'options': {**vars(args), 'json': None}, 'lines': [line(done, counts[0]) for done in counts]}
        report['counts'] = {done.model: {name: asdict(row) for name, row in done.rows.items()} for done in counts}
        args.json.write_text(json.dumps(report, indent=1) + '\n')


if __name__ == '__main__':
    main()
