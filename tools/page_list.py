"""The pages of the documentation: the navigation in mkdocs.yml is the list, the other lists are written from it.

A page begins with its title, a paragraph that says what it is for, and what it needs. ``docs/README.md`` and
``docs/llms.txt`` show title and purpose of the pages of each section; ``docs/decisions/README.md`` lists its folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml
from markdown_table import markdown_table

ROOT = Path(__file__).resolve().parent.parent
# These sections are in the navigation alone, because one page of another section leads to their pages.
ONLY_IN_THE_NAVIGATION = {'Notebooks', 'Recipes', 'The project'}


class Page(NamedTuple):
    """A page of the navigation."""

    path: Path
    title: str
    purpose: str


def navigation() -> dict[str, list[Path]]:
    """Return the pages of each section of the navigation in mkdocs.yml."""
    text = (ROOT / 'mkdocs.yml').read_text().partition('\nnav:')[2]
    sections = yaml.safe_load(f'nav:{text}')['nav']
    return {name: [_path(entry) for entry in entries] for one in sections for name, entries in one.items()}


def _path(entry: str | dict[str, str]) -> Path:
    """Return the file of an entry: a name, or a dict of its title and its name."""
    (name,) = [entry] if isinstance(entry, str) else entry.values()
    return ROOT / name


def sections() -> Iterator[tuple[str, list[Page]]]:
    """Yield the sections of the lists of pages: those of the navigation, without the README and the index itself."""
    for name, paths in navigation().items():
        if name not in ONLY_IN_THE_NAVIGATION:
            shown = [path for path in paths if path.stem != 'README_zh-CN' and path.parent / path.stem not in _INDEXES]
            yield name, [read(path) for path in shown]


_INDEXES = {ROOT / 'README', ROOT / 'docs' / 'README'}


def read(path: Path) -> Page:
    """Return the title of a page and the paragraph below it.

    Raises:
        ValueError: the page does not begin so, or the paragraph is no plain sentence.
    """
    begins = re.match(r'# (.+)\n\n([A-Z][^|\[\]*#]+\.)\n\n', path.read_text())
    if begins is None:
        raise ValueError(f'{path}: begin with a title and a sentence without links that says what the page is for')
    return Page(path, begins[1], ' '.join(begins[2].split()))


def index_table() -> str:
    """Return the sections of docs/README.md, each with its table."""
    blocks = []
    for name, pages in sections():
        rows = [(page.purpose, f'[{page.title}]({_link(page.path)})') for page in pages]
        blocks.append(f'## {name}\n\n{markdown_table(["task", "page"], rows)}')
    return '\n'.join(blocks)


def llms_list() -> str:
    """Return the lists of docs/llms.txt."""
    blocks = []
    for name, pages in sections():
        lines = [f'- [{page.title}]({_link(page.path)}): {page.purpose}' for page in pages]
        blocks.append('\n'.join([f'## {name}', '', *lines]) + '\n')
    return '\n'.join(blocks)


def decisions_list() -> str:
    """Return the list of docs/decisions/README.md."""
    pages = sorted(path for path in (ROOT / 'docs' / 'decisions').glob('*.md') if path.name != 'README.md')
    titles = [path.read_text().partition('\n')[0].removeprefix('# ') for path in pages]
    return ''.join(f'- [{title}]({path.name})\n' for path, title in zip(pages, titles, strict=True))


def _link(path: Path) -> str:
    """Return the address of a page as pages of docs/ write it."""
    return Path(os.path.relpath(path, ROOT / 'docs')).as_posix()
