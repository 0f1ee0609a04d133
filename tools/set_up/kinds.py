"""Which requirement files make up which environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Kind:
    """What one kind of environment holds.

    Attributes:
        files: requirement files, resolved together
        no_deps: requirement files installed without their own requirements
        triton: whether to install triton where torch brings none
        pythons: oldest and newest version of Python that it was tried with
        gigabytes: space that it takes besides torch
    """

    files: tuple[str, ...]
    no_deps: tuple[str, ...] = ()
    triton: bool = False
    pythons: tuple[tuple[int, int], tuple[int, int]] = ((3, 11), (3, 13))
    gigabytes: float = 1.0

    def requirements(self) -> list[str]:
        return [line for name in self.files for line in read(name)]

    def requirements_without_deps(self) -> list[str]:
        return [line for name in self.no_deps for line in read(name)]


KINDS = {
    'main': Kind(('torch.txt', 'core.txt', 'mm.txt', 'dev.txt'), triton=True, gigabytes=2.0),
    'core': Kind(('torch.txt', 'core.txt'), gigabytes=0.1),
    'peers': Kind(('torch.txt', 'core.txt', 'peers.txt'), no_deps=('peers-no-deps.txt',)),
}


def read(name: str) -> list[str]:
    """Return the requirements that a file in ``requirements/`` lists, without comments."""
    lines = (line.split('#')[0].strip() for line in (ROOT / 'requirements' / name).read_text().splitlines())
    return [line for line in lines if line]


def pinned(requirements: list[str], name: str) -> str | None:
    """Return the requirement ``name==version`` of a list that has it."""
    return next((line for line in requirements if line.startswith(f'{name}==')), None)
