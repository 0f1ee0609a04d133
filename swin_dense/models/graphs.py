"""Replay CUDA graphs of a backbone's passes: experimental, and off unless :func:`use_graphs` is called.

A graph is fixed memory and fixed launches. A pass is replayed where everything that a graph depends on is as it was at
the capture; every other pass runs eagerly. What leaves a graph, maps and gradients, is copied.
"""

from __future__ import annotations

import functools
import operator
import threading
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from swin_dense.ops import context
from swin_dense.utils import checks, compat

Maps = tuple[Tensor, ...]

# Of each size before its capture: sizes that come once are not worth it, and kernels have their trials.
_EAGER_PASSES = 3
_IDLE_PASSES = 1000  # a graph that was not used in so many passes may be dropped for another
_MAX_COUNTS = 1000
_PLAIN = (bool, int, float, str, type(None), types.FunctionType, types.BuiltinFunctionType)
_SHARDED = ('FSDP', 'FullyShardedDataParallel')
_NEEDED = ('_get_current_graph_task_keep_graph', '_top_saved_tensors_default_hooks')  # of torch._C._autograd


def use_graphs(backbone: nn.Module, limit_mib: int = 4096) -> nn.Module:
    """Let a backbone on a GPU replay CUDA graphs for image sizes that come again; return the backbone. Experimental.

    A size is captured at its fourth pass, in training with its backward pass. All that a graph cannot do runs eagerly,
    with one warning for each reason that you can change. ``del backbone.forward`` ends it. See docs/on-a-gpu.md.

    Args:
        backbone: a module that maps an image, (B, C, h, w), to a tuple of maps.
        limit_mib: MiB of GPU memory for all graphs; each keeps the memory of its pass.

    Raises:
        TypeError: ``backbone`` is not a module, or is wrapped in DistributedDataParallel.
        ValueError: its ``forward`` was replaced before, by ``make_graphed_callables`` for one.

    Examples:
        >>> from swin_dense import SwinBackbone
        >>> backbone = use_graphs(SwinBackbone('t'), limit_mib=8192)  # on a CPU, all passes are eager
        >>> len(backbone(torch.rand(1, 3, 64, 64)))
        4
    """
    if not isinstance(backbone, nn.Module):
        raise TypeError(f'backbone must be a torch.nn.Module, got {type(backbone).__name__}')
    if isinstance(backbone, nn.parallel.DistributedDataParallel):
        raise TypeError(
            'a graph of DistributedDataParallel would not exchange gradients; call use_graphs on the backbone, and '
            'then wrap it'
        )
    if not isinstance(vars(backbone).get('forward', None), (Graphs, type(None))):
        raise ValueError('the forward of this backbone was replaced before; call use_graphs on an unchanged backbone')
    backbone.forward = Graphs(backbone, checks.integer('limit_mib', limit_mib))
    return backbone


@dataclass
class Captured:
    """The static memory of a captured pass, and what replays it.

    Attributes:
        img: the image that the pass reads.
        outs: the maps that it writes.
        out_grads: the gradient of each map that the backward pass reads; None for maps without one.
        grads: the gradients that it writes, of the parameters; None for those that no map depends on.
        dependencies: for each map, whether its gradient reaches each parameter.
        forward: replays the pass.
        backward: replays the backward pass of the last pass.
        mib: MiB of memory.
    """

    img: Tensor
    outs: list[Tensor]
    out_grads: list[Tensor | None]
    grads: Sequence[Tensor | None]
    dependencies: list[list[bool]]
    forward: Callable[[], None]
    backward: Callable[[], None]
    mib: float


