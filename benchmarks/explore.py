"""Time `swin-dense explore` for Swin-T at 512 x 512 pixels, and the drawing of its page after each pointer move.

    python benchmarks/explore.py

The report replaces explore.json, from which tools/update_readme.py generates the tables in docs/explore.md.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import skimage.data
import torch
from PIL import Image
from playwright.sync_api import sync_playwright

from swin_dense import SwinBackbone

RESULTS = Path(__file__).with_suffix('.json')
# Factors for the weights of queries and keys.
SHARPENED = {'random': 1, 'sharp, x4': 4, 'very sharp, x8': 8}
MOVES = 60
# Callbacks of one frame run in the order of registration: ours, that of the page's event handler, then ours again.
MOVE = """async ([x, y]) => {
  const canvas = document.getElementById('photo');
  let start;
  requestAnimationFrame(() => { start = performance.now(); });
  const box = canvas.getBoundingClientRect();
  canvas.dispatchEvent(new PointerEvent('pointermove', {
    pointerType: 'mouse', clientX: box.left + x * box.width, clientY: box.top + y * box.height,
  }));
  return await new Promise((done) => requestAnimationFrame(() => done(performance.now() - start)));
}"""


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    pages = {}
    with tempfile.TemporaryDirectory() as folder:
        photo = Path(folder, 'astronaut.png')
        Image.fromarray(skimage.data.astronaut()).save(photo)
        for name, factor in SHARPENED.items():
            weights = Path(folder, 'weights.pth')
            torch.save({'model': sharpened(factor)}, weights)
            page = Path(folder, f'{factor}.html')
            pages[name] = run_command(photo, weights, page)
        drawing = time_drawing(page)
    report = {
        'torch': torch.__version__,
        'cores': os.cpu_count(),
        'load': os.getloadavg()[0],
        'pages': pages,
        'drawing': drawing,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + '\n')
    print(json.dumps(report, indent=2))


def sharpened(factor: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = SwinBackbone('t').state_dict()
    for name, value in state.items():
        if name.endswith('attn.w_msa.qkv.weight'):
            value[: 2 * len(value) // 3] *= factor
    return state


def run_command(photo: Path, weights: Path, page: Path) -> dict[str, float]:
    """Run `swin-dense explore`, and return its time, the size of the page and its errors."""
    command = [sys.executable, '-m', 'swin_dense', 'explore', photo, '--checkpoint', weights, '--out', page]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    # With several threads, busy waiting would count as CPU time.
    subprocess.run(command, check=True, env={**os.environ, 'OMP_NUM_THREADS': '1'})
    seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    facts = json.loads(page.read_text().partition('id="facts">')[2].partition('</script>')[0])
    return {
        'seconds': seconds,
        'processor_seconds': after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        'bytes': page.stat().st_size,
        **{name: facts[name] for name in ('off', 'usuallyOff')},
    }


def time_drawing(path: Path) -> dict[str, dict[str, float]]:
    """Move the pointer over each view, and return the drawing time of the page in ms."""
    times = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which('chromium'), args=['--no-sandbox'])
        page = browser.new_page(viewport={'width': 1280, 'height': 900})
        page.set_default_timeout(120_000)
        page.goto(path.as_uri())
        for view, stages in (('windows', [1]), ('attention', range(4)), ('reach', [3])):
            page.check(f'input[value={view}]')
            for stage in stages:
                page.check(f'input[name=stages][value="{stage}"]')
                page.wait_for_timeout(2000)  # the page unpacks a block
                taken = sorted(page.evaluate(MOVE, [at / MOVES, at / MOVES]) for at in range(MOVES))
                row = {'median_ms': statistics.median(taken), 'p95_ms': taken[int(0.95 * MOVES)]}
                times[f'{view}, stage {stage + 1}'] = row
        browser.close()
    return times


if __name__ == '__main__':
    main()
