"""The layers of a Swin besides attention: patch embedding, patch merging, MLP, norms and stochastic depth."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from swin_dense.ops import context, plain
from swin_dense.ops.linear import linear
from swin_dense.ops.triton import gpu, norm, verdicts
from swin_dense.utils import checks

ACTIVATIONS = ('GELU', 'ReLU', 'LeakyReLU', 'SiLU', 'Hardswish', 'Mish', 'ELU', 'Tanh', 'Sigmoid')
NORMS = ('LN', 'LayerNorm')

# A config with one of the types above, or a function that builds any other layer.
ActivationConfig = Mapping[str, Any] | Callable[[], nn.Module]
NormConfig = Mapping[str, Any] | Callable[[int], nn.Module]


_ACTIVATION_TYPES = {getattr(nn, name) for name in ACTIVATIONS}
# The types whose modules map every image and every window, or every token, alone. Each has its original method, because
# a library may later replace `forward` of a class, including torch's classes.
_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    kind: kind.forward for kind in (nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity, nn.Sequential, *_ACTIVATION_TYPES)
}
_Kind = TypeVar('_Kind', bound=type[nn.Module])


def known(kind: _Kind) -> _Kind:
    """Declare that modules of exactly this type map every image and every window, or every token, alone."""
    _FORWARDS[kind] = kind.forward
    return kind


def are_unmodified(*modules: nn.Module) -> bool:
    """Return whether all modules have exactly a known type and its ``forward``, and no hook or compiler sees them."""
    return (
        all(kind.forward is forward for kind, forward in _FORWARDS.items())
        and all(context.type_of(part) in _FORWARDS and 'forward' not in vars(part) for part in modules)
        and not any(part._compiled_call_impl for part in modules)
        and not context.has_hooks(*modules)
    )


def build_activation(act_cfg: ActivationConfig) -> nn.Module:
    """Build an activation from a config such as ``dict(type='GELU')``; other keys are passed as arguments."""
    if callable(act_cfg):
        return act_cfg()
    options = _config('act_cfg', act_cfg, ACTIVATIONS)
    return _build('act_cfg', getattr(nn, options.pop('type')), options)


@known
class Linear(nn.Linear):
    """A linear layer over the last axis; on a CPU, by the library that is faster there."""

    def forward(self, x: Tensor) -> Tensor:
        is_replaced = nn.Linear.forward is not _FORWARDS[nn.Linear]
        if is_replaced or x.device.type != 'cpu':
            return super().forward(x)
        return linear(x, self.weight, self.bias)

    def _refuse_qconfig(self, qconfig: Any) -> None:
        raise TypeError(
            'torch.ao.quantization finds layers by their exact type and would leave this one as it is: use torchao, '
            'or first set layer.__class__ = torch.nn.Linear for each layer of type swin_dense.models.layers.Linear'
        )

    qconfig = property(fset=_refuse_qconfig)


@known
class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last axis; on a GPU, a kernel can write the precision that the next operation reads.

    Attributes:
        feeds_product: whether a matrix product reads the result, so that under autocast the result has its precision.
        backend: attention backend of the model. 'auto' uses the kernel if `swin-dense doctor` found it correct and
            faster on this GPU, 'triton' uses it wherever it can run.
    """

    feeds_product = False
    backend = 'auto'

    def forward(self, x: Tensor) -> Tensor:
        return self._forward_on_gpu(x) if gpu.is_gpu(x) else super().forward(x)

    def _forward_on_gpu(self, x: Tensor) -> Tensor:
        low = gpu.autocast_dtype(x)
        dtype = x.dtype if low is None else low if self.feeds_product else torch.float32
        if self._may_use_kernel(x, dtype):
            return norm.layer_norm(x, self.weight, self.bias, self.eps, dtype)
        return super().forward(x)

    def _may_use_kernel(self, x: Tensor, dtype: torch.dtype) -> bool:
        if self.backend not in ('auto', 'triton') or self.weight is None or self.bias is None:
            return False
        if context.is_rewritten() or norm.unsupported_reason(x):  # torch.compile fuses norms itself
            return False
        kind = (x.shape[-1], x.dtype, dtype, self.weight.dtype, x.device, torch.is_grad_enabled())
        return self.backend == 'triton' or not verdicts.reason_against_norm(*kind)


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
        if not context.has_hooks(self.projection):  # hooks may depend on the layout of the image, as those of Opacus do
            img = plain.to_channels_last(img)
        return self.norm(self.projection(img).permute(0, 2, 3, 1))


