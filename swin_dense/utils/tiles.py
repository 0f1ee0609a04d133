"""Divide an image into tiles that overlap."""

from __future__ import annotations

from dataclasses import dataclass

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Tile:
    """A tile of an image, as boxes (top, left, bottom, right) in pixels.

    Attributes:
        kept: the tile without overlap; these boxes cover the image exactly once.
        read: ``kept`` extended by the overlap and clipped to the image.
    """

    kept: Box
    read: Box


def plan_tiles(image_size: tuple[int, int], tile: tuple[int, int], overlap: tuple[int, int]) -> list[Tile]:
    """Divide an image of (height, width) pixels into tiles, in row-major order."""
    height, width = image_size
    tiles = []
    for top in range(0, height, tile[0]):
        for left in range(0, width, tile[1]):
            bottom, right = min(top + tile[0], height), min(left + tile[1], width)
            read = (
                max(top - overlap[0], 0),
                max(left - overlap[1], 0),
                min(bottom + overlap[0], height),
                min(right + overlap[1], width),
            )
            tiles.append(Tile((top, left, bottom, right), read))
    return tiles


def plan_windows(image_size: tuple[int, int], tile: int, overlap: int, step: int = 1) -> list[Tile]:
    """Divide an image into square tiles whose ``read`` boxes have the same size, as far as the image is as large.

    A model whose pipeline resizes its input then sees all tiles at one scale.

    Args:
        image_size: (height, width) in pixels.
        tile: side in pixels.
        overlap: pixels read beyond each side of a tile.
        step: ``read`` boxes begin at multiples of this, and may be larger by less than it.
    """
    windows = []
    for part in plan_tiles(image_size, (tile, tile), (overlap, overlap)):
        first = [
            max(min(begin, (side - tile - 2 * overlap) // step * step), 0)
            for begin, side in zip(part.read[:2], image_size, strict=True)
        ]
        end = [
            max(stop, min(begin + tile + 2 * overlap, side))
            for begin, stop, side in zip(first, part.read[2:], image_size, strict=True)
        ]
        windows.append(Tile(part.kept, (first[0], first[1], end[0], end[1])))
    return windows
