"""Swin V2: what it does otherwise than V1, part by part, and the backbone of these parts.

The norms stand behind attention and MLP, attention compares directions, its position bias comes out of a small network
and so fits any window, and merged patches are normalised after the reduction. The rest is in
:mod:`swin_dense.models.swin`.
Source: Liu et al., Swin Transformer V2: Scaling Up Capacity and Resolution, CVPR 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.models.archs import Arch
from swin_dense.models.attention import WindowAttention, Windows
from swin_dense.models.block import SwinBlock
from swin_dense.models.layers import NormConfig, PatchMerging, build_norm, by_neighbour, may_be_inlined
from swin_dense.models.swin import SwinBackbone, SwinStage
from swin_dense.ops import plain, relative_position_bias
from swin_dense.ops.windows import Pair, log_spaced_offsets
from swin_dense.utils import checks

LARGEST_LOGIT_SCALE = math.log(100)
LARGEST_BIAS = 16
CPB_CHANNELS = 512


class CosineWindowAttention(WindowAttention):
    """Window attention that scores by the angle between query and key, (B, H, W, C) to (B, H, W, C).

    The score is the cosine times a factor per head, learnt and at most 100, plus a position bias between 0 and 16 that
    a network makes of the offset between the two tokens, on a logarithmic scale.

    Args:
        channels: C.
        num_heads: heads, which divide C.
        qkv_bias: whether queries and values have a bias; keys have none.
        pretrained_window_size: (height, width) in tokens of the window that the position network was trained with,
            which sets the scale of its offsets; None where that is the window itself.
        **options: ``window_size``, dropout and backend, see :class:`WindowAttention`.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        qkv_bias: bool = True,
        pretrained_window_size: Pair | None = None,
        **options: Any,
    ) -> None:
        super().__init__(channels, num_heads, qkv_bias=False, use_rel_pos_bias=False, qk_scale=1.0, **options)
        self.pretrained_window_size = pretrained_window_size
        self.logit_scale = nn.Parameter(torch.zeros(num_heads, 1, 1))
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, CPB_CHANNELS), nn.ReLU(inplace=True), nn.Linear(CPB_CHANNELS, num_heads, bias=False)
        )
        self.q_bias = nn.Parameter(torch.zeros(channels)) if qkv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(channels)) if qkv_bias else None
        self.reset_position()

    local_forward = WindowAttention.forward

    def reset_position(self) -> None:
        nn.init.constant_(self.logit_scale, math.log(10))
        for bias in (self.q_bias, self.v_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def project(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.q_bias is not None and self.v_bias is not None:
            q, v = q + self.q_bias, v + self.v_bias
        # Queries carry the factor of their head, so attention itself needs none.
        q = self._directions(q) * self.logit_scale.clamp(max=LARGEST_LOGIT_SCALE).exp().view(-1, 1)
        return torch.cat([q.flatten(-2).to(v.dtype), self._directions(k).flatten(-2).to(v.dtype), v], dim=-1)

    def _directions(self, x: Tensor) -> Tensor:
        """Return the heads of x at length 1, (B, H, W, A, D); in float32 at least."""
        heads = x.unflatten(-1, (self.num_heads, -1))
        return F.normalize(heads.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)

    def _is_linear(self) -> bool:
        return super()._is_linear() and self.qkv.bias is None

    def _linear_pad_kv(self) -> Tensor | None:
        if self.v_bias is None:
            return None
        # The key of a zero token is zero, and stays zero at any length that it is brought to.
        return torch.cat([torch.zeros_like(self.v_bias), self.v_bias])

    def relative_bias(self, window: Pair) -> Tensor | None:
        first: Any = self.cpb_mlp[0]
        offsets = log_spaced_offsets(window, self.pretrained_window_size or window, first.weight.device)
        table = LARGEST_BIAS * self.cpb_mlp(offsets.to(first.weight.dtype)).sigmoid()
        return relative_position_bias(table, window, self.backend)


class SwinBlockV2(SwinBlock):
    """Window attention and an MLP, each before a LayerNorm and on a residual branch: (B, H, W, C) to the same."""

    post_norm = True

    def forward_modules(self, x: Tensor, *windows: Windows) -> Tensor:
        x = self.plus(x, lambda x: self.norm1(self.attn(x, *windows)))
        return self.plus(x, lambda x: self.norm2(self.ffn(x)))

    local_forward = forward_modules


class PatchMergingV2(PatchMerging):
    """Patch merging that normalises after the reduction: (B, H, W, C) to (B, ceil(H/stride), ceil(W/stride), 2C)."""

    def __init__(self, channels: int, stride: int, norm_cfg: NormConfig | None) -> None:
        super().__init__(channels, stride, None)
        self.norm = build_norm(norm_cfg, 2 * channels) if norm_cfg else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if may_be_inlined(self.reduction):
            joined = plain.neighbours(x, self.stride)
            return self.norm(F.linear(joined, by_neighbour(self.reduction.weight), self.reduction.bias))
        return self.norm(self.reduction(plain.neighbours(x, self.stride, by_channel=True)))


class SwinV2Backbone(SwinBackbone):
    """Swin Transformer V2 that turns an image of any size into a feature pyramid.

    Padding, windows and shifts are those of :class:`SwinBackbone`, and so are the norms of the outputs: the authors
    published no dense code of V2 that could say otherwise.

    Args:
        arch: as for :class:`SwinBackbone`; 'swinv2_t' and the like are the same.
        window_size: side, or (height, width), of a window in tokens.
        pretrained_window_size: side of the windows that the weights were trained with, for all stages or per stage; 0
            where it is the window itself. A classifier's windows shrink with its maps: files of window 16 at 256 x 256
            have (16, 16, 16, 8).
        **options: of :class:`SwinBackbone`, less ``qk_scale`` and ``use_rel_pos_bias``, which V2 has no place for.

    Raises:
        ValueError: an option has a value that is not allowed, or options contradict each other.
        TypeError: an option has the wrong type or is unknown.

    Examples:
        >>> backbone = SwinV2Backbone('t', window_size=16, pretrained_window_size=8)
        >>> [tuple(level.shape) for level in backbone(torch.rand(1, 3, 64, 90))]
        [(1, 96, 16, 23), (1, 192, 8, 12), (1, 384, 4, 6), (1, 768, 2, 3)]
    """

    _prefix = 'swinv2'
    _block = SwinBlockV2
    _merging = PatchMergingV2

    def __init__(
        self,
        arch: str | Mapping[str, Any] | Arch = 't',
        *,
        window_size: int | Sequence[int] = 8,
        pretrained_window_size: int | Sequence[int] = 0,
        **options: Any,
    ) -> None:
        super().__init__(arch, window_size=window_size, **options)
        stages = len(self.arch.depths)
        if isinstance(pretrained_window_size, int):
            pretrained_window_size = (pretrained_window_size,) * stages
        windows = checks.integers('pretrained_window_size', pretrained_window_size, stages, minimum=0)
        if 1 in windows:
            raise ValueError(f'pretrained_window_size must be 0 or at least 2, got {pretrained_window_size!r}')
        self.pretrained_window_size = windows
        for stage, side in zip(cast('list[SwinStage]', self.stages), windows, strict=False):
            for block in stage.blocks:
                cast('Any', block).attn.w_msa.pretrained_window_size = (side, side) if side else None

    @staticmethod
    def _attention(qk_scale: float | None, use_rel_pos_bias: bool) -> Callable[..., WindowAttention]:
        if qk_scale is not None:
            raise ValueError(f'qk_scale={qk_scale}: Swin V2 learns a scale per head; leave qk_scale out')
        if not use_rel_pos_bias:
            raise ValueError('use_rel_pos_bias=False: Swin V2 always has its position bias; leave the option out')
        return CosineWindowAttention

    def reset_parameters(self) -> None:
        """Draw all parameters anew as the official code does: as V1's, but every block begins as the identity."""
        super().reset_parameters()
        for module in self.modules():
            if isinstance(module, SwinBlockV2):
                for norm in (module.norm1, module.norm2):
                    nn.init.zeros_(cast('Tensor', norm.weight))
