"""Build the site of the documentation into build/site, strictly: a broken link, anchor or reference fails.

    make docs
    make docs SERVE=1     # and serve it at http://127.0.0.1:8000

The pages are the Markdown files of the repository, at the places where they are in it, so that their links hold both
there and here. mkdocs wants them in a folder of their own.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / 'build' / 'site_pages'
COPIED = ('*.md', 'docs/*', 'configs/*', 'examples/*', 'benchmarks/*', 'LICENSE')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--serve', action='store_true', help='serve the site after it was built')
    args = parser.parse_args()
    shutil.rmtree(PAGES, ignore_errors=True)
    listed = subprocess.run(
        ['git', 'ls-files', '--cached', '--others', '--exclude-standard', '-z', *COPIED],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split('\0')):
        target = PAGES / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    subprocess.run([sys.executable, '-m', 'mkdocs', 'build', '--strict', '--clean'], cwd=ROOT, check=True)
    if args.serve:
        subprocess.run([sys.executable, '-m', 'http.server', '--directory', 'build/site', '8000'], cwd=ROOT, check=True)


if __name__ == '__main__':
    main()
