"""Swin V2: the modules that differ from V1, and the backbone.

Norms come after attention and MLP. Attention scores are cosines. A small network computes the position bias, so the
bias fits any window size. Patch merging normalises after the reduction. The rest is in :mod:`swin_dense.models.swin`.
Source: Liu et al., Swin Transformer V2: Scaling Up Capacity and Resolution, CVPR 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from swin_dense.archs.arch import Arch
from swin_dense.archs.spec import Spec
from swin_dense.models.attention import WindowAttention
from swin_dense.models.block import SwinBlock, SwinStage
from swin_dense.models.layers import NormConfig, PatchMerging, build_norm
from swin_dense.models.options import OptionsOfBoth
from swin_dense.models.swin import SwinBackbone
from swin_dense.ops import layout
from swin_dense.ops.windows import Size, log_spaced_offsets
from swin_dense.utils import checks

if TYPE_CHECKING:
    from typing_extensions import Unpack

LARGEST_FACTOR = 100
LARGEST_BIAS = 16
CPB_CHANNELS = 512


class CosineWindowAttention(WindowAttention):
    """Window attention with cosine scores, (B, H, W, C) to (B, H, W, C).

    The score is the cosine of query and key times a learnt factor per head, at most 100, plus a position bias between 0
    and 16. A small network computes the bias from the offset between the two tokens on a logarithmic scale.

    Args:
        channels: C.
        num_heads: heads, which divide C.
        qkv_bias: whether queries and values have a bias; keys never have.
        pretrained_window_size: (height, width) in tokens of the window that the position network was trained with. It
            sets the scale of the offsets; None means the current window.
        **options: ``window_size``, dropout and backend, see :class:`WindowAttention`.
    """

    def __init__(
        self,
        channels: int,
        num_heads: int,
        qkv_bias: bool = True,
        pretrained_window_size: Size | None = None,
        **options: Any,
    ) -> None:
        super().__init__(channels, num_heads, qkv_bias=False, use_rel_pos_bias=False, qk_scale=1.0, **options)
        self.pretrained_window_size = pretrained_window_size
        self.logit_scale = nn.Parameter(torch.zeros(num_heads, 1, 1))
        self.cpb_mlp = nn.Sequential(
            _OffsetLinear(2, CPB_CHANNELS),
            nn.ReLU(),
            nn.Linear(CPB_CHANNELS, num_heads, bias=False),
        )
        self.q_bias = nn.Parameter(torch.zeros(channels)) if qkv_bias else None
        self.v_bias = nn.Parameter(torch.zeros(channels)) if qkv_bias else None
        self.reset_position()

    relative_coords_table: Tensor

    def scale_positions(self, pretrained_window_size: Size | None) -> None:
        """Set the window that the position network was trained with, as the constructor does."""
        self.pretrained_window_size = pretrained_window_size
        # As in the authors' files, because no parameter tells the windows. It is computed anew where it is used: a
        # buffer follows the dtype of the model.
        self.register_buffer('relative_coords_table', self._coordinates(self.logit_scale.device))

    def _coordinates(self, device: torch.device) -> Tensor:
        """Return the coordinates of all offsets as the authors store them, (1, rows, columns, 2)."""
        trained = self.pretrained_window_size or self.window_size
        rows, columns = (2 * side - 1 for side in self.window_size)
        return log_spaced_offsets(self.window_size, trained, device).view(1, rows, columns, 2)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *options: Any) -> None:
        # The backbone has compared the table with its own, which may be of another window, or without values.
        name, own = f'{prefix}relative_coords_table', self.relative_coords_table
        device = state_dict.get(name, own).device
        table = self._coordinates(torch.device('cpu') if device.type == 'meta' else device)
        state_dict[name] = table.to(own.dtype)
        super()._load_from_state_dict(state_dict, prefix, *options)

    def reset_position(self) -> None:
        self.scale_positions(self.pretrained_window_size)
        nn.init.constant_(self.logit_scale, math.log(10))
        for bias in (self.q_bias, self.v_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def project(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.q_bias is not None and self.v_bias is not None:
            q = q + self.q_bias.to(q.dtype)  # autocast has chosen the dtype of the product
            v = v + self.v_bias.to(v.dtype)
        # Queries are multiplied by the factor of their head here, so the attention op uses a scale of 1.
        factors = self.logit_scale.clamp(max=math.log(LARGEST_FACTOR)).exp()
        q = self._directions(q) * factors.view(-1, 1)
        k = self._directions(k)
        q = q.flatten(-2).to(v.dtype)
        k = k.flatten(-2).to(v.dtype)
        return torch.cat([q, k, v], dim=-1)

    def _directions(self, x: Tensor) -> Tensor:
        """Split x into heads and scale each to length 1, (B, H, W, A, D), in float32 or higher precision."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        heads = x.unflatten(-1, (self.num_heads, -1)).to(dtype)
        # A product, because LiteRT's converter takes no power of five axes.
        squares = (heads * heads).sum(-1, keepdim=True)
        # The key of a padding token is 0. It has no direction and no gradient: the derivative of F.normalize, 1e12
        # there, is infinite in float16.
        is_zero = squares < 1e-24
        factors = squares.masked_fill(is_zero, 1.0).rsqrt().masked_fill(is_zero, 0.0)
        return heads * factors

    def position_table(self, window: Size) -> Tensor | None:
        trained = self.pretrained_window_size or window
        offsets = log_spaced_offsets(window, trained, self.logit_scale.device)
        return LARGEST_BIAS * self.cpb_mlp(offsets).sigmoid()


