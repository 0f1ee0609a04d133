"""Entry points of torch.hub: ``torch.hub.load(repository, 'swin_t', checkpoint=..., out_indices=(1, 2, 3))``."""

from functools import partial
from typing import Any

from swin_dense import create_backbone

dependencies = ['torch', 'numpy', 'PIL', 'yaml', 'filelock']


def _entry(name: str) -> Any:
    build = partial(create_backbone, name)
    build.__doc__ = f'Return {name} as swin_dense.create_backbone builds it; ``checkpoint`` and its other options hold.'
    return build


swin_t, swin_s, swin_b, swin_l = (_entry(f'swin_{size}') for size in 'tsbl')
swinv2_t, swinv2_s, swinv2_b, swinv2_l = (_entry(f'swinv2_{size}') for size in 'tsbl')
