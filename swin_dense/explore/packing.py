"""Lossy compression of a block's queries and keys, from which the page computes every attention score.

The scores of all token pairs of a head form a low-rank matrix. Its singular value decomposition gives a few components
per token, and a quantisation step for each component with which all rounding errors change the scores equally. Most of
the quantised numbers are small. They are stored as one plane per component, as differences from the preceding number if
those are smaller, and deflated.

The bytes of a block, before deflate: float32 ``factors`` (P), ``pad_factors`` (P) and the bias (A, 2h - 1, 2w - 1), one
uint8 per plane that marks difference coding (2P), then the planes (2P, H, W) in int8, queries first. P is the number of
components of all heads; ``ranks`` contains the number per head. The score of a query and a key is the sum of
``factor * q * k`` over the components of the head, that of a query and a padding token the sum of ``pad_factor * q``;
the bias is added to both. Terms that are equal for all keys of a query are omitted, because softmax ignores them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swin_dense.explore.record import Attention
from swin_dense.ops.reference import merge, partition
from swin_dense.ops.windows import REGION_PENALTY, Grid, relative_position_bias, slots_of_windows

FINEST = 0.003  # smallest standard deviation of the rounding error of a score, used if the size limit allows
COARSEST = 1e3  # largest rounding error, at which all numbers are zero
BINS = 10_000  # bins of the histogram of errors
LARGEST = 127  # largest quantised number (int8)


@dataclass(frozen=True)
class Packed:
    """One compressed block."""

    ranks: list[int]  # number of components per head
    content: bytes  # see the module's docstring
    differences: Tensor  # (BINS,), histogram of the absolute errors of the attention weights, over [0, 1]


@dataclass(frozen=True)
class _Head:
    """The components of a head: queries and keys (H, W, D), the padding key (D), and their magnitudes (D)."""

    q: Tensor
    k: Tensor
    pad_k: Tensor
    spread: Tensor


@dataclass(frozen=True)
class _Rounded:
    """A quantised head of P components: integer queries and keys (H, W, P), and two factors per component (P)."""

    q: Tensor
    k: Tensor
    factors: Tensor
    pad_factors: Tensor

    @property
    def rank(self) -> int:
        return len(self.factors)


def pack(blocks: Sequence[Attention], limit: int) -> list[Packed]:
    """Compress blocks with the smallest error whose total size is at most ``limit`` bytes.

    The result is larger than ``limit`` if the blocks do not fit even at the coarsest quantisation.
    """
    decomposed = [[_decompose(block, head) for head in range(block.q.shape[2])] for block in blocks]
    numbers = sum(block.q.numel() + block.k.numel() for block in blocks)
    error = FINEST
    while True:
        rounded = [[_round(head, error) for head in heads] for heads in decomposed]
        contents = [_deflate(block, heads) for block, heads in zip(blocks, rounded, strict=True)]
        excess = sum(map(len, contents)) - limit
        if excess <= 0 or error >= COARSEST:
            break
        # Twice the error saves at most one bit of each number, so this finds the limit from above, in a few steps.
        error *= max(1.1, 2 ** min(8 * excess / numbers, 20))
    return [
        Packed([head.rank for head in heads], content, _differences(block, heads))
        for block, heads, content in zip(blocks, rounded, contents, strict=True)
    ]


def _decompose(block: Attention, head: int) -> _Head:
    """Rotate a head's queries and keys to the singular vectors of its score matrix, with equal scales."""
    size = block.q.shape[:2]
    q = block.q[:, :, head].flatten(0, 1).double()
    k = torch.cat([_centred(block, head).flatten(0, 1), block.pad_k[None, head]]).double()
    (q_basis, q_rest), (k_basis, k_rest) = torch.linalg.qr(q), torch.linalg.qr(k)
    left, singular, right = torch.linalg.svd(q_rest @ k_rest.T, full_matrices=False)
    q, k = (q_basis @ left * singular.sqrt()).float(), (k_basis @ right.T * singular.sqrt()).float()
    spread = (singular / len(q)).sqrt().float()
    return _Head(q.unflatten(0, size), k[:-1].unflatten(0, size), k[-1], spread)