class Cuda:
    """Captures passes on a GPU. Tests of the rules pass a stand-in to :class:`Graphs`."""

    device_type = 'cuda'

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def stream(self, device: torch.device) -> int:
        return torch.cuda.current_stream(device).cuda_stream

    def capture(self, backbone: nn.Module, img: Tensor) -> Captured:
        """Capture a pass, and its backward pass if gradients are enabled."""
        # Other tensors in the memory of the parameters: autograd's nodes of the parameters belong to other streams.
        bare = _Bare(backbone)
        aliases: dict[str, Tensor] = {}
        for name, x in bare.named_parameters():
            aliases[name] = nn.Parameter(x.detach(), x.requires_grad)
        parameters = [alias for alias in aliases.values() if alias.requires_grad]
        run = functools.partial(functional_call, bare, aliases)
        with torch.cuda.device(img.device):
            stream = torch.cuda.Stream(img.device)
            static = img.clone()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                dependencies = dependencies_of(run(static), parameters)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            # Other threads, such as those that pin memory, may call CUDA meanwhile.
            options: Any = {'stream': stream, 'capture_error_mode': 'thread_local'}
            with torch.cuda.graph(forward, **options):
                outs = run(static)
            out_grads = [torch.zeros_like(out) if out.requires_grad else None for out in outs]
            grads: Sequence[Tensor | None] = ()
            if any(dependencies):
                with torch.cuda.graph(backward, pool=forward.pool(), **options):
                    grads = gradients_of(outs, parameters, out_grads)
            mib = (torch.cuda.memory_reserved() - before) / 2**20
        maps = [out.detach() for out in outs]
        return Captured(static, maps, out_grads, grads, dependencies, forward.replay, backward.replay, mib)


class _Bare(nn.Module):
    """A backbone without its own hooks, and without graphs."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, img: Tensor) -> Maps:
        return launch(self.backbone, img)


def launch(backbone: nn.Module, img: Tensor) -> Maps:
    """Run the backbone's own forward pass."""
    return type(backbone).forward(backbone, img)


def gradients_of(
    outs: Iterable[Tensor], parameters: Sequence[Tensor], out_grads: Iterable[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of parameters, and keep what the backward pass needs: it may be replayed twice."""
    trained = [out for out in outs if out.requires_grad]
    given = [grad for grad in out_grads if grad is not None]
    with torch.autocast(trained[0].device.type, enabled=False):
        return torch.autograd.grad(trained, parameters, given, retain_graph=True, allow_unused=True)


def dependencies_of(outs: Iterable[Tensor], parameters: Sequence[Tensor]) -> list[list[bool]]:
    """Return, for each map, whether its gradient reaches each parameter."""
    found = []
    for out in outs:
        grads = gradients_of([out], parameters, [torch.zeros_like(out)]) if out.requires_grad else ()
        found.append([grad is not None for grad in grads])
    return found


class Graphs:
    """The forward pass of a backbone, which replays graphs where it may."""

    def __init__(self, backbone: nn.Module, limit_mib: int, gpu: Any = None) -> None:
        self._backbone = backbone
        self._limit_mib = limit_mib
        self._gpu = gpu or Cuda()
        self._thread: int | None = None  # that ran the first pass
        self._state: _State | None = None  # of the last pass
        self._graphs: dict[Any, _Graph | None] = {}  # None where a capture has failed
        self._counts: Counter[Any] = Counter()
        self._passes = 0
        self._is_full = False
        self._warned: set[str] = set()

    def __reduce__(self) -> Any:
        return Graphs, (self._backbone, self._limit_mib, self._gpu)  # a copy of the backbone captures its own graphs

    @property
    def __code__(self) -> types.CodeType:
        """That of the backbone's own forward pass, which torch.export records."""
        return type(self._backbone).forward.__code__

    def __call__(self, img: Tensor) -> Maps:
        if context.needs_single_operations(img) or img.device.type != self._gpu.device_type or self._gpu.is_capturing():
            return launch(self._backbone, img)
        state = self._state
        if state is None or not state.is_current():
            state = self._state = _State(self._backbone)
        parameters = state.trained if torch.is_grad_enabled() else []
        reason = self._why_eager(img, state, bool(parameters))
        if reason is None:
            graph, reason = self._find(img, state, parameters)
            if graph is not None:
                return graph.run(img, parameters)
        if reason and reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f'use_graphs: {reason}; such passes run without a graph', stacklevel=2)
        return launch(self._backbone, img)

    def _why_eager(self, img: Tensor, state: _State, is_training: bool) -> str | None:
        """Return why this pass cannot be a graph: None if it can, '' if there is nothing to tell."""
        self._thread = self._thread or threading.get_ident()
        if not state.devices.issubset((img.device,)):
            raise RuntimeError(
                f'the image is on {img.device}, and not all weights are; if this is DataParallel, which use_graphs '
                'does not support, use DistributedDataParallel'
            )
        is_recomputed = torch._C._current_graph_task_id() != -1
        # Without gradients in training mode: a checkpoint, which draws the same random numbers again later.
        is_checkpointed = self._backbone.training and not torch.is_grad_enabled()
        if img.requires_grad or not img.numel() or torch.is_anomaly_enabled() or is_recomputed or is_checkpointed:
            return ''
        if not all(hasattr(torch._C._autograd, name) for name in _NEEDED):
            return f'torch {torch.__version__} is too old'
        if threading.get_ident() != self._thread:
            return 'another thread ran the first pass, and graphs belong to one thread'
        if is_training and state.has_checkpoints:
            return 'with_cp recomputes parts, which a graph does not save memory by'
        if is_training and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return 'a checkpoint, or another hook for saved tensors, is around the backbone'
        return state.obstacle

    def _find(self, img: Tensor, state: _State, parameters: Sequence[Tensor]) -> tuple[_Graph | None, str]:
        """Return the graph for a pass, captured where its size came often enough; or why there is none."""
        kind = img.device.type
        autocast = compat.get_autocast_dtype(kind) if compat.is_autocast_enabled(kind) else None
        place = img.device, self._gpu.stream(img.device)
        is_training = bool(parameters)
        key = (*place, img.shape, img.dtype, is_training, autocast, _precision(), state.hash)
        self._passes += 1
        if key not in self._graphs:
            reason = self._capture(key, img, state, is_training, autocast)
            if reason is not None:
                return None, reason
        graph = self._graphs[key]
        if graph is None or graph.content != state.content:
            return None, ''
        if graph.node() is not None:
            return None, 'a second forward pass ran while the first one could still have its backward pass'
        graph.last_used = self._passes
        return graph, ''

    def _capture(
        self, key: Any, img: Tensor, state: _State, is_training: bool, autocast: torch.dtype | None
    ) -> str | None:
        """Capture the graph of a key if it came often enough; return why there is none, or None."""
        self._counts[key] += 1
        if len(self._counts) > _MAX_COUNTS:
            self._counts.clear()
        if self._counts[key] <= _EAGER_PASSES:
            return ''
        full = f'limit_mib={self._limit_mib} is reached; raise it, or use fewer sizes of images'
        if self._is_full:
            self._drop_idle()
        if self._is_full:
            return full
        try:
            # Casts in autocast's cache would be freed after the capture.
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(is_training),
                torch.autocast(img.device.type, autocast, enabled=autocast is not None, cache_enabled=False),
            ):
                captured = self._gpu.capture(self._backbone, img)
        except Exception as error:
            self._graphs[key] = None
            return f'the capture failed ({type(error).__name__}: {str(error)[:200]})'
        self._graphs[key] = _Graph(captured, state.content, state.modules, self._passes)
        if sum(graph.captured.mib for graph in self._graphs.values() if graph) > self._limit_mib:
            del self._graphs[key]
            self._is_full = True
            return full
        return None

    def _drop_idle(self) -> None:
        """Drop the graphs that were not used for long."""
        for key, graph in list(self._graphs.items()):
            if graph is not None and self._passes - graph.last_used > _IDLE_PASSES:
                del self._graphs[key], self._counts[key]
                self._is_full = False


