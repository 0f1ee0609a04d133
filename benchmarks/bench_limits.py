"""Lower bounds on the time of any implementation with the same matrix products, measured on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from swin_dense import SwinBackbone
from swin_dense.ops.linear import is_supported, linear

BACKWARD = 2  # the backward pass of a matrix product is two of the same size


def matrix_products(
    ours: SwinBackbone, size: tuple[int, int], batch: int, mode: str, dtype: torch.dtype, device: str
) -> Callable[[], None]:
    """Return a function that computes the matrix products of a model's linear layers, by the faster library.

    The products inside attention are not included. In training, each layer has three products, as in a training step.
    MKL writes into allocated memory; oneDNN cannot.
    """
    operands = []
    for tokens, inputs, outputs, times in _products(ours, size, batch):
        left = torch.randn(tokens, inputs, dtype=dtype, device=device)
        weight = torch.randn(outputs, inputs, dtype=dtype, device=device)
        out = torch.empty(tokens, outputs, dtype=dtype, device=device)
        operands.append((left, weight, out, times))
    by_onednn = is_supported(left, weight, None)

    def run() -> None:
        with torch.no_grad():
            for left, weight, out, times in operands:
                for _ in range(times):
                    linear(left, weight) if by_onednn else torch.mm(left, weight.t(), out=out)
                    if mode == 'train':
                        linear(out, weight.t())
                        torch.mm(left.t(), out)

    return run


def roofline(
    ours: SwinBackbone, size: tuple[int, int], batch: int, mode: str, dtype: torch.dtype, device: str
) -> dict[str, float]:
    """Return the roofline time in seconds of a model with five kernels per block, from measured peak and bandwidth.

    Per block with L tokens, Lp after padding: 24 C^2 L + 4 T C Lp FLOPs and s(22 C L + 12 C^2) bytes. Per merging to L'
    tokens: 16 C^2 L' FLOPs and s(C L + 2 C L' + 8 C^2) bytes. A training step counts as three forward passes.
    """
    flops_per_s, bytes_per_s = _peak(dtype, device), _bandwidth(device)
    itemsize = torch.empty(0, dtype=dtype).element_size()
    window = ours.window_size
    seconds = flops = 0.0
    height, width = -(-size[0] // ours.strides[0]), -(-size[1] // ours.strides[0])
    for stage, (channels, depth) in enumerate(zip(ours.arch.channels, ours.arch.depths, strict=True)):
        tokens = batch * height * width
        padded = batch * -(-height // window[0]) * -(-width // window[1]) * window[0] * window[1]
        costs = [(24 * channels**2 * tokens + 4 * window[0] * window[1] * channels * padded)] * depth
        moved = [itemsize * (22 * channels * tokens + 12 * channels**2)] * depth
        height, width = -(-height // 2), -(-width // 2)
        if stage + 1 < len(ours.arch.depths):
            merged = batch * height * width
            costs.append(16 * channels**2 * merged)
            moved.append(itemsize * (channels * tokens + 2 * channels * merged + 8 * channels**2))
        flops += sum(costs)
        seconds += sum(max(f / flops_per_s, b / bytes_per_s) for f, b in zip(costs, moved, strict=True))
    times = 1 + BACKWARD if mode == 'train' else 1
    return {
        'seconds': times * seconds,
        'gflops_of_pass': times * flops / 1e9,
        'peak_gflops_per_s': flops_per_s / 1e9,
        'bandwidth_gb_per_s': bytes_per_s / 1e9,
    }


def _products(ours: SwinBackbone, size: tuple[int, int], batch: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (tokens, inputs, outputs, count) for all linear layers."""
    height, width = -(-size[0] // ours.strides[0]), -(-size[1] // ours.strides[0])
    yield batch * height * width, ours.in_channels * ours.strides[0] ** 2, ours.arch.embed_dims, 1
    for stage, (c, depth) in enumerate(zip(ours.arch.channels, ours.arch.depths, strict=True)):
        tokens = batch * height * width
        for inputs, outputs in ((c, 3 * c), (c, c), (c, 4 * c), (4 * c, c)):
            yield tokens, inputs, outputs, depth
        height, width = -(-height // 2), -(-width // 2)
        if stage + 1 < len(ours.arch.depths):
            yield batch * height * width, 4 * c, 2 * c, 1


def _peak(dtype: torch.dtype, device: str) -> float:
    side = 8192 if device == 'cuda' else 1536
    a, b = torch.randn(2, side, side, device=device).to(dtype)
    return 2 * side**3 / _fastest(lambda: linear(a, b), device)


def _bandwidth(device: str) -> float:
    source = torch.ones(2**28 if device == 'cuda' else 2**26, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _fastest(lambda: target.copy_(source), device)


def _fastest(function: Callable[[], object], device: str, rounds: int = 7) -> float:
    function()
    return min(elapsed(function, device) for _ in range(rounds))


def elapsed(function: Callable[[], object], device: str) -> float:
    """Return the time of a call in seconds, including asynchronous work on the device."""
    if device == 'cuda':
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == 'cuda':
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_mib(function: Callable[[], object]) -> float:
    """Return the peak memory in MiB that a call allocates on the GPU, above the memory before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def summary(seconds: list[float], batch: int) -> dict[str, float]:
    """Return median, p10 and p90 in milliseconds, and images per second."""
    deciles = statistics.quantiles(seconds, n=10, method='inclusive') if len(seconds) > 1 else seconds * 9
    median = statistics.median(seconds)
    return {
        'median_ms': 1e3 * median,
        'p10_ms': 1e3 * deciles[0],
        'p90_ms': 1e3 * deciles[-1],
        'images_per_s': batch / median,
    }
