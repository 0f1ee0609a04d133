"""Queries and keys in few bytes, so that every score of a block can be computed from them again.

Of each head, the scores of all pairs of tokens are one matrix of low rank. Its singular value decomposition tells how
many numbers a token needs and how exact each must be: as exact as the others, measured in scores. So each is rounded
to a step of its own, which leaves most of them small. They are laid out in one plane per component, as differences
from the number before where those are smaller, and deflated.

The bytes of a block, deflated: float32 ``factors`` (P), ``pad_factors`` (P) and the bias (A, 2h - 1, 2w - 1), uint8
per plane whether it holds differences (2P), then the planes (2P, H, W) in int8, those of queries first. P is the number
of components of all heads together; ``ranks`` says how many each has. The score of a query and a key of a head is the
sum over its components of ``factor * q * k``, that of a query and a padding token the sum of ``pad_factor * q``, and
the bias is added to both. What is the same for all keys of a query, which the softmax does not feel, is left out.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from swin_dense.explore.record import Attention
from swin_dense.ops.windows import REGION_PENALTY, merge, partition, region_ids, relative_position_bias

FINEST = 0.003  # rounding of a score, as a standard deviation, where there is room
COARSEST = 1e3  # by then nothing is left to be stored
SAMPLED_ROWS = 12  # of every map, to guess sizes by
BINS = 10_000  # of differences between weights
LARGEST = 127  # of a rounded number, which takes a byte


@dataclass(frozen=True)
class Packed:
    """One block in bytes.

    Attributes:
        ranks: components per head.
        content: as the module says.
        differences: (BINS,), how many attention weights differ so much from those of the block, from 0 to 1.
    """

    ranks: list[int]
    content: bytes
    differences: Tensor


@dataclass(frozen=True)
class _Head:
    """The components of a head: of queries and keys (H, W, D), of the padding key (D), and how large they are (D)."""

    q: Tensor
    k: Tensor
    pad_k: Tensor
    spread: Tensor


@dataclass(frozen=True)
class _Rounded:
    """What is stored of a head of P components: whole numbers (H, W, P) of queries and keys, and two factors (P)."""

    q: Tensor
    k: Tensor
    factors: Tensor
    pad_factors: Tensor

    @property
    def rank(self) -> int:
        return len(self.factors)


def pack(blocks: Sequence[Attention], limit: int) -> list[Packed]:
    """Pack blocks as exactly as fits in ``limit`` bytes together; what does not fit at all is larger."""
    turned = [[_turn(block, head) for head in range(block.q.shape[2])] for block in blocks]
    error = _fitting_error(blocks, turned, limit)
    while True:
        rounded = [[_round(head, error) for head in heads] for heads in turned]
        contents = [_deflate(block, heads) for block, heads in zip(blocks, rounded, strict=True)]
        if sum(map(len, contents)) <= limit or error >= COARSEST:
            break
        error *= 1.1
    return [
        Packed([head.rank for head in heads], content, _differences(block, heads))
        for block, heads, content in zip(blocks, rounded, contents, strict=True)
    ]


def _fitting_error(blocks: Sequence[Attention], turned: Sequence[Sequence[_Head]], limit: int) -> float:
    """Return about the smallest error with which the blocks fit, judged by some of their rows."""

    def size(error: float) -> int:
        total = sum(block.bias.numel() * 4 for block in blocks)
        for block, heads in zip(blocks, turned, strict=True):
            every = -(-block.q.shape[0] // SAMPLED_ROWS)
            some = [_round(replace(head, q=head.q[::every], k=head.k[::every]), error) for head in heads]
            total += len(_huffman(_planes(some)[0].tobytes())) * every
        return total

    if size(FINEST) <= limit:
        return FINEST
    low, high = math.log2(FINEST), math.log2(COARSEST)
    while high - low > 0.05:
        middle = (low + high) / 2
        low, high = (middle, high) if size(2**middle) > limit else (low, middle)
    return 2**high


def _turn(block: Attention, head: int) -> _Head:
    """Turn the queries and keys of a head to where their components are independent, and as large in both."""
    size = block.q.shape[:2]
    q = block.q[:, :, head].flatten(0, 1).double()
    k = torch.cat([_centred(block, head).flatten(0, 1), block.pad_k[None, head]]).double()
    (q_basis, q_rest), (k_basis, k_rest) = torch.linalg.qr(q), torch.linalg.qr(k)
    left, singular, right = torch.linalg.svd(q_rest @ k_rest.T, full_matrices=False)
    q, k = (q_basis @ left * singular.sqrt()).float(), (k_basis @ right.T * singular.sqrt()).float()
    spread = (singular / len(q)).sqrt().float()
    return _Head(q.unflatten(0, size), k[:-1].unflatten(0, size), k[-1], spread)


def _centred(block: Attention, head: int) -> Tensor:
    """Return the keys of a head less the mean of their window, where it has no padding key to keep in step with."""
    k = block.k[:, :, head]
    windows = partition(k[None], block.window, block.shift)
    is_whole = partition(torch.ones_like(k[None, :, :, :1]), block.window, block.shift).amin(2, keepdim=True)
    means = (windows.mean(2, keepdim=True) * is_whole).expand_as(windows)
    return k - merge(means, (k.shape[0], k.shape[1]), block.window, block.shift)[0]


def _round(head: _Head, error: float) -> _Rounded:
    # Rounding a component by r moves a score by r times the other side's component, so all shall move it alike.
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
    return _huffman(before + planes.tobytes())


def _planes(heads: Sequence[_Rounded]) -> tuple[np.ndarray, np.ndarray]:
    """Return the planes (2P, H, W), and whether each holds differences (2P)."""
    numbers = torch.cat([head.q for head in heads] + [head.k for head in heads], 2)
    planes = numbers.to(torch.int8).permute(2, 0, 1).contiguous().numpy().view(np.uint8)
    differences = planes.copy()
    differences[:, :, 1:] -= planes[:, :, :-1]
    differences[:, 1:, 0] -= planes[:, :-1, 0]
    is_smooth = _size_of(differences) < _size_of(planes)
    planes[is_smooth] = differences[is_smooth]
    return planes, is_smooth.astype(np.uint8)


def _huffman(content: bytes) -> bytes:
    """Deflate numbers that are noise but for how often each occurs: nothing is gained by a search for repetitions."""
    deflate = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    return deflate.compress(content) + deflate.flush()


def _size_of(planes: np.ndarray) -> np.ndarray:
    """Return how large the numbers of each plane are."""
    return np.abs(planes.view(np.int8).astype(np.int32)).sum((1, 2))


def _differences(block: Attention, heads: Sequence[_Rounded]) -> Tensor:
    """Count by how much the weights of the rounded block differ from those of the block: (BINS,) of [0, 1]."""
    counts = torch.zeros(BINS, dtype=torch.float64)
    for index, head in enumerate(heads):
        exact = _weights(block, index, block.q[:, :, index], block.k[:, :, index], block.pad_k[index])
        shown = _weights(block, index, head.q * head.factors, head.k, head.pad_factors / head.factors)
        seen = exact > 0  # neither of padding nor masked
        counts += torch.histc((shown - exact)[seen].abs(), BINS, 0, 1).double()
    return counts


def _weights(block: Attention, head: int, q: Tensor, k: Tensor, pad_k: Tensor) -> Tensor:
    """Return where the tokens of every window look, (N, T, T), by queries and keys (H, W, D); padding looks nowhere."""
    window, shift = block.window, block.shift
    is_token = partition(torch.ones(1, *q.shape[:2], 1), window, shift)[0] > 0
    queries, keys = (partition(part[None], window, shift)[0] for part in (q, k))
    keys = torch.where(is_token, keys, pad_k)
    scores = queries @ keys.transpose(1, 2) + relative_position_bias(block.bias[head].reshape(-1, 1), window)[0]
    if any(shift):
        regions = region_ids(q.shape[0], q.shape[1], window, shift)
        scores = scores + REGION_PENALTY * (regions[:, :, None] != regions[:, None, :])
    return scores.softmax(-1) * is_token
