"""Entry points of torch.hub: ``torch.hub.load(repository, 'swin_t', checkpoint=..., out_indices=(1, 2, 3))``."""

# torch.hub.list treats every callable without a leading underscore as an entry point.
from functools import partial as _partial

from swin_dense import create_backbone as _create_backbone

dependencies = ['torch', 'numpy', 'PIL', 'yaml', 'filelock']


def _entry(name: str) -> _partial:
    build = _partial(_create_backbone, name)
    build.__doc__ = f'Return {name}. The options are those of swin_dense.create_backbone, such as ``checkpoint``.'
    return build


swin_t, swin_s, swin_b, swin_l = (_entry(f'swin_{size}') for size in 'tsbl')
swinv2_t, swinv2_s, swinv2_b, swinv2_l = (_entry(f'swinv2_{size}') for size in 'tsbl')
