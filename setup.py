"""Add configs, model-index.yml and two tools to wheels at the place where mim and mmengine expect them.

pyproject.toml cannot express this.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
TOOLS = ('train.py', 'test.py')  # what mim runs; the other tools are for the clone


class BuildWithRecipes(build_py):
    """Copy the files to ``swin_dense/.mim``, except in an editable install, which reads those of the clone."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        mim = Path(self.build_lib, 'swin_dense', '.mim')
        shutil.rmtree(mim, ignore_errors=True)  # from an earlier build
        shutil.copytree(ROOT / 'configs', mim / 'configs', ignore=shutil.ignore_patterns('__pycache__', '*.pyc'))
        shutil.copy(ROOT / 'model-index.yml', mim)
        (mim / 'tools').mkdir()
        for name in TOOLS:
            shutil.copy(ROOT / 'tools' / name, mim / 'tools')


setup(cmdclass={'build_py': BuildWithRecipes})
