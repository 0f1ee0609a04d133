"""Pictures of what the backbone sees and how it works; every function returns a matplotlib figure.

Figures are made without pyplot, so no window system and no global state is involved; write one with
``figure.savefig('picture.png')`` or ``.pdf``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from swin_dense.images import read_image
from swin_dense.pyramid import Pyramid


def draw_pyramid(pyramid: Pyramid, image: Any, bgr: bool = False) -> Figure:
    """Draw the image and beside it every level, its three main components as red, green and blue.

    Args:
        pyramid: of the image.
        image: in any form that :func:`swin_dense.images.read_image` takes.
        bgr: an array or tensor holds blue first.
    """
    figure, axes = _panels(1 + len(pyramid), pyramid.image_size)
    _show_image(axes[0], image, pyramid.image_size, bgr)
    axes[0].set_title(f'image {pyramid.image_size[0]} x {pyramid.image_size[1]}')
    for ax, (stride, level) in zip(axes[1:], pyramid.items(), strict=True):
        _show_cells(ax, pca_rgb(level), stride, pyramid.image_size)
        ax.set_title(f'stride {stride}: {" x ".join(map(str, level.shape))}')
    return figure


def pca_rgb(level: Tensor) -> np.ndarray:
    """Return a map (C, H, W) as colours (H, W, 3) in [0, 1]: its first three principal components.

    Each component is stretched between its 1st and 99th percentile, and its sign chosen so that the channel that
    weighs most counts positive, which makes the colours repeatable.
    """
    channels, height, width = level.shape
    cells = level.detach().to('cpu', torch.float64).reshape(channels, -1).T
    cells = cells - cells.mean(0)
    _, axes = torch.linalg.eigh(cells.T @ cells)  # ascending
    axes = axes[:, -3:].flip(1)
    axes = axes * axes.gather(0, axes.abs().argmax(0, keepdim=True)).sign()
    components = (cells @ axes).numpy()
    low, high = np.percentile(components, [1, 99], axis=0)
    spread = np.where(high > low, high - low, 1.0)
    colours = ((components - low) / spread).clip(0, 1)
    colours = np.pad(colours, ((0, 0), (0, 3 - colours.shape[1])))
    return colours.reshape(height, width, 3)


def _panels(count: int, image_size: tuple[int, int], columns: int = 5) -> tuple[Figure, list[Axes]]:
    """Return a figure of equal panels with the image's proportions, without ticks."""
    columns = min(columns, count)
    rows = -(-count // columns)
    height, width = image_size
    side = 2.6
    aspect = min(max(height / width, 0.2), 5.0)
    figure = Figure(figsize=(side * columns, (side * aspect + 0.3) * rows), layout='constrained')
    axes = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for ax in axes:
        ax.set_axis_off()
    return figure, axes[:count]


def _show_image(ax: Axes, image: Any, image_size: tuple[int, int], bgr: bool) -> None:
    pixels = read_image(image, bgr=bgr)
    if tuple(pixels.shape[1:]) != tuple(image_size):
        raise ValueError(
            f'the image is {tuple(pixels.shape[1:])} and the features were made of one of {tuple(image_size)} pixels; '
            'give the same image to both'
        )
    ax.imshow(pixels.permute(1, 2, 0).clamp(0, 1).numpy(), extent=_extent(image_size))
    _limit(ax, image_size)


def _show_cells(ax: Axes, cells: np.ndarray, stride: int, image_size: tuple[int, int], **style: Any) -> Any:
    """Show a map so that its cells lie over their pixels; cells that hang over the edge are cut."""
    shown = ax.imshow(
        cells,
        extent=_extent((cells.shape[0] * stride, cells.shape[1] * stride)),
        interpolation='nearest',
        **style,
    )
    _limit(ax, image_size)
    return shown


def _extent(size: tuple[int, int]) -> tuple[float, float, float, float]:
    return 0, size[1], size[0], 0


def _limit(ax: Axes, image_size: tuple[int, int]) -> None:
    ax.set_xlim(0, image_size[1])
    ax.set_ylim(image_size[0], 0)
