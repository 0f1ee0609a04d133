"""Other people's Swins as the oracles of checkpoint conversion; they need an environment of their own.

Run with ``.venv-peers/bin/python -m pytest tests/peers``, see requirements/peers.txt. Elsewhere the tests are skipped.
"""

from importlib.util import find_spec
from pathlib import Path

import torch


def _define_missing_operators():
    """Declare the compiled operators of torchvision where they were built for another torch.

    Its models do not use them, but it cannot be imported without. The operators live as long as what is returned.
    """
    spec = find_spec('torchvision')
    if spec is None or spec.origin is None:
        return None
    try:
        torch.ops.load_library(Path(spec.origin).parent / '_C.so')
    except OSError:
        library = torch.library.Library('torchvision', 'DEF')
        forward = ('qnms', 'nms', 'roi_align', 'deform_conv2d', 'ps_roi_align', 'ps_roi_pool', 'roi_pool')
        backward = tuple(f'_{name}_backward' for name in forward[2:])
        for name in forward + backward:
            library.define(f'{name}(Tensor input) -> Tensor')
        return library
    return None


_LIBRARY = _define_missing_operators()
