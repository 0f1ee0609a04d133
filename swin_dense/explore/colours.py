"""Conversion of feature maps to colours."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def pca_rgb(level: Tensor) -> np.ndarray:
    """Convert a map (C, H, W) to colours (H, W, 3) in [0, 1]: its first three principal components.

    Each component is scaled from its 1st to its 99th percentile. Its sign is chosen so that the channel with the
    largest weight is positive, which makes the colours reproducible.
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
