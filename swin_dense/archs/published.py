"""Published weights by name, such as 'swin_t.in1k', from ``weights.json``. This module needs no torch."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swin_dense.utils import checks

_FILE = re.compile(r'.*[/\\].*|.*\.(pth|pt|pth\.tar|bin|pkl|ckpt|safetensors|json)')


@dataclass(frozen=True)
class PublishedFile:
    """A published file of the weights of a Swin."""

    name: str  # the architecture, a dot, and its training data
    publisher: str
    source: str  # the page on which the publisher gives the address
    licence: str  # that the publisher gives for its weights, or for the repository that publishes them
    address: str  # where the file is
    img_size: int | None  # side of the images in training, in pixels; None if it was not published
    window_size: int  # side of the windows in tokens, in stages whose map is not smaller
    classes: int  # outputs of the classifier in the file; 0 if it has none
    normalization: str  # the preset of ``swin_dense.features`` that images need
    digest: str = ''  # as sha256=...; '' if none was published; a file whose name ends in a hash is verified with that

    @property
    def arch(self) -> str:
        return self.name.partition('.')[0]


@functools.cache
def _groups() -> list[dict[str, Any]]:
    return json.loads(Path(__file__).with_name('weights.json').read_text(encoding='utf-8'))


def recognised_preset(family: str, network: str, prefix: str, described: str, channels: int) -> str | None:
    """Return the normalisation that weights of a publisher expect, recognised by their checkpoint; None if unknown.

    Args:
        family: the family of its parameter names.
        network: 'swin' or 'swinv2'.
        prefix: that of its backbone.
        described: its name, which may contain that of the file.
        channels: those of its images.
    """
    for group in _groups():
        marks = group.get('recognised')
        if marks is None or (marks['family'], marks['network']) != (family, network):
            continue
        if prefix.startswith(marks['prefix']) or re.search(marks['file'], described):
            return marks['normalization_by_channels'].get(str(channels))
    return None


@functools.cache
def published() -> Mapping[str, PublishedFile]:
    """Return all published weights by name."""
    found = {}
    for group in _groups():
        group = dict(group)
        group.pop('recognised', None)
        files = group.pop('weights')
        found.update({name: PublishedFile(name=name, **group, **file) for name, file in files.items()})
    return found


def place_of(checkpoint: str) -> str:
    """Return the address of published weights, given their name, or else ``checkpoint``, a path or an address.

    A digest, if one was published, is in the address. A file of this name in the current folder is preferred.
    """
    weights = published().get(checkpoint)
    if weights is None or Path(checkpoint).exists():
        return checkpoint
    return f'{weights.address}#{weights.digest}' if weights.digest else weights.address


def suggestion(checkpoint: str) -> str:
    """Return the end of the message that there is no such file: the weights that may be meant, unless it is a path."""
    if _FILE.fullmatch(checkpoint):
        return ''
    return f', and no weights have this name{checks.closest(checkpoint, published())} (`swin-dense weights` lists them)'