@dataclass
class _Graph:
    """A captured pass of one backbone in one state."""

    captured: Captured
    content: Any  # of the state
    modules: Sequence[nn.Module]  # kept, so that no other module gets the id of one of them
    last_used: int
    # Autograd's node of the last pass, while a backward pass may need the memory that a replay would overwrite.
    node: Callable[[], Any] = lambda: None

    def run(self, img: Tensor, parameters: Sequence[Tensor]) -> Maps:
        return _Replay.apply(self, img, *parameters) if any(self.captured.dependencies) else self.forward(img)

    def forward(self, img: Tensor) -> Maps:
        with torch.no_grad():
            self.captured.img.copy_(img)
            self.captured.forward()
            return tuple([out.clone() for out in self.captured.outs])

    def backward(self, grads: Iterable[Tensor | None]) -> list[Tensor | None]:
        """Return gradients of the parameters, as autograd does: None where no gradient of a map arrives."""
        captured = self.captured
        reached = [False] * len(captured.grads)
        for static, grad, dependencies in zip(captured.out_grads, grads, captured.dependencies, strict=True):
            if static is None:
                continue
            if grad is None:
                static.zero_()
            else:
                static.copy_(grad)
                reached = [a or b for a, b in zip(reached, dependencies, strict=True)]
        captured.backward()
        wanted = [grad if is_reached else None for grad, is_reached in zip(captured.grads, reached, strict=True)]
        found = [grad for grad in wanted if grad is not None]
        copies = iter(torch._foreach_mul(found, 1) if found else ())  # few launches
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.node = lambda: None
        return [None if grad is None else next(copies) for grad in wanted]


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: _Graph, img: Tensor, *parameters: Tensor) -> Maps:
        ctx.graph, graph.node = graph, weakref.ref(ctx)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*parameters)  # autograd then raises if they change before the backward pass
        ctx.addresses = [parameter.data_ptr() for parameter in parameters]
        outs = graph.forward(img)
        grads = graph.captured.out_grads
        ctx.mark_non_differentiable(*[out for out, grad in zip(outs, grads, strict=True) if grad is None])
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if [parameter.data_ptr() for parameter in ctx.saved_tensors] != ctx.addresses:
            raise RuntimeError('weights moved between a forward pass and its backward pass: do not call use_graphs')
        return None, None, *ctx.graph.backward(grads)


