"""What a command says on stderr while it runs through many images: how far it is, and what it passes over.

It needs tqdm, so commands import it where they run: their help and what they say of wrong usage do without.
"""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(total: int | None, disable: bool = False) -> Any:
    """Return a bar that counts images, to be used as a context manager; shown on a terminal alone."""
    return tqdm(total=total, unit='image', dynamic_ncols=True, disable=disable or None)


def say(text: str) -> None:
    """Print a line above the bar."""
    tqdm.write(text, file=sys.stderr)
