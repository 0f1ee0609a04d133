"""Signals that ask a process to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Record the first SIGINT or SIGTERM in the returned list, and restore the previous handlers for the next."""
    received: list[int] = []
    with ExitStack() as previous:

        def receive(number: int, frame: Any) -> None:
            received.append(number)
            previous.close()
            with suppress(OSError):  # stderr may be closed
                # Not by `print`, during which the signal may have come.
                os.write(2, b'stopping after the image at hand; a second signal stops at once\n')

        for number in (signal.SIGINT, signal.SIGTERM):
            previous.callback(signal.signal, number, signal.signal(number, receive))
        yield received
