"""Window geometry by index arithmetic: the mapping between the tokens of a map and the slots of its shifted windows.

A map of any size is padded at the right and bottom to a multiple of the window, rolled by minus the shift, and cut into
windows. As in the official detection code, the window is never clamped and the shift is never dropped, however small
the map. Rows and columns are independent, so every index table is an outer sum of two short ones.

All functions are pure. A graph recorded from them is valid for every size, because sizes are used only as operands of
``+``, ``*``, ``//`` and comparisons, on non-negative integers.

Suffixes of tensors name their axes, in all of ``swin_dense.ops``: B batch, H and W the map in tokens, C channels,
N windows per image, M windows of all images, T tokens per window, S slots per image (N * T), A heads, D channels per
head, P offsets in a position bias table. Windows and shifts are (height, width) in tokens.
"""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

Size = tuple[int, int]

# Added to the scores of pairs from different regions, as in the official code.
REGION_PENALTY = -100.0


class Grid(NamedTuple):
    """A map and the shifted windows that cover it.

    Attributes:
        size: (height, width) of the map in tokens.
        window: (height, width) in tokens.
        shift: (height, width) in tokens.
    """

    size: tuple[int, ...]
    window: Size
    shift: Size


class WindowSpec(NamedTuple):
    """The settings of window attention.

    Attributes:
        num_heads: A, which divides C.
        window: (height, width) in tokens.
        shift: (height, width) in tokens by which the windows are shifted, each less than the window.
        scale: factor on the query-key product.
    """

    num_heads: int
    window: Size
    shift: Size
    scale: float


def window_grid(height: int, width: int, window: Size) -> Size:
    """Return the number of windows that cover a map: (rows, columns)."""
    # Not -(-height // window[0]): runtimes of exported graphs differ in the division of negative numbers.
    return (height + window[0] - 1) // window[0], (width + window[1] - 1) // window[1]