class _OffsetLinear(nn.Linear):
    """A linear layer that converts offsets, which have no dtype of their own, to the dtype of its weights."""

    def forward(self, offsets: Tensor) -> Tensor:
        return super().forward(offsets.to(self.weight.dtype))


class SwinBlockV2(SwinBlock):
    """Window attention and an MLP, each on a residual branch that ends with a LayerNorm: (B, H, W, C) to the same."""

    _norms_feed_linear = False  # their results are added to the map

    def forward_modules(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.norm1(self.attn(x)))
        return x + self.drop_path(self.norm2(self.forward_ffn(x)))


class PatchMergingV2(PatchMerging):
    """Patch merging that normalises after the reduction: (B, H, W, C) to (B, ceil(H/stride), ceil(W/stride), 2C)."""

    def __init__(self, channels: int, stride: int, norm_cfg: NormConfig | None) -> None:
        super().__init__(channels, stride, None)
        self.norm = build_norm(norm_cfg, 2 * channels) if norm_cfg else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.reduction(layout.neighbours(x, self.stride)))


class SwinV2Backbone(SwinBackbone):
    """Swin Transformer V2 backbone that turns an image of any size into a feature pyramid.

    Padding, windows, shifts and output norms are those of :class:`SwinBackbone`, because the authors published no code
    of V2 for dense prediction.

    Args:
        arch: as for :class:`SwinBackbone`; names may have the prefix 'swinv2_', as in 'swinv2_t'.
        window_size: as for :class:`SwinBackbone`.
        pretrained_window_size: side of the windows that the weights were trained with, one or one per stage; 0 means
            ``window_size``. The windows of a classifier shrink with its maps: checkpoints with window 16 at 256 x 256
            pixels have (16, 16, 16, 8).
        **options: options of :class:`SwinBackbone`, except ``qk_scale`` and ``use_rel_pos_bias``, which V2 lacks.

    Raises:
        ValueError: an option has a value that is not allowed, or options contradict each other.
        TypeError: an option has the wrong type or is unknown.

    Examples:
        >>> backbone = SwinV2Backbone('t', window_size=16, pretrained_window_size=8)
        >>> [tuple(level.shape) for level in backbone(torch.rand(1, 3, 64, 90))]
        [(1, 96, 16, 23), (1, 192, 8, 12), (1, 384, 4, 6), (1, 768, 2, 3)]
    """

    network = 'swinv2'
    _block = SwinBlockV2
    _merging = PatchMergingV2

    def __init__(
        self,
        arch: str | Mapping[str, Any] | Arch = 't',
        *,
        window_size: int | Sequence[int] = 8,
        pretrained_window_size: int | Sequence[int] = 0,
        **options: Unpack[OptionsOfBoth],
    ) -> None:
        given: Mapping[str, Any] = options  # a config for V1 may have its options
        if given.get('qk_scale') is not None:
            raise ValueError(f'qk_scale={given["qk_scale"]}: Swin V2 learns a scale per head; leave qk_scale out')
        if not given.get('use_rel_pos_bias', True):
            raise ValueError('use_rel_pos_bias=False: Swin V2 always has a position bias; leave the option out')
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
                cast('Any', block).attn.w_msa.scale_positions((side, side) if side else None)

    @classmethod
    def option_names(cls) -> list[str]:
        return [name for name in super().option_names() if name not in ('qk_scale', 'use_rel_pos_bias')]

    def spec(self) -> Spec:
        return replace(
            super().spec(), given_windows=tuple((side, side) if side else None for side in self.pretrained_window_size)
        )

    def _make_attention(self, channels: int, num_heads: int, **settings: Any) -> WindowAttention:
        return CosineWindowAttention(channels, num_heads, **settings)

    def reset_parameters(self) -> None:
        """Initialise all parameters as the official code does: as in V1, but every block starts as the identity."""
        super().reset_parameters()
        for module in self.modules():
            if isinstance(module, SwinBlockV2):
                for norm in (module.norm1, module.norm2):
                    weight = getattr(norm, 'weight', None)
                    if weight is not None:
                        nn.init.zeros_(weight)


# The networks, by the beginning of the names of their architectures.
BACKBONES: dict[str, type[SwinBackbone]] = {'swin': SwinBackbone, 'swinv2': SwinV2Backbone}