class _State:
    """What a graph depends on, besides the image: the modules, their settings, and the memory of their weights."""

    def __init__(self, backbone: nn.Module) -> None:
        modules = self.modules = list(backbone.modules())
        self._types = list(map(type, modules))
        self._attributes = list(map(vars, modules))
        hooks = [x for module in modules[1:] for x in context.hooks_of(module)]
        dicts: list[dict[Any, Any]] = []
        for module in modules:
            dicts += module._parameters, module._buffers, module._modules
        dicts += hooks + self._attributes
        self._filled, self._empty = [x for x in dicts if x], [x for x in dicts if not x]
        self._names = list(chain.from_iterable([x.keys() for x in self._filled]))
        self._values = list(chain.from_iterable([x.values() for x in self._filled]))
        weights = [*backbone.parameters(), *backbone.buffers()]
        hidden = [x for own in self._attributes for x in own.values() if type(x) in (Tensor, nn.Parameter)]
        self._tensors = weights + [x for x in hidden if x.layout is torch.strided]
        self._memory = _memory_of(self._tensors)
        self.trained = [x for x in weights if x.requires_grad]
        self.devices = {x.device for x in weights}
        named = zip(self._names, self._values, strict=True)
        settings = [(name, value) for name, value in named if _is_plain(value)]
        self.content = (*self._memory, *map(id, modules), *self._types, *settings)  # by which states are compared
        self.hash = hash(self.content)
        self.has_checkpoints = any(getattr(module, 'with_cp', False) for module in modules)
        self.obstacle = None
        if any(kind.__name__.startswith(_SHARDED) for kind in self._types):
            self.obstacle = 'FSDP frees weights, whose memory a graph would read'
        elif any(type(x) is not nn.Parameter and (type(x) is not Tensor or x.requires_grad) for x in weights):
            self.obstacle = 'not all weights are plain parameters'
        elif any(hooks) or any('forward' in own for own in self._attributes[1:]):
            self.obstacle = 'modules inside the backbone have hooks, which a graph would not call'
        elif any(isinstance(module, _NormBase) and module.training for module in modules):
            self.obstacle = 'a batch norm is training, whose statistics the passes before a capture would change'

    def is_current(self) -> bool:
        """Return whether the backbone is in this state: quickly, by loops in C that ask for the same objects."""
        return (
            list(map(type, self.modules)) == self._types
            and all(map(operator.is_, map(vars, self.modules), self._attributes))
            and not any(self._empty)
            and list(chain.from_iterable([x.keys() for x in self._filled])) == self._names
            and all(map(operator.is_, chain.from_iterable([x.values() for x in self._filled]), self._values))
            and _memory_of(self._tensors) == self._memory
        )


def _memory_of(tensors: Iterable[Tensor]) -> list[Any]:
    return [(x.data_ptr(), x.dtype, x.shape, x.stride(), x.requires_grad) for x in tensors]


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(x, _PLAIN) for x in value))


def _precision() -> tuple[Any, ...]:
    """Return torch's global settings that choose kernels."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    places = (torch.backends, matmul, cudnn, getattr(cudnn, 'conv', None))
    tf32 = [getattr(place, 'fp32_precision', None) for place in places]
    if None in tf32:  # before torch 2.9; later versions refuse to mix these settings with the older ones
        tf32 = [matmul.allow_tf32, cudnn.allow_tf32]
    reduced = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
    return (*tf32, *reduced, cudnn.enabled, cudnn.benchmark, torch.are_deterministic_algorithms_enabled())
