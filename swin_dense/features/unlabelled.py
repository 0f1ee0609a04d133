"""The former place of :class:`swin_dense.pretraining.UnlabelledImages`."""

from typing import Any

from swin_dense.utils.deprecation import former_name

_FORMER = {'UnlabelledImages': 'swin_dense.pretraining.UnlabelledImages'}


def __getattr__(name: str) -> Any:
    return former_name(__name__, name, _FORMER)
