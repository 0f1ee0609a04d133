"""What the site needs of mkdocs and griffe: API pages as a reader needs them, and Markdown beside HTML."""

import re
import shutil
from pathlib import Path
from typing import Any

import griffe


class AsRead(griffe.Extension):
    """Show signatures and docstrings as a reader needs them."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Omit the parameter that only collects misspelt options, for an error that suggests the right one."""
        func.parameters = griffe.Parameters(*(one for one in func.parameters if one.name != 'unknown'))

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Remove the roles of cross-references, which Markdown does not know: ``:class:`` before a name."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r':(?:class|func|meth|mod|attr):(?=`)', '', obj.docstring.value)


def on_post_build(config: Any) -> None:
    """Copy the Markdown of every page, to which docs/llms.txt links."""
    pages, site = Path(config['docs_dir']), Path(config['site_dir'])
    for page in pages.rglob('*.md'):
        shutil.copy(page, site / page.relative_to(pages))
