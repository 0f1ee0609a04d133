"""Tests against the Swins of other libraries, which need a separate environment.

Run them with ``.venv-peers/bin/python -m pytest tests/peers``; the group peers of pyproject.toml lists the packages. In
other environments the tests are skipped.
"""

import contextlib
import functools
from importlib import import_module

from .cuda_stubs import load_operators


def leave_multimodal_out() -> None:
    """Hide pycocotools from mmpretrain, which looks it up with importlib_metadata.

    If pycocotools and transformers are installed, mmpretrain imports its multimodal models, which do not support
    transformers 5.
    """
    metadata = import_module('importlib_metadata')
    find = metadata.distribution

    @functools.wraps(find)
    def distribution(name):
        if name == 'pycocotools':
            raise metadata.PackageNotFoundError(name)
        return find(name)

    metadata.distribution = distribution


load_operators()
with contextlib.suppress(ModuleNotFoundError):  # a dependency of mmpretrain
    leave_multimodal_out()
