"""A record as one HTML file, which asks for nothing beside itself and opens without a server."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from swin_dense.explore.packing import BINS, Packed, pack
from swin_dense.explore.record import Record, Stage
from swin_dense.utils import checks

LARGEST_PAGE = 12_000_000
LANGUAGES = ('en', 'zh')
# In this order: the first knows no document, the last ties them together.
SCRIPTS = ('core.js', 'draw.js', 'page.js')


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        text: its HTML.
        off: how far the furthest attention weight that it shows, between 0 and 1, is from the model's.
        usually_off: how far 999 of 1000 are at most.
    """

    text: str
    off: float
    usually_off: float


def make_page(record: Record, name: str, is_random: bool, lang: str = 'en', limit: int = LARGEST_PAGE) -> Page:
    """Make the page that shows a record.

    Args:
        record: from :func:`swin_dense.explore.record.make_record`.
        name: of the image, shown as the title.
        is_random: say on the page that the weights are random.
        lang: of ``LANGUAGES``, in which the page opens.
        limit: bytes that the page takes at most; the attention is rounded until it does.

    Raises:
        ValueError: there is no such language, or the page does not fit.
    """
    checks.one_of('lang', lang, LANGUAGES)
    shell = _shell(record, name, is_random, lang)
    blocks = [block for stage in record.stages for block in stage.blocks]
    elements = sum(100 + 4 * block.q.shape[2] for block in blocks)  # around what is packed, with a rank per head
    packed = pack(blocks, (limit - len(shell.encode()) - elements) * 3 // 4)
    differences = sum((block.differences for block in packed), torch.zeros(BINS))
    off, usually_off = _upper(differences, 1.0), _upper(differences, 0.999)
    text = shell.replace('<!--blocks-->', '\n'.join(map(_block, packed)))
    text = text.replace('"off":null', f'"off":{off},"usuallyOff":{usually_off}')
    if len(text.encode()) > limit:
        raise ValueError(
            f'the page takes {len(text.encode()) / 1e6:.1f} MB at least and may take {limit / 1e6:.1f}; '
            'allow more, or make the image smaller'
        )
    return Page(text, off, usually_off)


def _upper(counts: Tensor, share: float) -> float:
    """Return what a share of numbers that are counted in bins of [0, 1] is at most."""
    enough = counts.cumsum(0) >= share * counts.sum()
    return (int(enough.nonzero()[0]) + 1) / len(counts)


def _shell(record: Record, name: str, is_random: bool, lang: str) -> str:
    """Return the page without the attention of its blocks."""
    style, script = _asset('page.css'), '\n'.join(map(_asset, SCRIPTS))
    labels = json.loads(_asset('labels.json'))
    facts = {
        'name': name,
        'model': record.model,
        'isRandom': is_random,
        'lang': lang,
        'labels': labels,
        'off': None,
        'size': record.pixels.shape[:2],
        'photo': _picture(record.pixels, 'JPEG', quality=92, subsampling=0),
        'levels': [{'stride': stride, 'picture': _picture(level, 'PNG')} for stride, level in record.levels.items()],
        'stages': list(map(_stage, record.stages)),
        'costs': [vars(series) for series in record.costs],
    }
    # A tag inside of a name or label must not end the element that holds it.
    text = json.dumps(facts, ensure_ascii=False, separators=(',', ':')).replace('<', '\\u003c')
    parts = {
        '<!--title-->': html.escape(name),
        '<!--lang-->': lang,
        '<!--policy-->': _policy(style, script),
        '<!--style-->': style,
        '<!--script-->': script,
        '<!--facts-->': text,
    }
    page = _asset('page.html')
    for marker, part in parts.items():
        page = page.replace(marker, part)
    return page


def _policy(style: str, script: str) -> str:
    """Return what the browser shall hold the page to: its own style and script, its own pictures, and no network."""
    hashes = {}
    for kind, text in (('style', style), ('script', script)):
        hashes[kind] = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return (
        f"default-src 'none'; img-src data:; style-src 'sha256-{hashes['style']}'; "
        f"script-src 'sha256-{hashes['script']}'; base-uri 'none'; form-action 'none'"
    )


def _stage(stage: Stage) -> dict[str, Any]:
    blocks = [
        {
            'window': block.window,
            'shift': block.shift,
            'rows': field.rows.tolist(),
            'columns': field.columns.tolist(),
        }
        for block, field in zip(stage.blocks, stage.receptive_fields, strict=True)
    ]
    heads = stage.blocks[0].q.shape[2]
    return {'stride': stage.stride, 'size': stage.size, 'channels': stage.channels, 'heads': heads, 'blocks': blocks}


def _block(packed: Packed) -> str:
    ranks = ' '.join(map(str, packed.ranks))
    content = base64.b64encode(packed.content).decode()
    return f'<script type="text/plain" class="block" data-ranks="{ranks}">{content}</script>'


def _picture(pixels: np.ndarray, kind: str, **options: Any) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return f'data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}'


def _asset(name: str) -> str:
    return resources.files('swin_dense.explore').joinpath('assets', name).read_text(encoding='utf-8')
