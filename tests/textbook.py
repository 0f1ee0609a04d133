"""Shifted-window attention step by step as in the official code (pad, roll, reshape): the reference for the tests."""

import torch
import torch.nn.functional as F

REGION_PENALTY = -100.0


def window_grid(height, width, window):
    return -(-height // window[0]), -(-width // window[1])


def partition(x, window, shift=(0, 0)):
    """Cut (B, H, W, C) into windows (B, N, T, C), with zeros as padding."""
    batch, height, width, channels = x.shape
    rows, columns = window_grid(height, width, window)
    below, right = rows * window[0] - height, columns * window[1] - width
    x = F.pad(x, (0, 0, 0, right, 0, below))
    x = x.roll((-shift[0], -shift[1]), dims=(1, 2))
    grid = x.reshape(batch, rows, window[0], columns, window[1], channels)
    return grid.transpose(2, 3).reshape(batch, rows * columns, window[0] * window[1], channels)


def merge(x, size, window, shift=(0, 0)):
    batch, _, _, channels = x.shape
    rows, columns = window_grid(*size, window)
    grid = x.reshape(batch, rows, columns, *window, channels).transpose(2, 3)
    x = grid.reshape(
        batch,
        rows * window[0],
        columns * window[1],
        channels,
    )
    x = x.roll(shift, dims=(1, 2))
    return x[:, : size[0], : size[1]]


def region_slices(side, shift):
    """Return the parts of an axis between which attention is masked."""
    if not shift:
        return [slice(None)]
    return [
        slice(0, -side),
        slice(-side, -shift),
        slice(-shift, None),
    ]


def region_ids(height, width, window, shift):
    """Number the nine regions of the rolled map as the official code does, (N, T)."""
    rows, columns = window_grid(height, width, window)
    ids = torch.zeros(
        1,
        rows * window[0],
        columns * window[1],
        1,
    )
    for row, of_rows in enumerate(region_slices(window[0], shift[0])):
        for column, of_columns in enumerate(region_slices(window[1], shift[1])):
            ids[:, of_rows, of_columns] = 3 * row + column
    return partition(ids, window)[0, :, :, 0]


def window_attention(qkv, relative_bias, pad_kv, spec):
    """Attend to the tokens of a map of any size; ``pad_kv`` are the keys and values of padding tokens, or None."""
    height, width = qkv.shape[1:3]
    channels = qkv.shape[3] // 3
    windows = partition(qkv, spec.window, spec.shift)
    if pad_kv is not None:
        is_real = partition(torch.ones_like(qkv[:1, :, :, :1]), spec.window, spec.shift) > 0
        windows = torch.where(is_real, windows, F.pad(pad_kv, (channels, 0)).to(qkv.dtype))
    heads = windows.reshape(
        *windows.shape[:3],
        3,
        spec.num_heads,
        channels // spec.num_heads,
    )
    q, k, v = heads.permute(3, 0, 1, 4, 2, 5)
    scores = q @ k.transpose(-2, -1) * spec.scale
    if relative_bias is not None:
        scores = scores + relative_bias.to(scores.dtype)
    ids = region_ids(height, width, spec.window, spec.shift).to(qkv.device)
    is_apart = ids[:, None, :, None] != ids[:, None, None, :]
    scores = scores + REGION_PENALTY * is_apart.to(scores.dtype)
    out = (scores.softmax(-1) @ v).transpose(2, 3).flatten(3)
    return merge(out, (height, width), spec.window, spec.shift)


def neighbours(x, stride):
    """Concatenate 2x2 neighbours in the official order, with zeros as padding: (B, H', W', 4C)."""
    height, width = x.shape[1:3]
    last_row = (-(-height // stride) - 1) * stride
    last_column = (-(-width // stride) - 1) * stride
    x = F.pad(x, (0, 0, 0, last_column + 2 - width, 0, last_row + 2 - height))
    parts = []
    for j in (0, 1):
        for i in (0, 1):
            parts.append(x[:, i : last_row + i + 1 : stride, j : last_column + j + 1 : stride])
    return torch.cat(parts, -1)
