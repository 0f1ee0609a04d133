"""Count parameters and FLOPs of a model, module by module.

The model is built and run on the meta device, which computes only shapes, so the largest model takes a second and no
memory.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
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
    """

    parameters: Mapping[str, int]  # trainable and frozen
    # As in published figures, including the output projections of padding tokens, which the official code computes.
    flops: Mapping[str, int]
    computed_flops: int  # of the whole model without these projections, which this package skips


def count(
    model: nn.Module, height: int, width: int, run: Callable[[nn.Module, Tensor], object] = nn.Module.__call__
) -> Count:
    """Count parameters and FLOPs of a model on the meta device, which ``run`` calls with an image (1, C, H, W).

    Raises ValueError if the model has no convolution from which to infer the image channels, or its cost depends on
    values, not only on shapes.
    """
    channels = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if channels is None:
        raise ValueError(
            'the model has no Conv2d, so the number of image channels is unknown; give a model that takes an image'
        )
    height, width = checks.integer('height', height), checks.integer('width', width)
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, WindowAttention):
            module.backend = 'reference'  # Triton does not run on the meta device
    with FlopCounterMode(display=False) as counter, torch.no_grad(), torch.device('meta'):
        meter = _Meter(model, counter)
        try:
            run(model, torch.zeros(1, channels, height, width))
            meter.charge()
        except ValueError:
            raise
        except Exception as error:  # an operator without a meta implementation, or a model with another interface
            reason = f'{type(error).__name__}: {error}'.partition('\n')[0]
            raise ValueError(
                f'the FLOPs of a {type(model).__name__} cannot be counted from shapes only ({reason})'
            ) from error
    parameters: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameters[name.rpartition('.')[0]] += parameter.numel()
    flops = _with_ancestors(meter.flops)
    return Count(_with_ancestors(parameters), flops, flops[''] - meter.padding)


class _Meter:
    """Count the FLOPs of a model's operations by the innermost running module, with forward hooks."""

    def __init__(self, model: nn.Module, counter: FlopCounterMode) -> None:
        self.flops: Counter[str] = Counter()  # multiply-adds by module name, without submodules
        self.padding = 0  # of these, those of the output projections of padding tokens, which are skipped
        self._counter = counter
        self._charged = 0
        self._running = ['']
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, name))
            module.register_forward_hook(partial(self._leave, name))

    def charge(self) -> None:
        """Charge the operations since the last call to the innermost running module."""
        total = self._counter.get_total_flops() // 2  # torch counts a multiply-add as two
        self.flops[self._running[-1]] += total - self._charged
        self._charged = total

    def _enter(self, name: str, module: nn.Module, args: tuple[Tensor]) -> None:
        self.charge()
        self._running.append(name)

    def _leave(self, name: str, module: nn.Module, args: tuple[Tensor], output: Any) -> None:
        self.charge()
        self._running.pop()
        if isinstance(module, ShiftedWindowAttention):
            batch, height, width, channels = args[0].shape
            window, _ = module.windows_on(height, width)
            rows, columns = window_grid(height, width, window)
            tokens = batch * (rows * window[0] * columns * window[1] - height * width)
            self.flops[f'{name}.w_msa.proj'] += tokens * channels**2
            self.padding += tokens * channels**2


def _with_ancestors(own: Mapping[str, int]) -> Counter[str]:
    """Add the value of each module to all modules that contain it."""
    inclusive: Counter[str] = Counter()
    for name, value in own.items():
        parts = name.split('.') if name else []
        for length in range(len(parts) + 1):
            inclusive['.'.join(parts[:length])] += value
    return inclusive
