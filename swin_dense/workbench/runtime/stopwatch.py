"""Measure the steps of a prediction."""

from __future__ import annotations

import time


class Stopwatch:
    """A stopwatch with a name for each lap."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # of each step, in the order of their first laps
        self._last = time.perf_counter()

    def lap(self, step: str) -> None:
        """Add the time since the lap before to a step."""
        now = time.perf_counter()
        self.seconds[step] = self.seconds.get(step, 0.0) + now - self._last
        self._last = now