def slots_of_windows(grid: Grid, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the content of each slot of the windows of a map.

    The roll moves the first ``shift`` rows and columns to the opposite edge, so the last row and the last column of
    windows contain tokens from both edges. Only tokens of the same region, which were neighbours before the roll, may
    attend to each other.

    Returns:
        The token, as its raster index in the padded map, and its region, an integer from 0 to 3: (N, T) each.
    """
    sides = []
    for side, window, shift in zip(*grid, strict=True):
        padded = (side + window - 1) // window * window
        index = torch.arange(padded, device=device) + shift
        index = torch.where(index < padded, index, index - padded)  # exporters do not support the remainder by a size
        sides.append(index.reshape(-1, window))
    # The axes are rows and columns of windows, and rows and columns of tokens in a window.
    rows = sides[0][:, None, :, None]
    columns = sides[1][:, None]
    tokens = rows * columns.numel() + columns
    regions = 2 * (rows < grid.shift[0]) + (columns < grid.shift[1])
    return tokens.flatten(2).flatten(0, 1), regions.flatten(2).flatten(0, 1)


def slots_of_tokens(grid: Grid, device: torch.device) -> Tensor:
    """Return the slot of each token of a map, (H, W): numbered window by window, and row by row in a window."""
    sides = []
    for side, window, shift in zip(*grid, strict=True):
        padded = (side + window - 1) // window * window
        index = torch.arange(side, device=device) - shift
        sides.append(torch.where(index < 0, index + padded, index))
    rows = sides[0][:, None]
    columns = sides[1]
    height, width = grid.window
    _, num_columns = window_grid(grid.size[0], grid.size[1], grid.window)
    windows = rows // height * num_columns + columns // width
    tokens = rows % height * width + columns % width
    return windows * (height * width) + tokens


def region_masks(regions_NT: Tensor) -> Tensor:
    """Return the masks of windows, (N, 1, T, T), to add to scores: a penalty for tokens of different regions."""
    # The number itself: in a checkpoint, torch.compile(dynamic=True) makes a symbol of a global float, and fails.
    return -100.0 * (regions_NT[:, None, :, None] != regions_NT[:, None, None])


class Plan(NamedTuple):
    """Where the tokens of a map are in its windows, which are ordered by their mask.

    Only the windows at the edges of a shifted map have a mask. The windows of an image with the same mask follow each
    other, so that they are a view.

    Attributes:
        grid: the map and its windows.
        token_of_slot: (S,), as its raster index in the padded map.
        slot_of_token: (H * W,).
        groups: number of slots of each group of windows with the same mask.
        group_of_window: (N,) the index of each window's group.
        masks: (groups, 1, T, T) that are added to the scores.
        regions: (N, T) the region of each slot; only tokens of the same region attend to each other.
    """

    grid: Grid
    token_of_slot: Tensor
    slot_of_token: Tensor
    groups: list[int]
    group_of_window: Tensor
    masks: Tensor
    regions: Tensor


def plan_windows(grid: Grid, device: torch.device) -> Plan:
    """Return the plan for the maps of a grid."""
    (height, width), window, shift = grid
    rows, columns = window_grid(height, width, window)
    tokens_NT, regions_NT = slots_of_windows(grid, device)
    num_tokens = tokens_NT.shape[1]
    # Only the last row, and the last column, of windows has tokens from both edges of a shifted map.
    bottom, right = (int(side > 0) for side in shift)
    sides = product((rows - bottom, bottom), (columns - right, right))
    groups = [num_tokens * area for area in map(math.prod, sides) if area]
    # A window's largest region tells its mask: 0 inside, 1 at the right, 2 at the bottom, 3 in the corner.
    kinds, order = regions_NT.amax(1).sort(stable=True)
    token_of_slot = tokens_NT[order].flatten()
    regions_NT = regions_NT[order]
    regions_GT = torch.stack([group[:num_tokens] for group in regions_NT.flatten().split(groups)])
    # Not a slice of the padded map: torch.compile would compile again where a map needs no padding.
    first_of_row = torch.arange(height, device=device) * columns * window[1]
    raster_HW = first_of_row[:, None] + torch.arange(width, device=device)
    slots = torch.arange(len(token_of_slot), device=device)
    slot_of_token = slots.scatter(0, token_of_slot, slots)[raster_HW.flatten()]
    return Plan(
        grid,
        token_of_slot.int(),
        slot_of_token.int(),
        groups,
        kinds.diff(prepend=kinds[:1]).bool().cumsum(0),
        region_masks(regions_GT),
        regions_NT,
    )


def central_offsets(table_PA: Tensor, window: Size, smaller: Size) -> Tensor:
    """Return the rows of a window's bias table for the offsets that occur in a smaller window."""
    height, width = window
    offsets = table_PA.unflatten(0, (2 * height - 1, 2 * width - 1))
    # The offset 0 is at index height - 1, and the farthest of the smaller window is its side - 1.
    rows = slice(height - smaller[0], height + smaller[0] - 1)
    columns = slice(width - smaller[1], width + smaller[1] - 1)
    return offsets[rows, columns].flatten(0, 1)


def relative_position_bias(table_PA: Tensor, window: Size) -> Tensor:
    """Expand a bias table over all pairs of tokens of one window.

    Entry (a, q, k) comes from the table's row for the offset of token q from token k, in the order of the official
    ``relative_position_index``. The lookup is a sliding view of the table and needs no index buffer.

    Args:
        table_PA: (P, A), where P is (2 * window height - 1) * (2 * window width - 1).
        window: (height, width) in tokens.

    Returns:
        (A, T, T).
    """
    height, width = window
    offsets = table_PA.view(2 * height - 1, 2 * width - 1, -1)
    views = offsets.unfold(0, height, 1).unfold(1, width, 1)  # (qy, qx, A, reversed ky, reversed kx)
    bias = views.permute(2, 0, 1, 3, 4).flip(3, 4)
    return bias.flatten(3).flatten(1, 2)


def log_spaced_offsets(
    window: Size,
    trained: Size,
    device: torch.device | None = None,
) -> Tensor:
    """Return the offsets of a window's bias table in the log-spaced coordinates of Swin V2.

    The outermost offsets of the window used in training are -1.06 and 1.06, which is log8(1 + 8).

    Args:
        window: (height, width) in tokens of the table.
        trained: (height, width) in tokens of the window used in training.
        device: device of the result.

    Returns:
        ((2 * window height - 1) * (2 * window width - 1), 2) in float32, in which the published weights were trained.
    """
    sides = []
    for side, trained_side in zip(window, trained, strict=True):
        offsets = torch.arange(1 - side, side, dtype=torch.float32, device=device)
        offsets = offsets / max(trained_side - 1, 1) * 8
        distances = (offsets.abs() + 1).log2()
        distances = distances / math.log2(8)
        sides.append(offsets.sign() * distances)
    y, x = torch.meshgrid(*sides, indexing='ij')
    grid = torch.stack([y, x], dim=-1)
    return grid.flatten(0, 1)
