"""Build the documentation in build/site. A broken link, anchor or reference is an error.

    make docs
    make docs SERVE=1          # and serve it at http://127.0.0.1:8000
    make docs PUBLISH=0.3.0    # and commit it to the branch gh-pages, where each version has a folder

The pages are the Markdown files that git tracks; a new one needs `git add`. mkdocs needs them in a separate folder, so
they are copied with the same relative paths, which keeps links valid in both places. Notebooks become pages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / 'build' / 'site_pages'
COPIED: tuple[str, ...] = ('*.md', 'docs/*', 'configs/*', 'examples/*', 'benchmarks/*')
COPIED += ('LICENSE', 'CITATION.cff', 'tests/mm/test_parity.py')  # to which pages link

# Public names, as docs/reference.md lists them: each with a link to its file, for whoever reads the page in a clone.
NAME = re.compile(r'^- \[`(swin_dense\.[\w.]+)`\]\(.+\)$', re.M)
MEMBERS = {'swin_dense.runtime.Model': ['__call__', 'predict', 'run']}


def with_docstrings(page: str) -> str:
    """Return a page whose public names are replaced by what mkdocstrings shows of them."""
    return NAME.sub(lambda found: _directive(found[1]), page)


def _directive(name: str) -> str:
    members = MEMBERS.get(name)
    if members is None:
        return f'\n::: {name}\n'
    return f'\n::: {name}\n    options:\n      members: {members}\n      inherited_members: {members}\n'


def address() -> str:
    """Return the web address of the repository, to which the pages link; '' if git knows none."""
    asked = subprocess.run(['git', 'remote', 'get-url', 'origin'], cwd=ROOT, capture_output=True, text=True)
    remote = re.sub(r'^git@([^:]+):', r'https://\1/', asked.stdout.strip())
    return remote.removesuffix('.git') if remote.startswith('https://') else ''


def as_markdown(notebook: dict[str, Any], name: str) -> str:
    """Return the page of a notebook, with its outputs, and a link to the notebook below the title."""
    pages = []
    for cell in notebook['cells']:
        source = ''.join(cell['source']).strip()
        pages.append(f'```python\n{source}\n```' if cell['cell_type'] == 'code' else source)
        pages += [_shown(output) for output in cell.get('outputs', ())]
    title, _, rest = pages[0].partition('\n')
    return '\n\n'.join([title, f'[Download the notebook]({name})', rest.strip(), *pages[1:]]) + '\n'


def _shown(output: dict[str, Any]) -> str:
    """Return an output of a notebook as Markdown."""
    data = output.get('data', {})
    if 'image/png' in data:
        return f'![output](data:image/png;base64,{data["image/png"].strip()})'
    text = ''.join(output.get('text') or data['text/plain']).strip()
    return f'```text\n{text}\n```'


def copy_pages(root: Path, pages: Path) -> None:
    """Copy what git tracks, and nothing else, from a clone to the folder of the pages, which is replaced."""
    shutil.rmtree(pages, ignore_errors=True)
    listed = subprocess.run(['git', 'ls-files', '-z', *COPIED], cwd=root, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split('\0')):
        target = pages / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, target)
        if target.suffix == '.ipynb':
            target.with_suffix('.md').write_text(as_markdown(json.loads(target.read_text()), target.name))
        elif name == 'docs/reference.md':
            target.write_text(with_docstrings(target.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--serve', action='store_true', help='serve the site after building it')
    parser.add_argument('--publish', metavar='VERSION', help='commit the site to the branch gh-pages as this version')
    args = parser.parse_args()
    copy_pages(ROOT, PAGES)
    os.environ['REPOSITORY_ADDRESS'] = address()
    subprocess.run([sys.executable, '-m', 'mkdocs', 'build', '--strict', '--clean'], cwd=ROOT, check=True)
    if args.publish:
        mike = str(Path(sys.executable).with_name('mike'))  # runs mkdocs again, with the same settings
        environment = {**os.environ, 'PATH': os.pathsep.join([str(Path(mike).parent), os.environ['PATH']])}
        for command in (['deploy', '--update-aliases', args.publish, 'latest'], ['set-default', 'latest']):
            subprocess.run([mike, *command], cwd=ROOT, env=environment, check=True)
    if args.serve:
        subprocess.run([sys.executable, '-m', 'http.server', '--directory', 'build/site', '8000'], cwd=ROOT, check=True)


if __name__ == '__main__':
    main()
