"""Count what the host does in one pass of a Swin-T and in one training step: numbers, not times, and without a GPU.

    python benchmarks/host_cost.py ours mmdet
    .venv-peers/bin/python benchmarks/host_cost.py timm torchvision transformers
    python benchmarks/host_cost.py ours --functions 40       # prints what is called most, and writes nothing

In eager mode a GPU waits for its host, which calls Python functions, functions in C and operations of torch (aten
events of its profiler, most of which are views). The numbers are the same in every run. Each row has them for
inference, and for a training step, forward and backward, of a 192 x 320 image. Python calls outside of ``torch.nn`` are
those that a model makes beyond those of its modules.

Three rows are counted as on a GPU: tensors on the CPU say that they are on a GPU, and nothing is launched. Triton's
own calls in a launch are missing there, as is what torch's attention does within its operator on a GPU. All are counted
as on processors without oneDNN's linear layers: on AMD's Zen 5, each of the 51 layers makes one call more on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from bench_models import build_ours, build_peer
from measurements import RESULTS, Run
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from swin_dense.models import layers
from swin_dense.ops import linear
from swin_dense.ops.triton import attention, choice, gpu, norm
from swin_dense.utils import private

SIZE = (192, 320)
# The backend of each row, whether tensors say that they are on a GPU, and whether its kernels have passed their trial.
OURS = {
    "torch's attention": ('auto', False, False),
    "torch's attention, as on a GPU": ('auto', True, False),
    'the kernels, as on a GPU': ('auto', True, True),
    'plain operations': ('reference', False, False),
}
PEERS = ('mmdet', 'timm', 'torchvision', 'transformers')
VIEWS = re.compile(
    'aten::(alias|as_strided|chunk|detach|expand|expand_as|flatten|narrow|permute|_reshape_alias|reshape|select|slice'
    '|split|split_with_sizes|squeeze|t|transpose|unbind|unflatten|unfold|_unsafe_view|unsqueeze|view|view_as)'
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('models', nargs='+', choices=('ours', *PEERS))
    parser.add_argument('--json', type=Path, default=RESULTS / 'host_cost.json', help='other models in it are kept')
    parser.add_argument('--functions', type=int, default=0, help='print so many functions of each pass, write nothing')
    args = parser.parse_args()
    run = Run(None if args.functions else args.json, packages=('torch', *PEERS))
    run.content['machine'] = 'any: the numbers are counted'
    for name in args.models:
        for row in OURS if name == 'ours' else (name,):
            counted = count_ours(row) if name == 'ours' else count(build_peer(name, build_ours('t', 7, 'auto'), SIZE))
            for what, found in counted.items():
                print(row, what, found.row(), sep=': ')
                for quantity, calls in found.row().items():
                    run.add(calls, quantity, 'calls', what=what, model=row, size=' x '.join(map(str, (1, *SIZE))))
                for kind, counts in (('', found.python), (' (C)', found.c), ('', found.aten)):
                    for function, calls in counts.most_common(args.functions):
                        print(f'{calls:7d} {function}{kind}')


class Counts:
    """What one pass calls: Python functions, by file and name, functions in C, and operations of torch."""

    def __init__(self) -> None:
        self.python: Counter[str] = Counter()
        self.c: Counter[str] = Counter()
        self.aten: Counter[str] = Counter()

    def row(self) -> dict[str, int]:
        return {
            'Python calls': self.python.total(),
            'Python calls outside of torch.nn': sum(n for name, n in self.python.items() if '/torch/nn/' not in name),
            'C calls': self.c.total(),
            'torch operations': self.aten.total(),
            'views': sum(n for name, n in self.aten.items() if VIEWS.fullmatch(name)),
        }


def count_ours(row: str) -> dict[str, Counts]:
    """Return the counts of a row of ``OURS``, by 'inference' and 'training step'."""
    backend, is_on_gpu, has_kernels = OURS[row]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(layers.Linear, 'forward', nn.Linear.forward))
        stack.enter_context(mock.patch.object(linear, 'IS_FASTER_BY_ONEDNN', False))
        if is_on_gpu:
            stack.enter_context(as_on_a_gpu(has_kernels))
        return count(build_ours('t', 7, backend))


def count(model: nn.Module) -> dict[str, Counts]:
    """Return the counts of a model, by 'inference' and 'training step'."""
    torch.set_num_threads(1)
    img = torch.rand(1, 3, *SIZE, generator=torch.Generator().manual_seed(0))
    model.train(False)  # mmdet's eval() returns None

    with torch.no_grad():
        inference = counts_of(lambda: model(img))
    model.train()
    grads = [torch.ones_like(out) for out in model(img)]

    def train() -> None:
        torch.autograd.backward(model(img), grads)

    return {'inference': inference, 'training step': counts_of(train)}


def counts_of(function: Callable[[], None]) -> Counts:
    """Return what a call of a function calls, after two others, which fill caches."""
    counts = Counts()

    def record(frame: FrameType, event: str, called: Any) -> None:
        code = frame.f_code
        if event == 'call' and code is not function.__code__:
            counts.python[f'{code.co_filename} {code.co_qualname}'] += 1
        elif event == 'c_call' and called is not sys.setprofile:
            counts.c[called.__qualname__] += 1

    function()
    function()
    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        function()
    counts.aten.update(event.name for event in profiler.events() if event.name.startswith('aten::'))
    return counts


@contextlib.contextmanager
def as_on_a_gpu(has_kernels: bool) -> Iterator[None]:
    """Let all tensors say that they are on a GPU, where the kernels have passed their trials or not."""
    kernels = {
        attention: ('forward', 'backward_queries', 'backward_keys', 'table_gradient'),
        norm: ('forward', 'backward'),
    }
    with contextlib.ExitStack() as stack:
        replace = lambda where, name, value, **options: stack.enter_context(  # noqa: E731
            mock.patch.object(where, name, value, **options)
        )
        replace(Tensor, 'is_cuda', True, create=True)
        replace(Tensor, 'is_cpu', False, create=True)
        replace(torch.cuda, 'is_current_stream_capturing', _never)
        # As on a GPU in C. A tensor on the CPU has the device -1.
        replace(private, 'current_raw_stream', id)
        replace(private, 'current_cuda_device', (-1).__int__)
        replace(gpu, 'IS_INTERPRETED', False)
        replace(choice, 'reasons', choice.Reasons())
        replace(
            choice, '_reason_against', lambda trial: None if has_kernels else 'a stand-in for a GPU without kernels'
        )
        for module, names in kernels.items():
            stand_ins = SimpleNamespace(**dict.fromkeys(names, _Kernel()))
            replace(module, 'kernels', stand_ins, create=True)
            module._launches.cache_clear()
            stack.callback(module._launches.cache_clear)
        yield


class _Kernel:
    """A kernel that is compiled at once and does nothing."""

    arg_names = ()

    def warmup(self, *tensors: Tensor, grid: tuple[int, ...], **arguments: Any) -> dict[tuple[int, ...], Any]:
        return {grid: _nothing}


def _nothing(*values: Any) -> None:
    pass


def _never() -> bool:
    return False


if __name__ == '__main__':
    main()
