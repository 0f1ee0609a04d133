"""What a model needs of the loader, which is imported at the first load."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swin_dense.checkpoint.report import Report


def convert_before_load(module: Any, state_dict: MutableMapping[str, Any], prefix: str, *_: Any) -> None:
    """See :func:`swin_dense.checkpoint.load.convert_before_load`."""
    from swin_dense.checkpoint import load

    load.convert_before_load(module, state_dict, prefix)


def log_report(report: Report) -> None:
    """See :func:`swin_dense.checkpoint.load.log_report`."""
    from swin_dense.checkpoint import load

    load.log_report(report)
