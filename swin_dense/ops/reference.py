"""Window attention as the paper describes it, step by step: the oracle that every other backend is tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from swin_dense.windows import Pair, merge, partition, region_ids

# Added to the scores of pairs from different regions, as in the official code.
REGION_PENALTY = -100.0


def reason_not_to_run(qkv: Tensor, window_size: Pair, num_heads: int, dropout_p: float) -> str | None:
    return None


def window_attention(
    qkv: Tensor,
    relative_bias: Tensor | None,
    pad_kv: Tensor | None,
    num_heads: int,
    window_size: Pair,
    shift: Pair,
    scale: float,
    dropout_p: float,
) -> Tensor:
    """See :func:`swin_dense.ops.window_attention`."""
    batch, height, width, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2], qkv.shape[3] // 3
    windows = partition(qkv, window_size, shift)
    if pad_kv is not None:
        is_real = partition(torch.ones_like(qkv[:1, :, :, :1]), window_size, shift) > 0
        pad = F.pad(pad_kv, (channels, 0)).to(qkv.dtype)
        windows = torch.where(is_real, windows, pad)

    tokens = window_size[0] * window_size[1]
    heads = windows.reshape(batch, windows.shape[1], tokens, 3, num_heads, channels // num_heads)
    q_BNATD, k_BNATD, v_BNATD = heads.permute(3, 0, 1, 4, 2, 5)

    scores = q_BNATD @ k_BNATD.transpose(-2, -1) * scale
    if relative_bias is not None:
        scores = scores + relative_bias.to(scores.dtype)
    if any(shift):
        ids_NT = region_ids(height, width, window_size, shift, qkv.device)
        is_apart = ids_NT[:, None, :, None] != ids_NT[:, None, None, :]
        scores = scores + REGION_PENALTY * is_apart.to(scores.dtype)
    weights = F.dropout(scores.softmax(-1), dropout_p)
    out = (weights @ v_BNATD).transpose(2, 3).flatten(3)
    return merge(out, (height, width), window_size, shift)
