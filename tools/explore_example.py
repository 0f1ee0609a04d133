"""Create the example page of `swin-dense explore`, and a screenshot of it with the installed Chromium.

    python tools/explore_example.py

The weights are random. Those of attention are scaled up, because otherwise all attention maps would look uniform.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import skimage.data
import torch
from playwright.sync_api import sync_playwright

from swin_dense import SwinBackbone
from swin_dense.explore.page import make_page
from swin_dense.explore.record import make_record

DOCS = Path(__file__).resolve().parent.parent / 'docs'
PAGE = DOCS / 'examples' / 'explore.html'
PICTURE = DOCS / 'images' / 'explore.png'
MAX_SIDE = 256
HEIGHT = 690  # pixels of the picture, to the explanation of the attention; below, the left half is empty


def main() -> None:
    record = make_record(sharpened(), skimage.data.chelsea(), MAX_SIDE)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(make_page(record, 'chelsea.png', is_random=True).text, encoding='utf-8')
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which('chromium'), args=['--no-sandbox'])
        page = browser.new_page(viewport={'width': 1180, 'height': 900})
        page.goto(PAGE.as_uri())
        page.check('input[value=attention]')
        page.locator('#photo').click(position={'x': 225, 'y': 160})
        page.locator('#verdict', has_text=' ').wait_for()
        upper: Any = {**(page.locator('.bench').bounding_box() or {}), 'height': HEIGHT}
        page.screenshot(path=PICTURE, clip=upper, full_page=True)
        browser.close()


def sharpened() -> SwinBackbone:
    """Return a small backbone with random weights whose attention differs between tokens."""
    torch.manual_seed(0)
    backbone = SwinBackbone(embed_dims=48, depths=(2, 2, 2, 2), num_heads=(3, 6, 12, 24)).eval()
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if name.endswith('attn.w_msa.qkv.weight'):
                parameter.mul_(10)
            elif name.endswith('relative_position_bias_table'):
                parameter.mul_(40)
    return backbone


if __name__ == '__main__':
    main()
