"""What pyproject.toml cannot say: a wheel carries configs, tools and model-index.yml where mim and mmengine look."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithRecipes(build_py):
    """Copy them to ``swin_dense/.mim``; an editable install reads those of the clone."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        mim = Path(self.build_lib, 'swin_dense', '.mim')
        shutil.rmtree(mim, ignore_errors=True)  # of an earlier build
        for folder in ('configs', 'tools'):
            shutil.copytree(ROOT / folder, mim / folder, ignore=shutil.ignore_patterns('__pycache__', '*.pyc'))
        shutil.copy(ROOT / 'model-index.yml', mim)


setup(cmdclass={'build_py': BuildWithRecipes})
