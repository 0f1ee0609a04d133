"""Infer windows from buffers, and resize weights that depend on windows, grids or image channels."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.ops.windows import Pair
from swin_dense.utils import packages


def window_of_index(index: Tensor, length: int) -> Pair | None:
    """Return the window of a ``relative_position_index`` buffer, T x T entries, for a table of ``length`` rows."""
    tokens = math.isqrt(index.numel())
    index = index.reshape(-1)
    for height in range(1, tokens + 1):
        width = tokens // height
        fits = height * width == tokens and (2 * height - 1) * (2 * width - 1) == length
        # The pair of the first and the last token in the first row has row offset 0 and the largest column offset.
        if fits and index[width - 1] == (height - 1) * (2 * width - 1):
            return height, width
    return None


def window_of_coordinates(coordinates: Tensor) -> Pair:
    """Return the window of a coordinate buffer from its shape."""
    return (coordinates.shape[-3] + 1) // 2, (coordinates.shape[-2] + 1) // 2


def trained_window(coordinates: Tensor) -> Pair | None:
    """Return the pretraining window to which a coordinate buffer is scaled, or None if its values do not determine it.

    The buffer ``relative_coords_table`` is (1, 2 * window height - 1, 2 * window width - 1, 2).
    """
    sides = []
    for axis, side in enumerate(window_of_coordinates(coordinates)):
        outermost = coordinates[..., axis].abs().max().item()
        if not 0 < outermost < math.inf:
            return None
        sides.append(1 + round(8 * (side - 1) / (8**outermost - 1)))
    return sides[0], sides[1]


def offsets(window: Pair) -> Pair:
    """Return the number of relative offsets in a window, (rows, columns) of its bias table."""
    return 2 * window[0] - 1, 2 * window[1] - 1


def resize_table(table: Tensor, old: Pair, new: Pair, method: str = 'bicubic') -> Tensor:
    """Interpolate a bias table ((2 * height - 1) * (2 * width - 1), A) from one window to another, in tokens.

    The method is 'bicubic', or 'geometric': a cubic spline over offsets with geometrically growing distances, which
    changes the bias of near offsets less (fine-tuning code of SimMIM and BEiT).
    """
    interpolate = _bicubic if method == 'bicubic' else _geometric
    maps = _at_least_float32(table).T.reshape(1, -1, *offsets(old))
    resized = interpolate(maps, offsets(new))
    return resized.flatten(2)[0].T.contiguous().to(table.dtype)


def resize_position(position: Tensor, old: Pair, new: Pair) -> Tensor:
    """Resize an absolute position embedding (1, L, C) from one grid (H, W) to another by bicubic interpolation."""
    maps = _at_least_float32(position).transpose(1, 2).unflatten(2, old)
    resized = _bicubic(maps, new)
    return resized.flatten(2).transpose(1, 2).contiguous().to(position.dtype)


def adapt_channels(weight: Tensor, channels: int, policy: str = 'repeat') -> Tensor:
    """Adapt the weight (C, channels, p, p) of the patch projection to a number of image channels.

    The policies are those of the argument ``in_channels`` of :func:`swin_dense.load_checkpoint`.
    """
    given = weight.shape[1]
    if policy == 'zero':
        if channels < given:
            raise ValueError(
                f'the policy "zero" only adds channels: got {given} in the checkpoint, {channels} in the model; '
                'use "mean"'
            )
        return F.pad(weight, (0, 0, 0, 0, 0, channels - given))
    scale = given / channels
    if policy == 'mean' or channels == 1:
        return (weight.mean(1, keepdim=True) * scale).repeat(1, channels, 1, 1)
    return weight[:, torch.arange(channels) % given] * scale


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _bicubic(maps: Tensor, size: Pair) -> Tensor:
    return F.interpolate(maps, size, mode='bicubic')


def _geometric(maps: Tensor, size: Pair) -> Tensor:
    interpolate = packages.optional("table_resize='geometric'", 'scipy.interpolate')
    for axis, new in zip((2, 3), size, strict=True):
        if maps.shape[axis] == new:
            continue
        positions = _geometric_positions(maps.shape[axis] // 2, new // 2)
        degree = min(3, len(positions) - 1)
        spline = interpolate.make_interp_spline(positions, maps.cpu().numpy(), k=degree, axis=axis)
        wanted = torch.arange(-(new // 2), new // 2 + 1, dtype=torch.float64)
        wanted = wanted.clamp(positions[0], positions[-1])
        maps = torch.from_numpy(spline(wanted.numpy())).to(maps)
    return maps


def _geometric_positions(old: int, new: int) -> list[float]:
    """Return positions of the offsets -old..old with geometric distances that end at -new and new."""
    left, right = 1.01, 1.5
    while right - left > 1e-6:
        ratio = (left + right) / 2
        if (1 - ratio**old) / (1 - ratio) > new:
            right = ratio
        else:
            left = ratio
    # As in the official code, the last ratio tried, not the middle of the remaining interval.
    distances = [0.0]
    for step in range(old):
        distances.append(distances[-1] + ratio**step)
    return [-distance for distance in reversed(distances[1:])] + distances
