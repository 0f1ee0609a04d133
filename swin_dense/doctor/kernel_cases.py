"""The test cases of the Triton kernels: inputs, a comparison with torch in float64, and timings.

A kernel passes if its error, against torch in float64, is at most twice that of torch in the same dtypes.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.archs import ARCHS
from swin_dense.ops import plain, sdpa, windows
from swin_dense.ops.triton import attention, bias, norm, verdicts
from swin_dense.ops.windows import Pair, WindowSpec

WINDOWS = ((7, 7), (12, 12))
LOW_DTYPES = (torch.bfloat16, torch.float16)
IMAGE = (800, 1344)  # height and width in pixels
EPS = 1e-5
# Relative difference of two correct float32 results that were summed in a different order.
_ROUNDING = 2e-5

Implementation = Callable[..., Tensor]


class Map(NamedTuple):
    """The feature map of a stage: height and width in tokens, channels, and attention heads."""

    height: int
    width: int
    channels: int
    heads: int


@dataclass(frozen=True)
class AttentionCase:
    """Shifted window attention, forward and backward."""

    window: Pair
    dtype: torch.dtype
    parameter_dtype: torch.dtype
    maps: tuple[Map, ...]

    @property
    def name(self) -> str:
        head_dim = self.maps[0].channels // self.maps[0].heads
        return verdicts.attention_name(head_dim, self.window, self.dtype, self.parameter_dtype)

    def leaves(self, at: Map, device: torch.device) -> list[Tensor]:
        tokens = self.window[0] * self.window[1]
        shapes = (1, at.height, at.width, 3 * at.channels), (at.heads, tokens, tokens), (2 * at.channels,)
        return draw(shapes, (self.dtype, self.parameter_dtype, self.parameter_dtype), device)

    def implementations(self, at: Map) -> dict[str, Implementation]:
        spec = WindowSpec(
            at.heads, self.window, (self.window[0] // 2, self.window[1] // 2), (at.channels // at.heads) ** -0.5
        )
        modules = {'triton': attention, 'sdpa': sdpa, 'plain': plain}
        return {name: functools.partial(module.window_attention, spec=spec) for name, module in modules.items()}


@dataclass(frozen=True)
class NormCase:
    """LayerNorm from one dtype to another."""

    x_dtype: torch.dtype
    dtype: torch.dtype
    parameter_dtype: torch.dtype
    maps: tuple[Map, ...]

    @property
    def name(self) -> str:
        return verdicts.norm_name(self.x_dtype, self.dtype, self.parameter_dtype)

    def leaves(self, at: Map, device: torch.device) -> list[Tensor]:
        shapes = (1, at.height, at.width, at.channels), (at.channels,), (at.channels,)
        return draw(shapes, (self.x_dtype, self.parameter_dtype, self.parameter_dtype), device)

    def implementations(self, at: Map) -> dict[str, Implementation]:
        return {'triton': functools.partial(norm.layer_norm, eps=EPS, dtype=self.dtype), 'plain': self._plain}

    def _plain(self, x: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
        """Compute the norm as torch does under autocast: at least in float32, followed by a cast."""
        wide = torch.promote_types(x.dtype, torch.float32)
        out = F.layer_norm(x.to(wide), weight.shape, weight.to(wide), offset.to(wide), EPS)
        return out if wide == torch.float64 else out.to(self.dtype)  # float64 is the reference, so it is not rounded


@dataclass(frozen=True)
class BiasCase:
    """The expansion of a relative position bias table."""

    window: Pair
    dtype: torch.dtype
    maps: tuple[Map, ...]

    @property
    def name(self) -> str:
        return verdicts.bias_name(self.window, self.dtype)

    def leaves(self, at: Map, device: torch.device) -> list[Tensor]:
        places = (2 * self.window[0] - 1) * (2 * self.window[1] - 1)
        return draw([(places, at.heads)], [self.dtype], device)

    def implementations(self, at: Map) -> dict[str, Implementation]:
        modules = {'triton': bias, 'plain': windows}
        return {name: functools.partial(x.relative_position_bias, window=self.window) for name, x in modules.items()}


Case = AttentionCase | NormCase | BiasCase


def all_cases(image: Pair = IMAGE) -> list[Case]:
    """Return the cases that Swin-T, S, B and L need in float32, in 16 bits and under autocast, for an image size."""
    maps = tuple(itertools.chain(*(_maps_of(arch, image) for arch in ('t', 'b', 'l'))))  # S has the maps of T
    dtypes = [(torch.float32, torch.float32)]
    dtypes += [pair for low in LOW_DTYPES for pair in ((low, torch.float32), (low, low))]  # autocast, all in 16 bits
    cases: list[Case] = [AttentionCase(window, *pair, maps) for window in WINDOWS for pair in dtypes]
    cases += _norm_cases(maps)
    cases += [BiasCase(window, dtype, maps) for window in WINDOWS for dtype in (torch.float32, *LOW_DTYPES)]
    return cases


def _norm_cases(maps: tuple[Map, ...]) -> Iterator[NormCase]:
    # A patch merging normalises 4C channels of a map with half the height and width; in V2, 2C.
    merged = [Map(-(-at.height // 2), -(-at.width // 2), 4 * at.channels, at.heads) for at in maps]
    every = tuple({at.channels: at for at in (*merged, *maps)}.values())
    wide = torch.float32
    yield NormCase(wide, wide, wide, every)
    for low in LOW_DTYPES:
        yield NormCase(low, low, wide, every)
        yield NormCase(wide, low, wide, every)  # the residual stream is float32 in the first stage
        yield NormCase(low, wide, wide, every)  # after the patch embedding; in V2, after every branch
        yield NormCase(low, low, low, every)


def _maps_of(arch: str, image: Pair) -> Iterator[Map]:
    for stage, (channels, heads) in enumerate(zip(ARCHS[arch].channels, ARCHS[arch].num_heads, strict=True)):
        side = 4 * 2**stage  # pixels per token
        yield Map(-(-image[0] // side), -(-image[1] // side), channels, heads)


def disagreement(case: Case, device: torch.device) -> str | None:
    """Return a message if the kernel's error is more than twice that of torch in the same dtypes, else None."""
    for at in case.maps:
        implementations, leaves = case.implementations(at), case.leaves(at, device)
        others = [implementation for name, implementation in implementations.items() if name != 'triton']
        out_dtype = implementations['triton'](*leaves).dtype
        actual = results(implementations['triton'], leaves, out_dtype)
        baseline = results(others[0], leaves, out_dtype)
        reference = results(implementations['plain'], [leaf.double() for leaf in leaves], out_dtype)
        names = ('output', *(f'gradient of {name}' for name in ('the input', 'the first parameter', 'the second')))
        for name, ours, torchs, exact in zip(names, actual, baseline, reference, strict=False):
            reason = _excess(ours.double() - exact, torchs.double() - exact, exact)
            if reason is not None:
                return f'on {at.channels} channels of {at.height} x {at.width} tokens the {name} {reason}'
    return None


