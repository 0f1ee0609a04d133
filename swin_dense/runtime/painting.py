"""A picture with what a model found in it."""

from __future__ import annotations

from typing import Any

import numpy as np

_OPACITY = 0.5


def instances(
    pixels: np.ndarray, found: list[dict[str, Any]], masks: list[np.ndarray], palette: list[list[int]]
) -> np.ndarray:
    """Return the picture, (H, W, 3) uint8, with boxes, names, scores and masks of instances in it.

    Args:
        pixels: of the picture, RGB.
        found: ``class``, ``label``, ``score`` and ``box`` of each.
        masks: (H, W) bool of each; empty where the model has none.
        palette: colour of each class.
    """
    from PIL import Image, ImageDraw

    painted = pixels.copy()
    for instance, mask in zip(found, masks, strict=False):
        painted[mask] = _mixed(painted[mask], np.array(palette[instance['label']]))
    image = Image.fromarray(painted)
    draw = ImageDraw.Draw(image)
    for instance in found:
        colour = tuple(palette[instance['label']])
        x, y, *_ = instance['box']
        draw.rectangle(instance['box'], outline=colour, width=2)
        text = f'{instance["class"]} {100 * instance["score"]:.0f}'
        draw.rectangle(draw.textbbox((x + 2, y + 2), text), fill=colour)
        draw.text((x + 2, y + 2), text, fill='black' if sum(colour) > 380 else 'white')
    return np.asarray(image)


def segments(pixels: np.ndarray, labels: np.ndarray, palette: list[list[int]]) -> np.ndarray:
    """Return the picture, (H, W, 3) uint8, with the colour of its class over every pixel."""
    return _mixed(pixels, np.array(palette)[labels])


def _mixed(pixels: np.ndarray, colours: np.ndarray) -> np.ndarray:
    return (pixels * (1 - _OPACITY) + colours * _OPACITY).astype(np.uint8)
