"""Verify and time the Triton kernels on this machine's GPUs, and store the results ("verdicts").

Every kernel runs in a separate process with a time limit, so that a fault, a hang or a crash ends only that process;
the calling process never initialises the GPU. Verdicts are stored in the user's cache, where
:mod:`swin_dense.ops.triton.verdicts` reads them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from swin_dense.doctor import Finding, kernel_cases
from swin_dense.doctor.kernel_cases import Case
from swin_dense.ops.triton import gpu, verdicts
from swin_dense.ops.triton.verdicts import Entry
from swin_dense.utils import atomic, memory

_logger = logging.getLogger(__name__)

START_LIMIT = 120  # seconds for a process to start; imports from a slow disk take long
CASE_LIMIT = 120  # seconds for one kernel on all its inputs, including compilation
LIMIT = 480  # seconds for all kernels; the remaining kernels then fail
_BYTES_PER_PROCESS = 8 * 2**30  # GPU memory per process, to limit the number of parallel processes
_AGAIN = 'swin-dense doctor --again'


class Device(NamedTuple):
    """A GPU, as queried by a separate process.

    Attributes:
        name: name for torch, such as 'cuda:0'.
        unsupported: the reason why the kernels cannot run on it, or None.
        key: the key of its verdict; {} if the kernels cannot run.
        free_bytes: free GPU memory in bytes.
    """

    name: str
    unsupported: str | None
    key: dict[str, str]
    free_bytes: int


class Failed(NamedTuple):
    """The failure of a call in a separate process."""

    reason: str


def ensure_verdict() -> None:
    """Check the kernels of every GPU without a verdict, before a training; raises nothing.

    Call it in a process that does not use a GPU, before the processes that do are started.
    """
    try:
        for device in _devices():
            if device.unsupported is None and verdicts.read(device.key) is None:
                _keep(device.key, check(device))
    except Exception as error:  # training works without the kernels
        _logger.warning('the Triton kernels could not be checked, so torch is used instead: %s', error)


def examine(again: bool = False) -> list[Finding]:
    """Return the findings on the kernels for each type of GPU; check unknown types, or all types if ``again``."""
    try:
        devices = _devices()
    except (OSError, RuntimeError) as error:
        return [Finding('kernel', 'GPU', 'broken', str(error), f'check that nvidia-smi works, then run {_AGAIN}')]
    if not devices:
        return [Finding('kernel', 'Triton kernels', 'note', 'not checked: torch sees no GPU')]
    return [finding for device in devices for finding in _findings(device, again)]


def _findings(device: Device, again: bool) -> Iterator[Finding]:
    if device.unsupported is not None:
        yield Finding('kernel', device.name, 'note', f'{device.unsupported}; torch is used instead (sdpa)')
        return
    entries, complaint = None if again else verdicts.read(device.key), None
    if entries is None:
        entries = check(device)
        complaint = _keep(device.key, entries)
    about = f'{device.key["gpu"]}, driver {device.key["driver"]}'
    if complaint is None:
        yield Finding('kernel', device.name, 'ok', f'{about}; the verdict is stored in {verdicts.path(device.key)}')
    else:
        cure = 'set XDG_CACHE_HOME to a writable folder; until then torch is used instead'
        yield Finding('kernel', device.name, 'note', f'{about}; {complaint}', cure)
    for name, entry in entries.items():
        yield _finding(name, entry)


def _finding(name: str, entry: Entry) -> Finding:
    if entry.error is not None:
        is_full = 'not enough memory' in entry.error
        cure = f'free GPU memory, then run {_AGAIN}' if is_full else f'torch is used instead; to try again: {_AGAIN}'
        return Finding('kernel', name, 'broken', entry.error, cure)
    speeds = {mode: entry.speed(mode) for mode in (verdicts.INFERENCE, verdicts.TRAINING)}
    text = ', '.join(f'{times:.2f} times as fast as {other} in {mode}' for mode, (other, times) in speeds.items())
    slow = [mode for mode, (_, times) in speeds.items() if times <= 1]
    if slow:
        return Finding('kernel', name, 'note', f'agrees with torch; {text}: not used in {" and ".join(slow)}')
    return Finding('kernel', name, 'ok', f'agrees with torch; {text}')


def check(device: Device) -> dict[str, Entry]:
    """Verify and time every kernel on a GPU; errors of kernels are returned, not raised."""
    cases, deadline = kernel_cases.all_cases(), time.monotonic() + LIMIT
    _logger.info('checking %d Triton kernels on %s, once; this takes a few minutes', len(cases), device.key['gpu'])
    # Verification is mostly compilation, so it runs in parallel processes; timing runs one kernel at a time.
    workers = max(1, min(4, (os.cpu_count() or 2) // 2, device.free_bytes // _BYTES_PER_PROCESS))
    with ThreadPoolExecutor(workers) as pool:
        parts = pool.map(lambda worker: _ask(_verify, device, cases[worker::workers], deadline), range(workers))
        errors = {name: answer for part in list(parts) for name, answer in part.items()}
    verified = [case for case in cases if errors[case.name] is None]
    timed = _ask(_time, device, verified, deadline)
    return {case.name: _entry(case, errors[case.name], timed.get(case.name)) for case in cases}


def _entry(case: Case, error: Failed | str | None, times: Any) -> Entry:
    for answer in (error, times):
        if isinstance(answer, Failed):
            return Entry(answer.reason)
    if isinstance(error, str):
        return Entry(error)
    channels = tuple(at.channels for at in case.maps) if isinstance(case, kernel_cases.NormCase) else ()
    return Entry(None, channels, times)


def _keep(key: dict[str, str], entries: dict[str, Entry]) -> str | None:
    """Write a verdict atomically; return an error message if it cannot be stored, else None."""
    content = {'key': key, 'kernels': {name: dataclasses.asdict(entry) for name, entry in entries.items()}}
    try:
        path = verdicts.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.written_whole(path) as unfinished:
            unfinished.path.write_text(json.dumps(content, indent=1) + '\n', encoding='utf-8')
    except (OSError, RuntimeError) as error:
        complaint = f'the verdict on the Triton kernels cannot be stored: {error}'
        _logger.warning('%s', complaint)
        return complaint
    return None


# --- separate processes -----------------------------------------------------------------------------------------------


def _devices() -> list[Device]:
    """Return one GPU of each type.

    Raises:
        RuntimeError: the process that queries the GPUs failed.
    """
    if torch.version.cuda is None and torch.version.hip is None:
        return []
    with _Process() as process:
        found = process.ask(_look, (), START_LIMIT)
    if isinstance(found, Failed):
        raise RuntimeError(f'the process that queries the GPUs failed: {found.reason}')
    return found


def _look() -> list[Device]:
    """Return one GPU of each type; runs in the separate process of :func:`_devices`."""
    found: dict[tuple[Any, ...], Device] = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        device = torch.device('cuda', index)
        reason = gpu.unsupported_device_reason(device)
        key = {} if reason else verdicts.key(device)
        free, _ = torch.cuda.mem_get_info(device)
        found.setdefault((reason, *key.values()), Device(str(device), reason, key, free))
    return list(found.values())


def _verify(case: Case, device: str) -> str | None:
    with torch.cuda.device_of(torch.empty(0, device=device)):
        return kernel_cases.disagreement(case, torch.device(device))


def _time(case: Case, device: str) -> dict[str, dict[str, float]]:
    with torch.cuda.device_of(torch.empty(0, device=device)):
        return kernel_cases.timings(case, torch.device(device))


def _ask(function: Callable[..., Any], device: Device, cases: Sequence[Case], deadline: float) -> dict[str, Any]:
    """Return {case name: result} of ``function(case, device)`` in separate processes, with a Failed on failure."""
    answers: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        process: _Process | None = None
        for case in cases:
            left = deadline - time.monotonic()
            if left <= 0:
                answers[case.name] = Failed(f'it was not reached within {LIMIT} seconds')
                continue
            if process is None or process.has_ended:
                process = stack.enter_context(_Process())
            answers[case.name] = process.ask(function, (case, device.name), min(CASE_LIMIT, left))
    return answers


class _Process:
    """A process that calls functions one by one, until one fails: its CUDA context may then be unusable."""

    def __init__(self) -> None:
        self.has_ended = False
        context = multiprocessing.get_context('spawn')  # CUDA does not support fork
        self._pipe, theirs = context.Pipe()
        self._log = Path(tempfile.mkstemp(prefix='swin_dense-kernels-')[1])
        self._process = context.Process(target=_serve, args=(theirs, str(self._log)), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._log.unlink(missing_ok=True)

    def ask(self, function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> Any:
        """Return ``function(*args)``, or a Failed."""
        try:
            if not self._pipe.poll(START_LIMIT):
                raise TimeoutError(f'could not start within {START_LIMIT} seconds')
            self._pipe.recv()  # the process is ready
            self._pipe.send((function, args))
            if not self._pipe.poll(seconds):
                raise TimeoutError(f'did not answer within {seconds:.0f} seconds')
            answer = self._pipe.recv()
        except TimeoutError as error:
            answer = Failed(str(error))
        except (EOFError, OSError):  # the process has exited
            self._process.join(10)
            answer = Failed(f'ended with {_status(self._process.exitcode)}{self._last_output()}')
        if isinstance(answer, Failed):
            self._end()
        return answer

    def _end(self) -> None:
        self.has_ended = True
        self._pipe.close()
        self._process.kill()
        self._process.join(10)

    def _last_output(self) -> str:
        lines = [line for line in self._log.read_text(encoding='utf-8', errors='replace').splitlines() if line.strip()]
        return f' ({lines[-1].strip()[:200]})' if lines else ''


def _status(exit_code: int | None) -> str:
    return signal.Signals(-exit_code).name if exit_code is not None and exit_code < 0 else f'status {exit_code}'


def _serve(pipe: Connection, log: str) -> None:
    """Call the functions received through the pipe, until one fails or the pipe is closed; runs in a new process."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    while True:
        pipe.send(None)
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(function(*args))
        except Exception as error:  # the compiler and the driver can raise any error
            lines = str(error).strip().splitlines() or ['']
            prefix = 'not enough memory' if memory.is_out_of_memory(error) else 'it raised an error'
            pipe.send(Failed(f'{prefix}: {type(error).__name__}: {lines[0][:200]}'))
            return