def _excess(error: Tensor, allowed: Tensor, truth: Tensor) -> str | None:
    for measure in (torch.linalg.vector_norm, lambda x: x.abs().max()):
        limit = 2 * measure(allowed) + _ROUNDING * measure(truth)
        if not measure(error) <= limit:  # written so that NaN fails
            return f'is off by {measure(error):.2g}, but at most {limit:.2g} is allowed'
    return None


def results(implementation: Implementation, leaves: Sequence[Tensor], out_dtype: torch.dtype) -> list[Tensor]:
    """Return the output and the gradients of the leaves, for an output gradient rounded to ``out_dtype``."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = implementation(*leaves)
    (grad,) = draw([tuple(out.shape)], [out_dtype], out.device, seed=1)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def draw(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], device: torch.device, seed: int = 0
) -> list[Tensor]:
    """Return normally distributed random tensors, reproducibly."""
    generator = torch.Generator(device).manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, device=device).to(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def timings(case: Case, device: torch.device) -> dict[str, dict[str, float]]:
    """Return the microseconds of each implementation by mode, summed over all maps of the case."""
    times: dict[str, dict[str, float]] = {verdicts.INFERENCE: {}, verdicts.TRAINING: {}}
    for at in case.maps:
        leaves = [leaf.requires_grad_() for leaf in case.leaves(at, device)]
        for name, implementation in case.implementations(at).items():
            for mode, function in passes(implementation, leaves).items():
                times[mode][name] = times[mode].get(name, 0.0) + microseconds(function, device)
    return times


def passes(implementation: Implementation, leaves: list[Tensor]) -> dict[str, Callable[[], object]]:
    """Return {mode: function}: a forward pass without gradients, and a forward and backward pass."""
    grad = torch.ones_like(implementation(*leaves))

    def infer() -> None:
        with torch.no_grad():
            implementation(*leaves)

    return {
        verdicts.INFERENCE: infer,
        verdicts.TRAINING: lambda: torch.autograd.grad(implementation(*leaves), leaves, grad),
    }


def microseconds(function: Callable[[], object], device: torch.device, calls: int = 10, rounds: int = 5) -> float:
    """Return the median time of one call in a series: the GPU time, unless kernel launches take longer."""

    def seconds() -> float:
        _wait(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        _wait(device)
        return time.perf_counter() - start

    seconds()
    return 1e6 * statistics.median(seconds() for _ in range(rounds)) / calls


def _wait(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
