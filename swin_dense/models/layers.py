"""The layers of a Swin besides attention: patch embedding, patch merging, MLP, norms and stochastic depth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from swin_dense.ops import layout, linear, norm
from swin_dense.utils import checks

ACTIVATIONS = ('GELU', 'ReLU', 'LeakyReLU', 'SiLU', 'Hardswish', 'Mish', 'ELU', 'Tanh', 'Sigmoid')
NORMS = ('LN', 'LayerNorm')

# A config with one of the types above, or a function that builds any other layer.
ActivationConfig = Mapping[str, Any] | Callable[[], nn.Module]
NormConfig = Mapping[str, Any] | Callable[[int], nn.Module]


def build_activation(act_cfg: ActivationConfig) -> nn.Module:
    """Build an activation from a config such as ``dict(type='GELU')``; other keys are passed as arguments."""
    if callable(act_cfg):
        return act_cfg()
    options = _config('act_cfg', act_cfg, ACTIVATIONS)
    activation = getattr(nn, options.pop('type'))
    return _build('act_cfg', activation, options)


def _forward_by_onednn(layer: nn.Linear, x: Tensor) -> Tensor:
    if x.is_cpu and linear.is_supported(x, layer.weight, layer.bias):
        return linear.linear_by_onednn(x, layer.weight, layer.bias)
    return nn.Linear.forward(layer, x)


class Linear(nn.Linear):
    """A linear layer over the last axis; on processors where oneDNN is faster, by oneDNN."""

    if linear.IS_FASTER_BY_ONEDNN:  # elsewhere the forward pass is torch's own, without a call in between
        forward = _forward_by_onednn  # type: ignore[assignment]


class LayerNorm(nn.LayerNorm):
    """A LayerNorm; on a GPU, by the kernel that is faster there.

    Attributes:
        feeds_linear: whether only a linear layer reads the result. Under autocast the kernel then returns it in the
            dtype to which that layer would convert it.
    """

    feeds_linear = False

    def forward(self, x: Tensor) -> Tensor:
        parameters = self.weight, self.bias, self.eps
        out = norm.layer_norm_by_kernel(x, *parameters, self.feeds_linear) if x.is_cuda else None
        return torch.layer_norm(x, self.normalized_shape, *parameters) if out is None else out  # as F.layer_norm does


def build_norm(norm_cfg: NormConfig, channels: int, feeds_linear: bool = False) -> nn.Module:
    """Build a norm over the last axis from a config such as ``dict(type='LN', eps=1e-6, requires_grad=True)``."""
    if callable(norm_cfg):
        return norm_cfg(channels)
    options = _config('norm_cfg', norm_cfg, NORMS)
    requires_grad = options.pop('requires_grad', True)
    del options['type']
    layer: Any = _build('norm_cfg', LayerNorm, options, channels)
    layer.feeds_linear = feeds_linear
    return layer.requires_grad_(requires_grad)


def _config(name: str, config: Mapping[str, Any], types: Iterable[str]) -> dict[str, Any]:
    if not isinstance(config, Mapping) or 'type' not in config:
        raise TypeError(f'{name} must be a dict with the key "type", got {config!r}')
    checks.one_of(f'{name}["type"]', config['type'], types)
    return dict(config)


def _build(name: str, module: Callable[..., nn.Module], options: dict[str, Any], *args: Any) -> nn.Module:
    try:
        return module(*args, **options)
    except TypeError as error:
        raise TypeError(f'{name} has an invalid argument: {error}') from None


class PatchEmbed(nn.Module):
    """Cut the image into patches and embed each: (B, in_channels, h, w) to (B, ceil(h/p), ceil(w/p), C)."""

    def __init__(self, in_channels: int, channels: int, patch_size: int, norm_cfg: NormConfig | None) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.projection = nn.Conv2d(in_channels, channels, kernel_size=patch_size, stride=patch_size)
        self.norm = build_norm(norm_cfg, channels) if norm_cfg else nn.Identity()

    def forward(self, img: Tensor) -> Tensor:
        img = layout.pad_to_multiple(img, (self.patch_size, self.patch_size), axis=2)
        x = self.projection(img).permute(0, 2, 3, 1)
        return self.norm(x)


class PatchMerging(nn.Module):
    """Join 2x2 neighbouring tokens into one: (B, H, W, C) to (B, ceil(H/stride), ceil(W/stride), 2C).

    The parameters have the order of ``nn.Unfold``, as in mmdet and mmsegmentation.
    """

    def __init__(self, channels: int, stride: int, norm_cfg: NormConfig | None) -> None:
        super().__init__()
        self.stride = stride
        self.norm = build_norm(norm_cfg, 4 * channels, feeds_linear=True) if norm_cfg else nn.Identity()
        self.reduction = Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = layout.neighbours(x, self.stride)
        return self.reduction(self.norm(x))


class FFN(nn.Module):
    """Two linear layers with an activation between them, over the last axis."""

    def __init__(self, channels: int, hidden_channels: int, act_cfg: ActivationConfig, drop_rate: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(
                Linear(channels, hidden_channels),
                build_activation(act_cfg),
                nn.Dropout(drop_rate),
            ),
            Linear(hidden_channels, channels),
            nn.Dropout(drop_rate),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class DropPath(nn.Module):
    """Stochastic depth: in training, drop a residual branch, (B, H, W, C), per image with probability ``drop_prob``."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.drop_prob == 0.0:
            return x
        keep_prob = 1.0 - self.drop_prob
        # Not F.dropout, for which torch.compile draws other numbers than eager mode.
        factors = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(keep_prob)
        return x * factors.div_(keep_prob or 1.0)

    def extra_repr(self) -> str:
        return f'drop_prob={self.drop_prob:.3g}'
