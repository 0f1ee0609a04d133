"""Count parameters and FLOPs of a model, module by module.

The model is built and run on the meta device, which computes only shapes, so the largest model takes a second and no
memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from swin_dense.models.attention import ShiftedWindowAttention, WindowAttention
from swin_dense.ops.windows import window_grid
from swin_dense.utils import checks


@dataclass(frozen=True)
class Count:
    """Parameters and FLOPs by module name, including submodules; '' is the whole model.

    A FLOP is one multiply-add of a matrix product or a convolution. Norms, activations and resampling, well below
    1 % of a model, are not counted.

    Attributes:
        parameters: trainable and frozen parameters.
        flops: FLOPs as in published figures, including the output projections of padding tokens, which the official
            code computes.
        computed_flops: FLOPs without these projections, which this package skips.
    """

    parameters: Mapping[str, int]
    flops: Mapping[str, int]
    computed_flops: Mapping[str, int]


def count(
    model: nn.Module, height: int, width: int, run: Callable[[nn.Module, Tensor], object] = nn.Module.__call__
) -> Count:
    """Count parameters and FLOPs of a model on the meta device, which ``run`` calls with an image (1, C, H, W).

    Raises ValueError if the model is on another device, has no convolution from which to infer the image channels, or
    its cost depends on values, not only on shapes.
    """
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model must be on the meta device; build it there, or pass model.to('meta')")
    channels = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if channels is None:
        raise ValueError(
            'the model has no Conv2d, so the number of image channels is unknown; give a model that takes an image'
        )
    height, width = checks.integer('height', height), checks.integer('width', width)
    meter = _Meter()
    with _reference_attention(model), meter.attached_to(model), torch.no_grad(), torch.device('meta'):
        try:
            run(model, torch.zeros(1, channels, height, width))
        except ValueError:
            raise
        except Exception as error:  # an operator without a meta implementation, or a model with another interface
            reason = f'{type(error).__name__}: {error}'.partition('\n')[0]
            raise ValueError(
                f'the FLOPs of a {type(model).__name__} cannot be counted from shapes only; count those of its '
                f'backbone: `swin-dense flops --arch` ({reason})'
            ) from error
    parameters: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameters[name.rpartition('.')[0]] += parameter.numel()
    computed = _with_ancestors(meter.flops)
    return Count(_with_ancestors(parameters), computed + _with_ancestors(meter.padding), computed)


class _Meter:
    """Count the FLOPs of a model's operations by the innermost running module, with forward hooks."""

    def __init__(self) -> None:
        self.flops: Counter[str] = Counter()  # multiply-adds by module name, without submodules
        self.padding: Counter[str] = Counter()  # of the skipped output projections of padding tokens, by module name
        self._counter = FlopCounterMode(display=False)
        self._charged = 0
        self._running = ['']

    @contextmanager
    def attached_to(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in model.named_modules():
                stack.enter_context(module.register_forward_pre_hook(partial(self._enter, name)))
                stack.enter_context(module.register_forward_hook(partial(self._leave, name)))
            stack.enter_context(self._counter)
            yield
            self._charge()

    def _charge(self) -> None:
        total = self._counter.get_total_flops() // 2  # torch counts a multiply-add as two
        self.flops[self._running[-1]] += total - self._charged
        self._charged = total

    def _enter(self, name: str, module: nn.Module, args: tuple[Tensor]) -> None:
        self._charge()
        self._running.append(name)

    def _leave(self, name: str, module: nn.Module, args: tuple[Tensor], output: Any) -> None:
        self._charge()
        self._running.pop()
        if isinstance(module, ShiftedWindowAttention):
            batch, height, width, channels = args[0].shape
            window, _ = module.windows_on(height, width)
            rows, columns = window_grid(height, width, window)
            tokens = batch * (rows * window[0] * columns * window[1] - height * width)
            self.padding[f'{name}.w_msa.proj'] += tokens * channels**2


@contextmanager
def _reference_attention(model: nn.Module) -> Iterator[None]:
    """Switch all attention modules to plain operations, because Triton does not run on the meta device."""
    attentions = [module for module in model.modules() if isinstance(module, WindowAttention)]
    backends = [module.backend for module in attentions]
    try:
        for module in attentions:
            module.backend = 'reference'
        yield
    finally:
        for module, backend in zip(attentions, backends, strict=True):
            module.backend = backend


def _with_ancestors(own: Mapping[str, int]) -> Counter[str]:
    """Add the value of each module to all modules that contain it."""
    inclusive: Counter[str] = Counter()
    for name, value in own.items():
        parts = name.split('.') if name else []
        for length in range(len(parts) + 1):
            inclusive['.'.join(parts[:length])] += value
    return inclusive
