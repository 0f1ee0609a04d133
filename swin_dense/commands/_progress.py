"""Progress and messages on stderr while a command processes many images.

This module needs tqdm. Commands import it only when they run, so that `--help` and usage errors work without tqdm.
"""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(total: int | None, disable: bool = False) -> Any:
    """Return a context manager with a progress bar over images, which is shown only on a terminal."""
    return tqdm(total=total, unit='image', dynamic_ncols=True, disable=disable or None)


def say(text: str) -> None:
    """Print a line above the progress bar."""
    tqdm.write(text, file=sys.stderr)
