"""How the scripts measure: in turns, by the clocks of the host, the processor and the GPU, in separate processes."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar('T')


def in_turns(runs: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 0) -> dict[str, list[T]]:
    """Call functions in turns, in a random order in each round, and return what each has returned.

    A machine that gets slower gets slower for all. In a fixed order, a function would always find the caches and the
    allocator as the same other function left them.

    Args:
        warm_up: rounds before those, whose results are dropped.
    """
    found: dict[str, list[T]] = {name: [] for name in runs}
    for _ in range(warm_up + rounds):
        for name in random.sample(list(runs), len(runs)):
            found[name].append(runs[name]())
    return {name: results[warm_up:] for name, results in found.items()}


def seconds_of(function: Callable[[], object], device: str = 'cpu') -> tuple[float, float]:
    """Return the seconds until a call returns, and until the device has finished."""
    if device == 'cuda':
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    host = time.perf_counter() - start
    if device == 'cuda':
        torch.cuda.synchronize()
    return host, time.perf_counter() - start


def median_ms(function: Callable[[], object], device: str = 'cpu', rounds: int = 9) -> tuple[float, float]:
    """Return the medians of :func:`seconds_of`, in milliseconds."""
    host, wall = zip(*(seconds_of(function, device) for _ in range(rounds)), strict=True)
    return 1e3 * statistics.median(host), 1e3 * statistics.median(wall)


def kernels_of(function: Callable[[], object], device: str, rounds: int = 5) -> tuple[float, float]:
    """Return the milliseconds of all kernels of a call, and their number; 0 on a CPU."""
    from torch.profiler import ProfilerActivity, profile

    function()
    if device == 'cpu':
        return 0.0, 0.0
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            function()
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(kernel.device_time for kernel in kernels) / rounds / 1e3, len(kernels) / rounds


def peak_mib(function: Callable[[], object], device: str) -> float:
    """Return the peak MiB that a call allocates on the GPU, above those before it; 0 on a CPU."""
    if device == 'cpu':
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def largest_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Return the largest absolute difference, relative to the largest value."""
    return ((found.double() - truth.double()).abs().max() / truth.abs().max()).item()


def answer_of(script: str, *arguments: object, **environment: str) -> Any:
    """Run a script in a process of its own, and return the JSON in the last line of its output.

    Raises:
        RuntimeError: it failed; the message is the last line of its errors.
    """
    command = [sys.executable, '-W', 'ignore', script, *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or f'exit status {done.returncode}').splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


class Worker:
    """A process of a script that answers a line of JSON on stdin with one on stdout, beginning with one.

    Args:
        script: it is called with :func:`serve`.
        tree: folder that packages are imported from first.
    """

    def __init__(self, script: str, *arguments: str, tree: Path | None = None) -> None:
        command = [sys.executable, '-W', 'ignore', script, *arguments]
        environment = {**os.environ, 'PYTHONPATH': str(tree)} if tree else None
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.greeting = self._read()

    def ask(self, question: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + '\n')
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f'a benchmark has failed with exit code {self.process.wait()}')
        return json.loads(answer)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve(greeting: Any, answer: Callable[[Any], Any], stdout: Any) -> None:
    """Answer the questions of a :class:`Worker` until it closes; ``stdout`` is where, because libraries print."""
    print(json.dumps(greeting), file=stdout, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=stdout, flush=True)
