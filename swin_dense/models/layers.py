"""The layers of a Swin besides attention: patch embedding, patch merging, MLP, norms and stochastic depth."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.ops import context, plain
from swin_dense.ops.recompute import computed_again
from swin_dense.ops.triton import gpu, norm, verdicts
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
    return _build('act_cfg', getattr(nn, options.pop('type')), options)


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last axis; on a GPU, one kernel can also do the change of layout before or after it.

    Attributes:
        feeds_product: whether a matrix product reads the result, so that under autocast the result has its precision.
        backend: attention backend of the model. 'auto' uses the kernel if `swin-dense doctor` found it correct and
            faster on this GPU, 'triton' uses it wherever it can run.
    """

    feeds_product = False
    backend = 'auto'

    def forward(self, x: Tensor) -> Tensor:
        normed = self.in_one_pass(x, 'tokens')
        return super().forward(x) if normed is None else normed

    def in_one_pass(self, x: Tensor, layout: str) -> Tensor | None:
        """Normalise x, (B, H, W, C), into one of ``norm.LAYOUTS`` by a kernel, or return None if none may run."""
        if self.backend not in ('auto', 'triton') or not gpu.is_gpu(x) or self.weight is None or self.bias is None:
            return None
        if context.is_rewritten() or not has_own_forward(self):  # torch.compile fuses norms itself
            return None
        if layout != 'tokens' and context.has_hooks(self):  # hooks must see the same tensors on every device
            return None
        low = gpu.autocast_dtype(x)
        dtype = x.dtype if low is None else low if self.feeds_product else torch.float32
        if norm.unsupported_reason(x, self.normalized_shape[0]):
            return None
        kind = (layout, x.shape[-1], x.dtype, dtype, self.weight.dtype, x.device, torch.is_grad_enabled())
        if self.backend == 'auto' and verdicts.reason_against_norm(*kind):
            return None
        return self.by_kernel(x, layout, dtype)

    def by_kernel(self, x: Tensor, layout: str, dtype: torch.dtype) -> Tensor:
        """Normalise x, (B, H, W, C), into one of ``norm.LAYOUTS`` by a kernel."""
        return norm.LAYOUTS[layout](x, self.weight, self.bias, self.eps, dtype)


# The original methods, because a library may later replace `forward` of a class, including torch's classes.
_FORWARDS = {kind: kind.forward for kind in (nn.Linear, nn.Identity, nn.LayerNorm, LayerNorm)}


def has_own_forward(part: nn.Module) -> bool:
    """Return whether a module is a linear layer, LayerNorm or identity with its original ``forward``."""
    kinds = [kind for kind in type(part).__mro__ if kind in _FORWARDS]
    is_known = type(part) in _FORWARDS and 'forward' not in vars(part)
    return is_known and all(kind.forward is _FORWARDS[kind] for kind in kinds)


def build_norm(norm_cfg: NormConfig, channels: int, feeds_product: bool = False) -> nn.Module:
    """Build a norm over the last axis from a config such as ``dict(type='LN', eps=1e-6, requires_grad=True)``."""
    if callable(norm_cfg):
        return norm_cfg(channels)
    options = _config('norm_cfg', norm_cfg, NORMS)
    requires_grad = options.pop('requires_grad', True)
    del options['type']
    built = _build('norm_cfg', LayerNorm, options, channels).requires_grad_(requires_grad)
    built.feeds_product = feeds_product  # type: ignore[assignment]
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
        raise TypeError(f'{name} has an invalid argument: {error}') from None


class PatchEmbed(nn.Module):
    """Cut the image into patches and embed each: (B, in_channels, h, w) to (B, ceil(h/p), ceil(w/p), C)."""

    def __init__(self, in_channels: int, channels: int, patch_size: int, norm_cfg: NormConfig | None) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.projection = nn.Conv2d(in_channels, channels, kernel_size=patch_size, stride=patch_size)
        self.norm = build_norm(norm_cfg, channels) if norm_cfg else nn.Identity()

    def forward(self, img: Tensor) -> Tensor:
        img = plain.pad_to_patches(img, self.patch_size)
        return self.norm(self.projection(img).permute(0, 2, 3, 1))


