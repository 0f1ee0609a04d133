"""Figures of features, attention, Grad-CAM, windows, masks and cost; every function returns a matplotlib figure.

Figures are created without pyplot, so they need no display and no global state. Save one with
``figure.savefig('picture.png')`` or ``.pdf``. An image is any source of :func:`swin_dense.features.images.read_image`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from swin_dense.analysis.colours import pca_rgb
from swin_dense.analysis.complexity import backbone_costs
from swin_dense.analysis.explain import TokenAttention
from swin_dense.archs import arch_letter
from swin_dense.features.images import read_image
from swin_dense.features.pyramid import Pyramid
from swin_dense.features.sinks import level_size
from swin_dense.ops.plain import merge
from swin_dense.ops.windows import Pair, region_ids, window_grid
from swin_dense.utils import checks

# Largest window side. A mask has one row and one column per token of a window.
_LARGEST_MASK = 64
_COST_SIDES, _COST_TICKS = range(112, 1793, 112), (112, 224, 448, 896, 1792)


def draw_pyramid(pyramid: Pyramid, image: Any) -> Figure:
    """Draw an image and every level, with its first three principal components as red, green and blue."""
    pixels = _pixels_of(image, pyramid.image_size)
    figure, axes = _panels(1 + len(pyramid), pyramid.image_size)
    _show_image(axes[0], pixels)
    axes[0].set_title(f'image {pyramid.image_size[0]} x {pyramid.image_size[1]}')
    for ax, (stride, level) in zip(axes[1:], pyramid.items(), strict=True):
        _show_cells(ax, pca_rgb(level), stride, pyramid.image_size)
        ax.set_title(f'stride {stride}: {" x ".join(map(str, level.shape))}')
    return figure


def draw_attention(attention: TokenAttention, image: Any, heads: Sequence[int] = ()) -> Figure:
    """Draw the attention weights of a token as heat maps over the image: the mean over all heads, then single heads."""
    count = len(attention.weights)
    for head in heads:
        checks.one_of(f'every entry of {checks.argument("heads")}', head, range(count))
    panels = [(f'mean of {count} heads', attention.weights.mean(0), float(attention.padding.mean()))]
    panels += [(f'head {head}', attention.weights[head], float(attention.padding[head])) for head in heads]
    pixels = _pixels_of(image, attention.image_size)
    figure, axes = _panels(1 + len(panels), attention.image_size)
    _show_image(axes[0], pixels)
    axes[0].set_title('token')
    for ax, (title, heat, padding) in zip(axes[1:], panels, strict=True):
        _show_heat(ax, heat, attention.stride, pixels)
        if padding >= 0.005:
            title += f', {padding:.0%} on padding'
        ax.set_title(title)
    for ax in axes:
        row, column = attention.cell
        corner = (column * attention.stride, row * attention.stride)
        ax.add_patch(Rectangle(corner, attention.stride, attention.stride, fill=False, edgecolor='cyan', linewidth=1.5))
    return figure


def draw_grad_cam(cams: Mapping[int, Tensor], image: Any) -> Figure:
    """Draw Grad-CAMs, {stride: (H, W)} of :func:`swin_dense.analysis.explain.grad_cam`, as heat maps over the image."""
    pixels = _pixels_of(image)
    figure, axes = _panels(1 + len(cams), (pixels.shape[0], pixels.shape[1]))
    _show_image(axes[0], pixels)
    axes[0].set_title('image')
    for ax, (stride, cam) in zip(axes[1:], cams.items(), strict=True):
        _show_heat(ax, cam, stride, pixels)
        ax.set_title(f'stride {stride}')
    return figure


def draw_windows(image: Any, stride: int, window_size: Pair) -> Figure:
    """Draw the windows of one stage over the image, without and with shift.

    Cells of one tint belong to one window. With a shift, the windows at the edges consist of regions from opposite
    sides; the regions of one window share a bright colour, but attention stays within each region. Padding cells, which
    also take part in attention, are hatched. The stride is in pixels per cell, the window in cells.
    """
    window_size = checks.pair('window_size', window_size)
    pixels = _pixels_of(image)
    image_size = (pixels.shape[0], pixels.shape[1])
    rows, columns = window_grid(*level_size(image_size, stride), window_size)
    padded = (rows * window_size[0] * stride, columns * window_size[1] * stride)
    figure, axes = _panels(2, padded, side=5.2)
    for ax, shift in zip(axes, ((0, 0), (window_size[0] // 2, window_size[1] // 2)), strict=True):
        _show_image(ax, pixels)
        cells = (rows * window_size[0], columns * window_size[1])
        windows, regions = _window_ids(cells, window_size, shift)
        _show_cells(ax, _tint(windows, regions, columns), stride, padded)
        # Draw lines between neighbouring cells of different regions, and hatch the padding.
        ids = windows * 9 + regions
        lines: dict[str, Any] = {'colors': 'black', 'linewidth': 0.8}
        row, column = np.nonzero(ids[1:] != ids[:-1])
        ax.hlines((row + 1) * stride, column * stride, (column + 1) * stride, **lines)
        row, column = np.nonzero(ids[:, 1:] != ids[:, :-1])
        ax.vlines((column + 1) * stride, row * stride, (row + 1) * stride, **lines)
        height, width = (side * stride for side in level_size(image_size, stride))
        style: dict[str, Any] = {'facecolor': 'none', 'edgecolor': 'grey', 'hatch': '////', 'linewidth': 0}
        ax.add_patch(Rectangle((width, 0), padded[1] - width, padded[0], **style))
        ax.add_patch(Rectangle((0, height), width, padded[0] - height, **style))
        ax.set_title(f'stride {stride}: windows of {window_size[0]} x {window_size[1]}, shift {shift[0]}, {shift[1]}')
    return figure


def draw_costs(arch: str, window_size: Pair) -> Figure:
    """Draw the FLOPs of a backbone against the side of a square image, for global and for window attention."""
    letter = arch_letter(arch)
    figure = Figure(figsize=(7, 4.5), layout='constrained')
    axes = figure.add_subplot()
    costs = [backbone_costs(letter, side, side, window_size) for side in _COST_SIDES]
    curves = (
        ('global attention', [cost.global_flops for cost in costs], 'tab:red'),
        (f'windows of {window_size[0]} x {window_size[1]}', [cost.count.flops[''] for cost in costs], 'tab:blue'),
    )
    for label, flops, color in curves:
        axes.plot(_COST_SIDES, [value / 1e9 for value in flops], color=color, linewidth=2, label=label)
    axes.set(
        title=f'Cost of Swin-{letter.upper()}, and of the same blocks with global attention',
        xlabel='side of a square image, pixels',
        ylabel='GFLOPs (multiply-adds)',
        xscale='log',
        yscale='log',
        xlim=(_COST_SIDES[0], _COST_SIDES[-1]),
    )
    axes.set_xticks(_COST_TICKS, [str(side) for side in _COST_TICKS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc='upper left')
    return figure


def draw_shift_masks(grid: Pair, window_size: Pair) -> Figure:
    """Draw the attention masks of the four kinds of shifted windows, as matrices of query and key tokens.

    The map is a ``grid`` of tokens, and the window has at most 64 x 64.
    """
    grid, window_size = checks.pair('grid', grid), checks.pair('window_size', window_size)
    if max(window_size) > _LARGEST_MASK:
        name = checks.argument('window_size')
        raise ValueError(f'{name} must be at most {_LARGEST_MASK} to draw its masks, got {window_size}')
    shift = (window_size[0] // 2, window_size[1] // 2)
    # Two rows and columns of windows are enough: further windows have the same masks.
    counts = window_grid(*grid, window_size)
    height, width = (
        side - max(count - 2, 0) * window for side, count, window in zip(grid, counts, window_size, strict=True)
    )
    rows, columns = window_grid(height, width, window_size)
    ids = region_ids(height, width, window_size, shift).reshape(rows, columns, -1)
    # With one row or column of windows, some kinds are the same window, which has the last of their names.
    names = {(0, 0): 'inside', (0, columns - 1): 'right column', (rows - 1, 0): 'bottom row'}
    names[rows - 1, columns - 1] = 'bottom right'
    kinds = {name: ids[place] for place, name in names.items()}
    figure, axes = _panels(len(kinds), (1, 1), side=3.2, margin=0.8)
    for ax, (name, window) in zip(axes, kinds.items(), strict=True):
        ax.set_axis_on()
        ax.imshow((window[:, None] == window[None, :]).numpy(), cmap='gray', vmin=0, vmax=1, interpolation='nearest')
        ax.set_title(f'window {name}')
        ax.set_xlabel('key token')
    axes[0].set_ylabel('query token')
    figure.suptitle(f'shift masks of a {grid[0]} x {grid[1]} map: white pairs attend to each other')
    return figure


def _panels(count: int, size: Pair, side: float = 2.6, margin: float = 0.4) -> tuple[Figure, list[Axes]]:
    """Return a figure and ``count`` panels with the aspect ratio of ``size`` (height, width), ``side`` inches wide."""
    columns = min(count, 5)
    rows = -(-count // columns)
    height, width = size
    aspect = min(max(height / width, 0.2), 5.0)
    figure = Figure(figsize=(side * columns, (side * aspect + margin) * rows), layout='constrained')
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for ax in axes:
        ax.set_axis_off()
    return figure, axes[:count]


def _pixels_of(image: Any, expected: Pair | None = None) -> np.ndarray:
    """Return an image as colours, (H, W, 3) in [0, 1]; raise ValueError if it has not the expected size."""
    pixels = read_image(image, page=0).permute(1, 2, 0).clamp(0, 1).numpy()
    if expected is not None and pixels.shape[:2] != tuple(expected):
        raise ValueError(
            f'the image has {pixels.shape[:2]} pixels but the features are of an image of {tuple(expected)} pixels; '
            'use the same image for both'
        )
    return pixels


def _show_image(ax: Axes, pixels: np.ndarray) -> None:
    ax.imshow(pixels, extent=(0, pixels.shape[1], pixels.shape[0], 0))


def _show_cells(ax: Axes, cells: np.ndarray, stride: int, image_size: Pair) -> None:
    """Show a map with each cell over its pixels; cells that extend beyond the image are clipped."""
    bottom, right = cells.shape[0] * stride, cells.shape[1] * stride
    ax.imshow(cells, extent=(0, right, bottom, 0), interpolation='nearest')
    ax.set_xlim(0, image_size[1])
    ax.set_ylim(image_size[0], 0)


def _show_heat(ax: Axes, heat: Tensor, stride: int, pixels: np.ndarray) -> None:
    """Show a heat map (H, W) over the darkened image; larger values are more opaque."""
    _show_image(ax, 0.55 * pixels)
    values = heat.detach().cpu().float().numpy()
    top = values.max()
    scaled = values / top if top > 0 else values
    colours = np.dstack([colormaps['inferno'](scaled)[:, :, :3], 0.75 * np.sqrt(scaled)])
    _show_cells(ax, colours, stride, (pixels.shape[0], pixels.shape[1]))


def _window_ids(cells: Pair, window_size: Pair, shift: Pair) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the window, and of the region in the window, for every cell of a map: two arrays (H, W)."""
    rows, columns = window_grid(*cells, window_size)
    tokens = window_size[0] * window_size[1]
    windows = torch.arange(rows * columns)[None, :, None, None].expand(1, -1, tokens, 1)
    regions = region_ids(*cells, window_size, shift)[None, :, :, None]
    merged = (merge(ids, cells, window_size, shift)[0, :, :, 0].numpy() for ids in (windows, regions))
    windows_HW, regions_HW = merged
    return windows_HW, regions_HW


def _tint(windows: np.ndarray, regions: np.ndarray, columns: int) -> np.ndarray:
    """Return colours (H, W, 4): a faint checkerboard, and a bright colour for each window of several regions."""
    checkerboard = (windows // columns + windows % columns) % 2
    colours = np.where(checkerboard[:, :, None] == 0, (1.0, 1.0, 1.0, 0.22), (0.0, 0.0, 0.0, 0.12))
    mixed = [window for window in np.unique(windows) if len(np.unique(regions[windows == window])) > 1]
    for index, window in enumerate(mixed):
        colours[windows == window] = (*colormaps['tab20'](index % 20)[:3], 0.5)
    return colours