class PatchMerging(nn.Module):
    """Join 2x2 neighbouring tokens into one: (B, H, W, C) to (B, ceil(H/stride), ceil(W/stride), 2C).

    The parameters have the order of ``nn.Unfold``, as in mmdet and mmsegmentation.
    """

    def __init__(self, channels: int, stride: int, norm_cfg: NormConfig | None) -> None:
        super().__init__()
        self.stride = stride
        self.norm = build_norm(norm_cfg, 4 * channels, feeds_product=True) if norm_cfg else nn.Identity()
        self.reduction = Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduction(self.norm(plain.neighbours(x, self.stride)))


@known
class FFN(nn.Module):
    """Two linear layers with an activation between them, over the last axis."""

    def __init__(self, channels: int, hidden_channels: int, act_cfg: ActivationConfig, drop_rate: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Sequential(Linear(channels, hidden_channels), build_activation(act_cfg), nn.Dropout(drop_rate)),
            Linear(hidden_channels, channels),
            nn.Dropout(drop_rate),
        )

    def forward(self, x: Tensor) -> Tensor:
        if not self._may_recompute():
            return self.layers(x)
        (first, act, drop), second, last = cast(Any, self.layers)
        hidden = first(x)
        active = drop(act(hidden))
        # What autograd keeps must not refer to the result, which is the largest tensor of a block.
        kept, memory, numel = hidden.detach(), active.untyped_storage()._cdata, active.numel()

        def pack(saved: Tensor) -> tuple[Any, Any]:
            is_all = saved.untyped_storage()._cdata == memory and saved.numel() == numel and saved.is_contiguous()
            return (saved.shape, saved.dtype) if is_all else (saved, saved._version)

        def unpack(packed: tuple[Any, Any]) -> Tensor:
            saved, state = packed
            if isinstance(saved, torch.Size):
                return act(kept).to(state).view(saved)
            if saved._version != state:
                raise RuntimeError('a tensor needed for the gradients of an MLP was modified by an inplace operation')
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return last(second(active))

    def _may_recompute(self) -> bool:
        """Return whether a backward pass may follow that can compute the activation again, and saves memory by it."""
        if not torch.is_grad_enabled() or context.manages_saved_tensors():
            return False
        parts: list[Any] = [*self.layers.modules()]
        kinds = [type(part) for part in parts]
        is_as_built = kinds[:3] + kinds[4:] == _KINDS_IN_FFN and kinds[3] in _SAVE_THEIR_INPUT
        is_pure = is_as_built and not (parts[4].training and parts[4].p) and not getattr(parts[3], 'inplace', False)
        return is_pure and are_unmodified(*parts)


_KINDS_IN_FFN = [nn.Sequential, nn.Sequential, Linear, nn.Dropout, Linear, nn.Dropout]  # and the activation
_SAVE_THEIR_INPUT = _ACTIVATION_TYPES - {nn.ReLU, nn.Tanh, nn.Sigmoid}


@known
class DropPath(nn.Module):
    """Stochastic depth: in training, drop a whole residual branch per image with probability ``drop_prob``."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors(x) if self.training and self.drop_prob else x

    def factors(self, x: Tensor) -> Tensor:
        """Draw one factor per image of x, (B, ...): (B, 1, ...), 0 for images whose branch is dropped."""
        keep_prob = 1.0 - self.drop_prob
        factors = x.new_zeros(x.shape[0], *(1,) * (x.ndim - 1))
        return factors.bernoulli_(keep_prob).div_(keep_prob) if keep_prob > 0.0 else factors

    def extra_repr(self) -> str:
        return f'drop_prob={self.drop_prob:.3g}'
