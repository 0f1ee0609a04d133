"""What a Swin would launch, move and keep on a GPU, counted without one.

    python benchmarks/gpu_estimate.py mmdet ours:auto                          inference, 1 x 800 x 1344
    python benchmarks/gpu_estimate.py mmdet ours:auto --train --batch 2        a training step
    python benchmarks/gpu_estimate.py ours:auto --detail --json counts.json    operation by operation

The model runs on torch's meta device, so nothing is computed. Every operation that would be a kernel counts with the
bytes that it reads and writes and with its FLOPs, under the casting rules of CUDA autocast. torch's scaled dot-product
attention counts as one kernel forward and two backward; an operator of this package as the launches and bytes of
``operator_costs.py``, and one that is not there is an error. The estimated time is the sum over kernels of the largest
of launch, bytes / bandwidth and FLOPs / peak. In training, the memory that the forward pass saves for the backward pass
is weighed too.

It compares two ways of doing the same work. It is no measurement.

``ours:auto`` takes the path that it takes on a GPU where its kernels proved themselves; ``pretend_gpu`` arranges it.
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

# Achievable rather than data-sheet figures of an H100 SXM: bytes/s, FLOP/s, seconds from one launch to the next.
BANDWIDTH, PEAK_LOW, PEAK_FLOAT32, LAUNCH = 2.8e12, 600e12, 50e12, 5e-6
MULTIPROCESSORS = 132

LOW_DTYPES = (torch.bfloat16, torch.float16)
# torch's own operations that take more than one kernel.
LAUNCHES = {'aten::native_layer_norm_backward': 2, 'estimate::sdpa_backward': 2}
# What autocast casts to low precision, and what to float32, of all that the models call;
# tests/tools/test_gpu_estimate.py asks torch's own autocast about each.
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
    """The casting rules of CUDA autocast for tensors on the meta device; parameters are cast once per region."""

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
    """What one operation came to, all its calls together."""

    launches: int = 0
    bytes: int = 0
    flops: int = 0
    seconds: float = 0.0
    kept_bytes: int = 0


class Counter(TorchDispatchMode):
    """Count what would be kernels, by operation, and remember which of them made which memory."""

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
                # A weak reference keeps the address from being used again.
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
        """Write down the bytes that are still there, by the operation that made them, less those of the outputs."""
        free = {out.untyped_storage()._cdata for out in outs}
        for key, (storage, nbytes, name) in self._storages.items():
            if nbytes and key not in free and not storage.expired():
                self.rows[name].kept_bytes += nbytes


def _is_free(name: str) -> bool:
    """Return whether an operation that is no view costs nothing on a GPU all the same."""
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
    """Return the bytes of memory behind a tensor; what is expanded is there once."""
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
    """What one pass of a model comes to."""

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
    """Count one pass of a model that is on the meta device over an image of ``shape``, under autocast.

    Args:
        model: returns its maps as a tuple or a list.
        shape: (B, 3, H, W).
        train: whether the backward pass is counted too, as far as the gradients of the parameters.
        dtype: of autocast; torch.float32 for none.
        name: what the result is to be called.
        counter: what counts, where more than the result is asked for.
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
            with autocast:  # what a checkpoint computes again, it does under the autocast of the forward pass
                trained = tuple(out for out in outs if out.requires_grad)  # not those of frozen stages
                grads = tuple(torch.empty_like(out) for out in trained)
                # Straight to the engine: torch.autograd.backward would turn the mode off.
                torch.autograd.Variable._execution_engine.run_backward(trained, grads, False, False, (), True, True)
            model.zero_grad(set_to_none=True)
    return Count(name, dict(counter.rows))


@contextlib.contextmanager
def pretend_gpu(dtype: torch.dtype) -> Iterator[None]:
    """Let this package's model take the path on the meta device that it takes on a GPU whose kernels it may use."""
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
    """Build a model on the meta device, without stochastic depth; ours with further options."""
    from swin_dense import SwinBackbone
    from swin_dense.models.archs import resolve_arch

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
    raise SystemExit(f'unknown model {name!r}: mmdet, timm, ours:auto, ours:sdpa, ours:triton, ours:reference')


def line(done: Count, first: Count) -> str:
    """Return a line about a model, compared with the first one."""
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
    parser.add_argument('models', nargs='+', help='mmdet, timm, or ours: and a backend')
    parser.add_argument('--arch', default='t', choices=('t', 's', 'b', 'l'))
    parser.add_argument('--batch', type=int, default=1)
    parser.add_argument('--size', type=int, nargs=2, default=[800, 1344], metavar=('HEIGHT', 'WIDTH'), help='in pixels')
    parser.add_argument('--train', action='store_true', help='a training step in place of inference')
    parser.add_argument('--dtype', default='bfloat16', choices=('bfloat16', 'float16', 'float32'), help='of autocast')
    parser.add_argument('--detail', action='store_true', help='operation by operation')
    parser.add_argument('--json', type=Path, help='write all counts into this file')
    args = parser.parse_args()
    shape, dtype = (args.batch, 3, *args.size), getattr(torch, args.dtype)
    counts: list[Count] = []
    for name in args.models:
        model = build(name, args.arch, tuple(args.size))
        for _ in range(2):  # the first pass also builds what is kept from pass to pass
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
