"""Progress and messages of a command that processes many images.

This module needs tqdm. Commands import it only when they run, so that `--help` and usage errors work without tqdm.
"""

from __future__ import annotations

import math
import sys
import time

from tqdm import tqdm

_SECONDS = 30.0  # between two lines


class Progress(tqdm):
    """The number of finished images on stderr: a bar on a terminal, else a line now and then.

    Args:
        total: the number of images; None if it is unknown.
        disable: print nothing.
    """

    def __init__(self, total: int | None, disable: bool = False) -> None:
        super().__init__(total=total, unit='image', dynamic_ncols=True, disable=disable or None)
        self._total = total
        self._finished = 0
        self._start = time.monotonic()
        self._next_line = self._start + _SECONDS if self.disable and not disable else math.inf

    def show(self, tile: tuple[int, int] | None = None) -> None:
        """Count one more finished image, or show that a tile of the next one is, given its number and that of all."""
        detail = '' if tile is None else 'tile {} of {}'.format(*tile)
        if tile is None:
            self._finished += 1
            self.update()
        else:
            self.set_postfix_str(detail)
        now = time.monotonic()
        if now >= self._next_line:
            self._next_line = now + _SECONDS
            total = '' if self._total is None else f' of {self._total}'
            unfinished = detail and f', {detail} of the next'
            say(f'{self._finished}{total} images{unfinished}, after {self.format_interval(now - self._start)}')


def say(text: str) -> None:
    """Print a line above the progress bar."""
    tqdm.write(text, file=sys.stderr)
