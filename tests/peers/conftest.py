"""Other people's Swins as the oracles of checkpoint conversion; they need an environment of their own.

Run with ``.venv-peers/bin/python -m pytest tests/peers``, see the group peers of pyproject.toml. In other environments
the tests are skipped.
"""

import contextlib
import functools
from importlib import import_module

from .cuda_stubs import load_operators


def leave_multimodal_out() -> None:
    """Let mmpretrain, which asks importlib_metadata, see no pycocotools.

    Beside pycocotools and transformers it imports its multimodal models, which transformers 5 has no place for.
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
with contextlib.suppress(ModuleNotFoundError):  # mmpretrain brings it
    leave_multimodal_out()
