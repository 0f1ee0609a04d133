"""Progress, messages and stop signals of a command that processes many images.

This module needs tqdm. Commands import it only when they run, so that `--help` and usage errors work without tqdm.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

_SECONDS = 30.0  # between two lines


class Progress:
    """The number of finished images on stderr: a bar on a terminal, else a line now and then.

    Args:
        total: the number of images; None if it is unknown.
        disable: print nothing.
    """

    def __init__(self, total: int | None, disable: bool = False) -> None:
        self._bar = tqdm(total=total, unit='image', dynamic_ncols=True, disable=disable or None)
        self._prints_lines = self._bar.disable and not disable
        self._finished = 0
        self._total = total
        self._start = self._last = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: Any) -> None:
        self._bar.close()

    def finish(self) -> None:
        """Count one more finished image."""
        self._finished += 1
        self._bar.update()
        self._print_line()

    def within(self, detail: str) -> None:
        """Show the progress within an image that takes long."""
        self._bar.set_postfix_str(detail)
        self._print_line(f', {detail} of the next')

    def _print_line(self, detail: str = '') -> None:
        now = time.monotonic()
        if self._prints_lines and now - self._last >= _SECONDS:
            self._last = now
            total = '' if self._total is None else f' of {self._total}'
            say(f'{self._finished}{total} images{detail}, after {tqdm.format_interval(now - self._start)}')


def say(text: str) -> None:
    """Print a line above the progress bar."""
    tqdm.write(text, file=sys.stderr)


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Record the first SIGINT or SIGTERM in the returned list, and restore the previous handlers for the next."""
    received: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def receive(number: int, frame: Any) -> None:
        received.append(number)
        restore()

    for number in previous:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        restore()
