"""Divide an image into tiles that overlap."""

from __future__ import annotations

from dataclasses import dataclass

Box = tuple[int, int, int, int]


@dataclass(frozen=True)
class Tile:
    """A tile of an image, as boxes (top, left, bottom, right) in pixels."""

    kept: Box  # the tile without overlap; these boxes cover the image exactly once
    read: Box  # ``kept`` extended by the overlap and clipped to the image


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
