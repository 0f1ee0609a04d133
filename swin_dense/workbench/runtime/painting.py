"""Draw predictions on an image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from swin_dense.workbench.runtime.model import Outputs

_OPACITY = 0.5


def painted(
    pixels: np.ndarray, record: dict[str, Any], outputs: Outputs, palette: Sequence[Sequence[int]]
) -> np.ndarray:
    """Return an image, (H, W, 3) uint8 in RGB, with its prediction, of which a record is given too, drawn on it."""
    labels, found, segmented = outputs
    if labels is not None:
        return segments(pixels, labels, palette)
    masks = found.masks if found is not None and segmented is None else []
    if segmented is not None:
        pixels = panoptic(pixels, segmented, record['segments'], palette)
    return instances(pixels, record.get('instances', []), masks, palette)


def instances(
    pixels: np.ndarray, found: list[dict[str, Any]], masks: Sequence[np.ndarray], palette: Sequence[Sequence[int]]
) -> np.ndarray:
    """Return the image, (H, W, 3) uint8, with boxes, names, scores and masks of instances drawn on it.

    Args:
        pixels: the image, RGB.
        found: ``class``, ``label``, ``score`` and ``box`` of each instance.
        masks: (H, W) bool for each instance; empty if the model predicts no masks.
        palette: RGB colour of each class.
    """
    from PIL import Image, ImageDraw

    painted = pixels.copy()
    for instance, mask in zip(found, masks, strict=False):
        painted[mask] = _mixed(painted[mask], np.array(palette[instance['label']]))
    image = Image.fromarray(painted)
    draw = ImageDraw.Draw(image)
    font = draw.getfont()
    for instance in found:
        colour = tuple(palette[instance['label']])
        x, y, *_ = instance['box']
        draw.rectangle(instance['box'], outline=colour, width=2)
        # PIL's font has few letters beside A to Z, and would draw a box for each of the others.
        name = instance['class'] if _can_draw(font, instance['class']) else f'class {instance["label"]}'
        text = f'{name} {100 * instance["score"]:.0f}'
        draw.rectangle(draw.textbbox((x + 2, y + 2), text), fill=colour)
        text_colour = 'black' if sum(colour) > 380 else 'white'
        draw.text((x + 2, y + 2), text, fill=text_colour)
    return np.asarray(image)


def segments(pixels: np.ndarray, labels: np.ndarray, palette: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the image, (H, W, 3) uint8, blended with the colour of the class of each pixel."""
    known = labels < len(palette)  # others have no data
    return np.where(known[:, :, None], _mixed(pixels, np.array(palette)[np.where(known, labels, 0)]), pixels)


def panoptic(
    pixels: np.ndarray, ids: np.ndarray, found: list[dict[str, Any]], palette: Sequence[Sequence[int]]
) -> np.ndarray:
    """Return the image, (H, W, 3) uint8, blended with the colour of each segment's class, with dark edges between them.

    Args:
        pixels: the image, RGB.
        ids: segment of each pixel, (H, W).
        found: ``id`` and ``label`` of each segment.
        palette: RGB colour of each class.
    """
    painted = pixels.copy()
    for segment in found:
        mask = ids == segment['id']
        painted[mask] = _mixed(painted[mask], np.array(palette[segment['label']]))
    painted[:, 1:][ids[:, 1:] != ids[:, :-1]] //= 2
    painted[1:][ids[1:] != ids[:-1]] //= 2
    return painted


def _can_draw(font: Any, name: str) -> bool:
    """Return whether a font of PIL has all letters of a name."""
    try:
        absent = bytes(font.getmask('\U0010ffff'))
        return all(bytes(font.getmask(letter)) != absent for letter in set(name))
    except UnicodeEncodeError:  # the font of Pillow before 10.1 has 256 letters
        return all(ord(letter) < 256 for letter in name)


def _mixed(pixels: np.ndarray, colours: np.ndarray) -> np.ndarray:
    return (pixels * (1 - _OPACITY) + colours * _OPACITY).astype(np.uint8)
