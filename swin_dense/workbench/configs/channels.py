"""Look whether the parts of a model take the maps that its backbone returns, before a training builds it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from swin_dense.mm import SwinDense

_HEADS = ('decode_head', 'auxiliary_head', 'panoptic_head')  # those that read the backbone if there is no neck


def check_channels(config: Config) -> None:
    """Raise ValueError if a neck or a head expects other channels than a backbone of this package returns."""
    channels = _returned(config)
    if channels is None:
        return
    wrong = []
    settings = []
    for name, part in _readers(config.model):
        expected, given = _expected(part, channels), part['in_channels']
        if expected != (given if isinstance(given, int) else list(given)):
            wrong.append(f'{name}.in_channels is {given}')
            numbers = expected if isinstance(expected, list) else [expected]
            settings.append(f'{name}.in_channels={",".join(map(str, numbers))}')
    if wrong:
        maps = ', '.join(map(str, channels))
        raise ValueError(
            f'{", ".join(wrong)}, but the maps of the backbone have {maps} channels; add --set {" ".join(settings)}'
        )


def _returned(config: Config) -> list[int] | None:
    """Return the channels of each map of the backbone, or None if it is of another package."""
    backbone = config.model.get('backbone')
    if not isinstance(backbone, dict) or not backbone.get('type'):
        return None
    init_default_scope(config.get('default_scope') or 'mmengine')
    with MODELS.switch_scope_and_registry(None) as registry:
        kind = registry.get(backbone['type'])
        if not (isinstance(kind, type) and issubclass(kind, SwinDense)):
            return None
        with torch.device('meta'):
            built = registry.build(backbone)
    return None if built.output_missing_index_as_none else list(built.out_channels)


def _readers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts that read the maps of the backbone and state how many channels they expect, with their names."""
    names = ('neck',) if model.get('neck') else _HEADS
    for name in names:
        parts = model.get(name)
        is_list = isinstance(parts, list)
        for index, part in enumerate(parts if is_list else [parts]):
            # The first of several necks alone reads the backbone.
            if isinstance(part, dict) and 'in_channels' in part and not (name == 'neck' and index):
                yield f'model.{name}.{index}' if is_list else f'model.{name}', part


def _expected(part: Any, channels: list[int]) -> Any:
    selected = part.get('in_index')
    try:
        if isinstance(part['in_channels'], int):
            return channels[-1 if selected is None else selected]
        return channels if selected is None else [channels[index] for index in selected]
    except IndexError:
        raise ValueError(
            f'in_index={selected} of {part.get("type")} selects maps that the backbone does not return; it returns '
            f'{len(channels)}, those of model.backbone.out_indices'
        ) from None
