"""What all kinds of fuzzed inputs share."""

from __future__ import annotations

import functools
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

import swin_dense
from swin_dense import SwinBackbone
from swin_dense.utils.errors import is_out_of_memory

PACKAGE = os.path.dirname(swin_dense.__file__)
TAKEN, REFUSED = 'taken', 'refused'
SMALLEST = {
    'embed_dims': 8,
    'depths': (1, 1),
    'num_heads': (2, 4),
    'strides': (4, 2),
    'out_indices': (0, 1),
}
SEEDS = st.integers(0, 2**32)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 9),
    st.floats(),
    st.text(max_size=4),
    st.binary(max_size=2),
    st.lists(st.one_of(st.integers(-1, 5), st.none(), st.text(max_size=2)), max_size=5),
    st.dictionaries(st.sampled_from(['type', 'eps', 'x']), st.one_of(st.text(max_size=4), st.floats()), max_size=2),
)


def refused(error: Exception) -> str:
    """Return REFUSED if a ``raise`` of this package, or lack of memory, caused the error; raise it again otherwise."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_raised_here = last.filename.startswith(PACKAGE) and (last.line or '').startswith('raise ')
    if is_raised_here or is_out_of_memory(error):
        return REFUSED
    raise error


def some_of(likely: dict[str, Any], odd: Any) -> Any:
    """Draw at most four of the entries, each with a likely or an odd value."""

    def entries(names: list[str]) -> Any:
        return st.fixed_dictionaries({name: mostly(likely[name], odd) for name in names})

    return st.lists(st.sampled_from(sorted(likely)), max_size=4, unique=True).flatmap(entries)


def mostly(usual: Any, other: Any) -> Any:
    """Draw from ``usual`` three times out of four. A repeated argument of st.one_of would count only once."""
    return st.integers(0, 3).flatmap(lambda number: usual if number else other)


@functools.cache
def toy() -> SwinBackbone:
    torch.manual_seed(0)
    return SwinBackbone(**SMALLEST).eval()


@functools.cache
def playground() -> Path:
    """Return a temporary folder that is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix='fuzz ')
    playground.folder = folder  # type: ignore[attr-defined]
    return Path(folder.name)


@dataclass(frozen=True)
class Kind:
    """A kind of fuzzed input.

    Attributes:
        strategy: strategy that generates the examples.
        attempt: function that tries one example.
        share: percentage of all examples that are of this kind; smaller if an example takes long.
        needs: optional packages that the kind needs.
    """

    strategy: Any
    attempt: Callable[[Any], str]
    share: int
    needs: tuple[str, ...] = ()
