"""Swin V2: what it does otherwise than V1, part by part, and the backbone of these parts.

The norms stand behind attention and MLP, attention compares directions, its position bias comes out of a small network
and so fits any window, and merged patches are normalised after the reduction. The rest is :mod:`swin_dense.model`.
Source: Liu et al., Swin Transformer V2: Scaling Up Capacity and Resolution, CVPR 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense import checks
from swin_dense.archs import Arch
from swin_dense.attention import WindowAttention
from swin_dense.block import SwinBlock, register_standard_block
from swin_dense.layers import PatchMerging, build_norm
from swin_dense.model import SwinBackbone, SwinStage
from swin_dense.ops import relative_position_bias
from swin_dense.windows import Pair, log_spaced_offsets

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
        **options: ``window_size``, ``shift``, dropout, backend and clamping, see :class:`WindowAttention`.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        qkv_bias: bool = True,
        pretrained_window_size: Pair | None = None,
        **options: Any,
    ) -> None:
        super().__init__(channels, num_heads, qkv_bias=False, relative_position=False, **options)
        self.pretrained_window_size = pretrained_window_size
        self.logit_scale = nn.Parameter(torch.zeros(num_heads, 1, 1))
        self.cpb_mlp = nn.Sequential(
            nn.Linear(2, CPB_CHANNELS), nn.ReLU(inplace=True), nn.Linear(CPB_CHANNELS, num_heads, bias=False)
        )
        self.q_bias = nn.Parameter(torch.zeros(channels)) if qkv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(channels)) if qkv_bias else None
        self.reset_position()

    @property
    def scale(self) -> float:
        """The factor on the query-key product: none, as queries carry that of their head."""
        return 1.0

    def reset_position(self) -> None:
        nn.init.constant_(self.logit_scale, math.log(10))
        for bias in (self.q_bias, self.v_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def project(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.q_bias is not None and self.v_bias is not None:
            q, v = q + self.q_bias, v + self.v_bias
        q = self._directions(q) * self.cosine_scales().view(-1, 1)
        return torch.cat([q.flatten(-2).to(v.dtype), self._directions(k).flatten(-2).to(v.dtype), v], dim=-1)

    def _directions(self, x: Tensor) -> Tensor:
        """Return the heads of x at length 1, (B, H, W, A, D); in float32 at least."""
        heads = x.unflatten(-1, (self.num_heads, self.head_dim))
        return F.normalize(heads.to(torch.promote_types(x.dtype, torch.float32)), dim=-1)

    def qkv_bias(self) -> Tensor | None:
        if self.q_bias is None or self.v_bias is None:
            return None
        # The key of a zero token is zero, and stays zero at any length that it is brought to.
        return torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])

    def cosine_scales(self) -> Tensor:
        return self.logit_scale.clamp(max=LARGEST_LOGIT_SCALE).exp().flatten()

    def relative_bias(self, window: Pair) -> Tensor:
        first: Any = self.cpb_mlp[0]
        offsets = log_spaced_offsets(window, self.pretrained_window_size or window, first.weight.device)
        table = LARGEST_BIAS * self.cpb_mlp(offsets.to(first.weight.dtype)).sigmoid()
        return relative_position_bias(table, window, self.backend)


class SwinBlockV2(SwinBlock):
    """Window attention and an MLP, each before a LayerNorm and on a residual branch: (B, H, W, C) to the same."""

    norms_are_last = True

    def forward_modules(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.norm1(self.attn(x)))
        return x + self.drop_path(self.norm2(self.mlp(x)))


register_standard_block(
    SwinBlockV2,
    {
        'attn': CosineWindowAttention,
        'attn.cpb_mlp': nn.Sequential,
        'attn.cpb_mlp.0': nn.Linear,
        'attn.cpb_mlp.1': nn.ReLU,
        'attn.cpb_mlp.2': nn.Linear,
    },
    ('logit_scale', 'q_bias', 'v_bias', 'cpb_mlp.0.weight', 'cpb_mlp.0.bias', 'cpb_mlp.2.weight'),
)


class PatchMergingV2(PatchMerging):
    """Patch merging that normalises after the reduction: (B, H, W, C) to (B, ceil(H/stride), ceil(W/stride), 2C)."""

    def __init__(self, channels: int, stride: int, norm_cfg: Mapping[str, Any] | None) -> None:
        super().__init__(channels, stride, None)
        self.norm = build_norm(norm_cfg, 2 * channels) if norm_cfg else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.reduction(self._join(x)))


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
        for stage, side in zip(cast('list[SwinStage]', self.layers), windows, strict=False):
            for block in stage.blocks:
                cast('Any', block).attn.pretrained_window_size = (side, side) if side else None

    @staticmethod
    def _attention(qk_scale: float | None, relative_position: bool) -> Callable[..., WindowAttention]:
        if qk_scale is not None:
            raise ValueError(f'qk_scale={qk_scale}: Swin V2 learns a scale per head; leave qk_scale out')
        if not relative_position:
            raise ValueError('use_rel_pos_bias=False: Swin V2 always has its position bias; leave the option out')
        return CosineWindowAttention

    def reset_parameters(self) -> None:
        """Draw all parameters anew as the official code does: as V1's, but every block begins as the identity."""
        super().reset_parameters()
        for module in self.modules():
            if isinstance(module, SwinBlockV2):
                nn.init.zeros_(module.norm1.weight)
                nn.init.zeros_(module.norm2.weight)
