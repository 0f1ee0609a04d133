"""What a model needs of the loader, which is imported at the first load."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any


def convert_before_load(module: Any, state_dict: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
    """See :func:`swin_dense.checkpoint.load.convert_before_load`."""
    from swin_dense.checkpoint import load

    load.convert_before_load(module, state_dict, prefix)