class PatchMerging(nn.Module):
    """Join 2x2 neighbouring tokens into one: (B, H, W, C) to (B, ceil(H/stride), ceil(W/stride), 2C).

    The parameters have the order of ``nn.Unfold`` in mmdet and mmsegmentation: channel by channel, and row by row
    within a channel. The kernel reads the map in that order. Without a kernel, copying a map in that order is slow, so
    the map is joined neighbour by neighbour, as in the official code, and every forward pass reorders the parameters,
    which are small, to match.
    """

    def __init__(self, channels: int, stride: int, norm_cfg: NormConfig | None) -> None:
        super().__init__()
        self.stride = stride
        self.norm = build_norm(norm_cfg, 4 * channels, feeds_product=True) if norm_cfg else nn.Identity()
        self.reduction = nn.Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if not may_be_inlined(self.norm, self.reduction):
            return self.reduction(self.norm(plain.neighbours(x, self.stride, by_channel=True)))
        norm: Any = self.norm
        normed = norm.in_one_pass(x, 'merged') if self.stride == 2 and isinstance(norm, LayerNorm) else None
        if normed is not None:
            again = functools.partial(norm.by_kernel, layout='merged', dtype=normed.dtype)
            with computed_again(normed, x, again):
                return self.reduction(normed)
        normed = self._join_and_normalise(x)
        with computed_again(normed, x, self._join_and_normalise):
            return F.linear(normed, by_neighbour(self.reduction.weight), self.reduction.bias)

    def _join_and_normalise(self, x: Tensor) -> Tensor:
        norm: Any = self.norm
        if isinstance(norm, nn.Identity):
            return plain.neighbours(x, self.stride)
        weight, bias = (
            None if parameter is None else by_neighbour(parameter) for parameter in (norm.weight, norm.bias)
        )
        joined = plain.neighbours(x, self.stride)
        with computed_again(joined, x, lambda x: plain.neighbours(x, self.stride)):
            return F.layer_norm(joined, joined.shape[-1:], weight, bias, norm.eps)


def may_be_inlined(*parts: nn.Module) -> bool:
    """Return whether modules may be computed from their parameters instead of being called."""
    return all(
        has_own_forward(part)
        and not context.has_hooks(part)
        # Quantised weights are Tensor subclasses that support only the product of their own module.
        and all(type(parameter) in (nn.Parameter, Tensor) for parameter in part.parameters(recurse=False))
        for part in parts
    )


def by_neighbour(parameter: Tensor) -> Tensor:
    """Reorder the last axis of a patch merging parameter from channel by channel to neighbour by neighbour."""
    # (C, row, column) to (column, row, C): top left, bottom left, top right, bottom right
    return parameter.unflatten(-1, (-1, 2, 2)).movedim(-3, -1).transpose(-3, -2).flatten(-3)


class FFN(nn.Module):
    """Two linear layers with an activation between them, over the last axis."""

    def __init__(self, channels: int, hidden_channels: int, act_cfg: ActivationConfig, drop_rate: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(nn.Linear(channels, hidden_channels), build_activation(act_cfg), nn.Dropout(drop_rate)),
            nn.Linear(hidden_channels, channels),
            nn.Dropout(drop_rate),
        )

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.layers
        if type(first) is not nn.Sequential or len(first) != 3 or context.has_hooks(self.layers, first):
            return self.layers(x)
        linear, act, drop = first
        hidden = linear(x)
        active = act(hidden)
        with computed_again(active, hidden, act, through=act):
            x = drop(active)
            for layer in rest:
                x = layer(x)
            return x

    local_forward = forward  # see swin_dense.models.block.whole_map_reason


class DropPath(nn.Module):
    """Stochastic depth: in training, drop a whole residual branch per image with probability ``drop_prob``."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors(x) if self.is_on() else x

    def is_on(self) -> bool:
        """Return whether the module can drop branches in its current mode."""
        return self.training and self.drop_prob > 0.0

    def factors(self, x: Tensor) -> Tensor:
        """Draw one factor per image of x, (B, ...): (B, 1, ...), 0 for images whose branch is dropped."""
        keep_prob = 1.0 - self.drop_prob
        factors = x.new_zeros(x.shape[0], *(1,) * (x.ndim - 1))
        return factors.bernoulli_(keep_prob).div_(keep_prob) if keep_prob > 0.0 else factors

    local_forward = forward

    def extra_repr(self) -> str:
        return f'drop_prob={self.drop_prob:.3g}'
