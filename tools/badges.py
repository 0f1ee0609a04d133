"""Draw the badges of the README from pyproject.toml. They are files, so that pages load nothing from elsewhere.

python tools/badges.py
"""

from __future__ import annotations

from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / 'docs' / 'images'
CHARACTER, MARGIN = 6.6, 7  # width of a character of this size, and space beside a text, in pixels
BADGE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{label}: {value}">
<rect width="{width}" height="20" rx="3" fill="#555"/>
<path d="M{left} 0h{right}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3H{left}z" fill="#3949ab"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">
<text x="{label_x}" y="14">{label}</text>
<text x="{value_x}" y="14">{value}</text>
</g>
</svg>
"""


def facts() -> dict[str, str]:
    """Return what the badges say, by label."""
    project = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']
    torch = next(one for one in project['dependencies'] if one.startswith('torch'))
    oldest = {'python': project['requires-python'], 'torch': torch.removeprefix('torch')}
    return {
        'license': project['license'],
        **{name: f'{text.removeprefix(">=")} or later' for name, text in oldest.items()},
    }


def badge(label: str, value: str) -> str:
    """Return a badge as SVG."""
    left, right = (round(len(text) * CHARACTER + 2 * MARGIN) for text in (label, value))
    middles = {'label_x': left / 2, 'value_x': left + right / 2}
    return BADGE.format(label=label, value=value, left=left, right=right - 3, width=left + right, **middles)


if __name__ == '__main__':
    for label, value in facts().items():
        (FOLDER / f'badge_{label}.svg').write_text(badge(label, value))
