"""Render a record as one self-contained HTML file, which needs no server and no network."""

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
from swin_dense.explore.record import PageData, Stage
from swin_dense.utils.choices import LARGEST_PAGE

# The order matters: page.js uses the functions of the other two.
SCRIPTS = ('core.js', 'draw.js', 'page.js')


@dataclass(frozen=True)
class Page:
    """An HTML page and the errors of its attention weights."""

    text: str
    off: float  # largest absolute error of the displayed attention weights, on the scale 0 to 1
    usually_off: float  # largest absolute error of 99.9 % of the weights


def make_page(record: PageData, name: str, is_random: bool, lang: str = 'en', limit: int = LARGEST_PAGE) -> Page:
    """Render the page of a record, with the name of the image as its title, in one of ``LANGUAGES``.

    With ``is_random``, it says that the weights are random. The attention is rounded until the page fits into ``limit``
    bytes; a ValueError is raised if it does not.
    """
    shell = _shell(record, name, is_random, lang)
    blocks = [block for stage in record.stages for block in stage.blocks]
    elements = sum(100 + 4 * block.q.shape[2] for block in blocks)  # the HTML elements around the data, with the ranks
    packed = pack(blocks, (limit - len(shell.encode()) - elements) * 3 // 4)
    differences = sum((block.differences for block in packed), torch.zeros(BINS))
    off, usually_off = _upper(differences, 1.0), _upper(differences, 0.999)
    text = shell.replace('<!--blocks-->', '\n'.join(map(_block, packed)))
    text = text.replace('"off":null', f'"off":{off},"usuallyOff":{usually_off}')
    if len(text.encode()) > limit:
        raise ValueError(
            f'the page needs at least {len(text.encode()) / 1e6:.1f} MB, but the limit is {limit / 1e6:.1f} MB; '
            'raise the limit or make the image smaller'
        )
    return Page(text, off, usually_off)


def _upper(counts: Tensor, share: float) -> float:
    """Return the upper bound of a quantile from a histogram over [0, 1]."""
    enough = counts.cumsum(0) >= share * counts.sum()
    return (int(enough.nonzero()[0]) + 1) / len(counts)


def _shell(record: PageData, name: str, is_random: bool, lang: str) -> str:
    """Return the page without the attention data of the blocks."""
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
        'costs': record.costs,
    }
    # Escape '<', so that a tag in a name or label cannot close the script element.
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
    """Return the Content-Security-Policy: only the page's own style, script and inline images, and no network."""
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
