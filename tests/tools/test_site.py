"""The documentation site: every address in its HTML, also in what mkdocs generates, leads to a file and an anchor."""

import re
import runpy
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest

from tests.conftest import ROOT
from tests.processes import completed

PYTHON = ROOT / '.venv-docs' / 'bin' / 'python'
SITE = ROOT / 'build' / 'site'


class Addresses(HTMLParser):
    """Collects the anchors of a page and the addresses that it refers to."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.targets = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == 'id':
                self.anchors.add(value)
            elif name in ('href', 'src') and value:
                self.targets.add(value)


def broken(page, pages):
    """Return the addresses of a page that lead to no file or no anchor; other servers are not asked."""
    missing = []
    for target in pages[page].targets:
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        folder = SITE if parts.path.startswith('/') else page.parent
        file = (folder / unquote(parts.path).lstrip('/')).resolve() if parts.path else page
        file = file / 'index.html' if file.is_dir() else file
        has_anchor = not parts.fragment or file not in pages or unquote(parts.fragment) in pages[file].anchors
        if not file.is_file() or not has_anchor:
            missing.append(target)
    return missing


def test_every_link_leads_to_a_page_or_file_of_the_site(tmp_path):
    site = runpy.run_path(str(ROOT / 'tools' / 'site.py'))  # an import would give Python's own module of this name
    site['copy_pages'](ROOT, tmp_path)
    missing, seen = [], 0
    for page in tmp_path.rglob('*.md'):
        text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.S | re.M)
        for target in re.findall(r'\]\(([^) #]+)', text):
            seen += 1
            if '://' not in target and not target.startswith('data:') and not (page.parent / target).exists():
                missing.append((page.name, target))
    assert missing == []
    assert seen > 500
    reference = (tmp_path / 'docs' / 'reference.md').read_text()
    assert '\n::: swin_dense.SwinBackbone\n' in reference
    assert 'members: [' in reference


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / '.venv-docs' / 'ready').exists(), reason='needs .venv-docs, which make docs creates')
def test_every_address_leads_to_a_file_and_an_anchor():
    completed([PYTHON, ROOT / 'tools' / 'site.py'], cwd=ROOT)
    pages = {path: Addresses(path.read_text()) for path in SITE.rglob('*.html')}
    assert len(pages) > 50
    assert {str(page.relative_to(SITE)): found for page in pages if (found := broken(page, pages))} == {}
