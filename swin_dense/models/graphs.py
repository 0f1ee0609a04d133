"""Replay a CUDA graph of a backbone's passes at one image size, by ``torch.cuda.make_graphed_callables``."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from swin_dense.ops import context
from swin_dense.utils import compat
from swin_dense.utils.private import tensors_of

_DEVICE = 'cuda'


def use_graphs(backbone: nn.Module) -> nn.Module:
    """Let a backbone on a GPU replay a CUDA graph for images of one size; return the backbone.

    The first pass on a GPU is captured, in training together with its backward pass. Later passes replay the graph if
    image, mode, autocast and weights are as in the first pass; all others run eagerly. ``del backbone.forward`` ends
    it. See docs/on-a-gpu.md.

    Args:
        backbone: a module that maps an image, (B, C, h, w), to a tuple of maps.

    Raises:
        TypeError: ``backbone`` is not a module, or is wrapped in DistributedDataParallel.
        ValueError: its ``forward`` was replaced before, for example by ``make_graphed_callables``.

    Examples:
        >>> from swin_dense import SwinBackbone
        >>> backbone = use_graphs(SwinBackbone('t'))  # on a CPU, all passes are eager
        >>> len(backbone(torch.rand(1, 3, 64, 64)))
        4
    """
    if not isinstance(backbone, nn.Module) or isinstance(backbone, nn.parallel.DistributedDataParallel):
        raise TypeError(f'backbone must be a torch.nn.Module that is not wrapped, got {type(backbone).__name__}')
    if not isinstance(vars(backbone).get('forward'), (_Graphed, type(None))):
        raise ValueError('the forward of this backbone was replaced before; call use_graphs on an unchanged backbone')
    backbone.forward = _Graphed(backbone)
    return backbone


class _OwnForward(nn.Module):
    """The backbone's own forward pass, without its hooks, as a module, in which torch finds the parameters."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, img: Tensor) -> tuple[Tensor, ...]:
        return type(self.backbone).forward(self.backbone, img)


class _Graphed:
    """The forward pass of a backbone, which replays the graph of its first pass where that gives the same."""

    def __init__(self, backbone: nn.Module) -> None:
        self._backbone = backbone
        self._graph: Callable[[Tensor], tuple[Tensor, ...]] | None = None
        self._captured: Any = None  # the state at the capture
        self._node: Callable[[], Any] = lambda: None  # autograd's node of the last replay, if it still exists
        self._awaits_backward = False

    def __reduce__(self) -> Any:
        return _Graphed, (self._backbone,)  # a copy of the backbone captures its own graph

    @property
    def __code__(self) -> Any:
        """That of the backbone's own forward pass, which torch.export records."""
        return type(self._backbone).forward.__code__

    def __call__(self, img: Tensor) -> tuple[Tensor, ...]:
        state = None if self._must_be_eager(img) else self._state(img)
        if state is not None and self._captured is None:
            self._captured = state
            self._graph = self._capture(img)
        is_pending = self._awaits_backward and self._node() is not None  # a replay would overwrite its activations
        if self._graph is None or state != self._captured or is_pending:
            return type(self._backbone).forward(self._backbone, img)
        maps = self._graph(img)
        node = maps[0].grad_fn
        if node is not None:
            self._node, self._awaits_backward = weakref.ref(node), True
            node.register_prehook(self._begin_backward(self._node))
        return tuple([x.clone() for x in maps])  # the next replay writes to their memory

    def _must_be_eager(self, img: Tensor) -> bool:
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        is_on_gpu = img.device.type == _DEVICE and not torch.cuda.is_current_stream_capturing()
        return context.needs_single_operations(img) or img.requires_grad or is_distributed or not is_on_gpu

    def _state(self, img: Tensor) -> Any:
        """Return the state, to compare with the capture; None if there are gradients, to which a replay cannot add."""
        own = [x for module in self._backbone.modules() for x in tensors_of(module)]  # quickly
        weights = [x for tensors in own for x in tensors.values() if x is not None]
        if torch.is_grad_enabled() and any(x.grad is not None for x in weights if x.is_leaf):
            return None
        autocast = compat.is_autocast_enabled(_DEVICE), compat.get_autocast_dtype(_DEVICE)
        mode = self._backbone.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        memory = [(x.data_ptr(), x.requires_grad) for x in weights]
        return img.shape, img.dtype, img.device, autocast, mode, threading.get_ident(), memory

    def _capture(self, img: Tensor) -> Any:
        enabled, dtype = compat.is_autocast_enabled(_DEVICE), compat.get_autocast_dtype(_DEVICE)
        try:
            with torch.autocast(_DEVICE, dtype, enabled, cache_enabled=False):  # the cache would free casts
                own = _OwnForward(self._backbone)
                return torch.cuda.make_graphed_callables(own, (img.clone(),), allow_unused_input=True)
        except Exception as error:  # of any operation that cannot be captured
            warnings.warn(f'use_graphs cannot capture this backbone, whose passes stay eager: {error}', stacklevel=4)
            return None

    def _begin_backward(self, node: Callable[[], Any]) -> Callable[[Any], None]:
        def check(grads: Any) -> None:
            if self._node is not node or not self._awaits_backward:
                raise RuntimeError(
                    'use_graphs needs one backward pass for each forward pass, before the next forward pass and '
                    'without retain_graph; del backbone.forward ends use_graphs'
                )
            self._awaits_backward = False

        return check