def _centred(block: Attention, head: int) -> Tensor:
    """Return the keys of a head minus the mean of their window; keys of windows with padding are unchanged."""
    k = block.k[:, :, head]
    grid = Grid((k.shape[0], k.shape[1]), block.window, block.shift)
    windows = _in_windows(k, grid)
    is_whole = _in_windows(torch.ones_like(k[:, :, :1]), grid).amin(1, keepdim=True)
    means = (windows.mean(1, keepdim=True) * is_whole).expand_as(windows)
    return k - merge(means.flatten(0, 1)[None], grid)[0]


def _in_windows(x: Tensor, grid: Grid) -> Tensor:
    """Return the tokens of a map, (H, W, C), in their windows, (N, T, C)."""
    tokens_NT, _ = slots_of_windows(grid, x.device)
    return partition(x[None], grid.window, tokens_NT)[0].unflatten(0, tokens_NT.shape)


def _round(head: _Head, error: float) -> _Rounded:
    # An error r of a component changes a score by r times the component of the other side. The steps make the effect of
    # all components equal.
    step = error * math.sqrt(6 / len(head.spread)) / head.spread.clamp(min=1e-12)
    q_step, k_step = (torch.maximum(step, part.abs().amax((0, 1)) / LARGEST) for part in (head.q, head.k))
    q, k = (head.q / q_step).round(), (head.k / k_step).round()
    used = ((q != 0).any(0).any(0) & (k != 0).any(0).any(0)).nonzero()
    rank = int(used.max()) + 1 if len(used) else 0
    return _Rounded(q[..., :rank], k[..., :rank], (q_step * k_step)[:rank], (q_step * head.pad_k)[:rank])


def _deflate(block: Attention, heads: Sequence[_Rounded]) -> bytes:
    planes, is_smooth = _planes(heads)
    numbers = [head.factors for head in heads] + [head.pad_factors for head in heads] + [block.bias.flatten()]
    before = torch.cat(numbers).numpy().astype('<f4').tobytes() + is_smooth.tobytes()
    # With Huffman codes only: the numbers have a skewed distribution but no repeated sequences.
    deflate = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    return deflate.compress(before + planes.tobytes()) + deflate.flush()


def _planes(heads: Sequence[_Rounded]) -> tuple[np.ndarray, np.ndarray]:
    """Return the planes (2P, H, W), and whether each is stored as differences (2P)."""
    numbers = torch.cat([head.q for head in heads] + [head.k for head in heads], 2)
    planes = numbers.to(torch.int8).permute(2, 0, 1).contiguous().numpy().view(np.uint8)
    differences = planes.copy()
    differences[:, :, 1:] -= planes[:, :, :-1]
    differences[:, 1:, 0] -= planes[:, :-1, 0]
    is_smooth = _size_of(differences) < _size_of(planes)
    planes[is_smooth] = differences[is_smooth]
    return planes, is_smooth.astype(np.uint8)


def _size_of(planes: np.ndarray) -> np.ndarray:
    """Return the sum of absolute values of each plane."""
    return np.abs(planes.view(np.int8).astype(np.int32)).sum((1, 2))


def _differences(block: Attention, heads: Sequence[_Rounded]) -> Tensor:
    """Return a histogram of the absolute errors of the quantised block's attention weights, (BINS,) over [0, 1]."""
    counts = torch.zeros(BINS, dtype=torch.float64)
    for index, head in enumerate(heads):
        exact = _weights(block, index, block.q[:, :, index], block.k[:, :, index], block.pad_k[index])
        shown = _weights(block, index, head.q * head.factors, head.k, head.pad_factors / head.factors)
        visible = exact > 0  # neither padding nor masked
        counts += torch.histc((shown - exact)[visible].abs(), BINS, 0, 1).double()
    return counts


def _weights(block: Attention, head: int, q: Tensor, k: Tensor, pad_k: Tensor) -> Tensor:
    """Return the attention weights in every window, (N, T, T), of queries and keys (H, W, D); padding has zeros."""
    grid = Grid((q.shape[0], q.shape[1]), block.window, block.shift)
    is_token = _in_windows(torch.ones(*grid.size, 1), grid) > 0
    queries, keys = (_in_windows(part, grid) for part in (q, k))
    keys = torch.where(is_token, keys, pad_k)
    scores = queries @ keys.transpose(1, 2) + relative_position_bias(block.bias[head].reshape(-1, 1), block.window)[0]
    if any(block.shift):
        _, regions = slots_of_windows(grid, q.device)
        scores = scores + REGION_PENALTY * (regions[:, :, None] != regions[:, None, :])
    return scores.softmax(-1) * is_token
