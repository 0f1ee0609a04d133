"""The parts of a Swin that are not attention: patch embedding, patch merging, MLP and stochastic depth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense import checks
from swin_dense.ops import gpu, norm, proof, recorded, surroundings
from swin_dense.ops.recompute import computed_again
from swin_dense.windows import window_grid

_ACTIVATIONS = ('GELU', 'ReLU', 'LeakyReLU', 'SiLU', 'Hardswish', 'Mish', 'ELU', 'Tanh', 'Sigmoid')
_NORMS = ('LN', 'LayerNorm')


def build_activation(act_cfg: Mapping[str, Any]) -> nn.Module:
    """Build an activation from a config like ``dict(type='GELU')``; the other keys are its arguments."""
    options = _config('act_cfg', act_cfg, _ACTIVATIONS)
    return _build('act_cfg', getattr(nn, options.pop('type')), options)


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last axis, on a GPU in one pass with the change of layout before or after it.

    ``feeds_product`` says that a matrix product reads the result: under autocast it is written in that precision.
    """

    feeds_product = False

    def forward(self, x: Tensor) -> Tensor:
        normed = self.in_one_pass(x, 'tokens')
        return super().forward(x) if normed is None else normed

    def in_one_pass(self, x: Tensor, layout: str) -> Tensor | None:
        """Return x, (B, H, W, C), normalised, in one of ``norm.LAYOUTS``; None where no kernel does that."""
        if not gpu.is_gpu(x) or not self.elementwise_affine or self.bias is None:
            return None
        if surroundings.is_rewritten():  # torch.compile fuses norms itself
            return None
        is_changed = type(self).forward is not LayerNorm.forward or 'forward' in vars(self)
        if layout != 'tokens' and (is_changed or surroundings.has_hooks(self)):  # they see what they see everywhere
            return None
        low = gpu.autocast_dtype(x)
        dtype = x.dtype if low is None else low if self.feeds_product else torch.float32
        kind = (layout, x.shape[-1], x.dtype, dtype, self.weight.dtype, x.device)
        if norm.reason_not_to_run(x, self.normalized_shape[0]) or proof.reason_against_norm(*kind):
            return None
        return norm.LAYOUTS[layout](x, self.weight, self.bias, self.eps, dtype)


def build_norm(norm_cfg: Mapping[str, Any], channels: int, feeds_product: bool = False) -> LayerNorm:
    """Build a norm over the last axis from a config like ``dict(type='LN', eps=1e-6, requires_grad=True)``."""
    options = _config('norm_cfg', norm_cfg, _NORMS)
    requires_grad = options.pop('requires_grad', True)
    del options['type']
    built = cast('LayerNorm', _build('norm_cfg', LayerNorm, options, channels)).requires_grad_(requires_grad)
    built.feeds_product = feeds_product
    return built


def _config(name: str, config: Mapping[str, Any], types: Iterable[str]) -> dict[str, Any]:
    if not isinstance(config, Mapping) or 'type' not in config:
        raise TypeError(f'{name} must be a dict with the key "type", got {config!r}')
    checks.one_of(f'{name}["type"]', config['type'], types)
    return dict(config)


def _build(name: str, module: Callable[..., nn.Module], options: dict[str, Any], *args: Any) -> nn.Module:
    try:
        return module(*args, **options)
    except TypeError as error:
        raise TypeError(f'{name} has an argument that does not fit: {error}') from None


class PatchEmbed(nn.Module):
    """Cut the image into patches and embed each: (B, in_channels, h, w) to (B, ceil(h/p), ceil(w/p), C)."""

    def __init__(self, in_channels: int, channels: int, patch_size: int, norm_cfg: Mapping[str, Any] | None) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_channels, channels, kernel_size=patch_size, stride=patch_size)
        self.norm = build_norm(norm_cfg, channels) if norm_cfg else nn.Identity()

    def forward(self, img: Tensor) -> Tensor:
        side = self.proj.kernel_size[0]
        rows, columns = window_grid(img.shape[2], img.shape[3], (side, side))
        pads = columns * side - img.shape[3], rows * side - img.shape[2]
        # A graph that is being recorded shall hold for other sizes too; elsewhere padding by nothing would copy.
        if surroundings.is_recorded() or any(pads):
            img = F.pad(img, (0, pads[0], 0, pads[1]))
        if not (surroundings.is_exported() or surroundings.is_transformed()):  # vmap knows no memory formats
            # In this format the convolution leaves tokens as they are wanted, and the permutation copies nothing.
            img = img.contiguous(memory_format=torch.channels_last)
        return self.norm(self.proj(img).permute(0, 2, 3, 1))


class PatchMerging(nn.Module):
    """Join 2x2 neighbouring tokens into one: (B, H, W, C) to (B, ceil(H/stride), ceil(W/stride), 2C).

    The neighbours are concatenated in the official order: top left, bottom left, top right, bottom right.
    """

    def __init__(self, channels: int, stride: int, norm_cfg: Mapping[str, Any] | None) -> None:
        super().__init__()
        self.stride = stride
        self.norm = build_norm(norm_cfg, 4 * channels, feeds_product=True) if norm_cfg else nn.Identity()
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self._join_and_normalise(x)
        with computed_again(normed, x, self._join_and_normalise, through=self.norm):
            return self.reduction(normed)

    def _join_and_normalise(self, x: Tensor) -> Tensor:
        if self.stride == 2 and isinstance(self.norm, LayerNorm):
            normed = self.norm.in_one_pass(x, 'merged')
            if normed is not None:
                return normed
        joined = self._join(x)
        with computed_again(joined, x, self._join):
            return self.norm(joined)

    def _join(self, x: Tensor) -> Tensor:
        if surroundings.is_exported():
            return recorded.neighbours(x, self.stride)
        pads = [(-(-side // self.stride) - 1) * self.stride + 2 - side for side in x.shape[1:3]]
        # A graph that is being recorded shall hold for other sizes too.
        if surroundings.is_recorded() or any(pads):
            x = F.pad(x, (0, 0, 0, pads[1], 0, pads[0]))
        neighbours = x.unfold(1, 2, self.stride).unfold(2, 2, self.stride)  # (B, H', W', C, row, column)
        return neighbours.permute(0, 1, 2, 5, 4, 3).flatten(3)


class MLP(nn.Module):
    """Two linear layers with an activation between, along the last axis."""

    def __init__(self, channels: int, hidden_channels: int, act_cfg: Mapping[str, Any], drop_rate: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, hidden_channels)
        self.act = build_activation(act_cfg)
        self.fc2 = nn.Linear(hidden_channels, channels)
        self.drop = nn.Dropout(drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        active = self.act(hidden)
        with computed_again(active, hidden, self.act, through=self.act):
            return self.drop(self.fc2(self.drop(active)))


class DropPath(nn.Module):
    """Stochastic depth: in training, drop a whole residual branch per image with probability ``drop_prob``."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        factors = self.draw(x)
        return x if factors is None else x * factors.view(-1, *(1,) * (x.ndim - 1))

    def draw(self, x: Tensor) -> Tensor | None:
        """Draw the factor of every image of x, (B, ...): zero or the same for all, (B,); None stands for ones."""
        if not self.training or self.drop_prob == 0.0:
            return None
        factors = x.new_zeros(x.shape[0])
        keep_prob = 1.0 - self.drop_prob
        return factors.bernoulli_(keep_prob).div_(keep_prob) if keep_prob > 0.0 else factors

    def extra_repr(self) -> str:
        return f'drop_prob={self.drop_prob:.3g}'
