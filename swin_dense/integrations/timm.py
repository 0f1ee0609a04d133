"""Models for timm's registry. Importing this module registers ``swin_dense_t`` and the other names of ``PRETRAINED``.

    timm.create_model('swin_dense_t', features_only=True, checkpoint_path='swin_tiny_patch4_window7_224.pth')

Libraries that build their networks with timm then accept these names. ``pretrained=True`` loads the weights of
``PRETRAINED``, which ``swin-dense weights`` lists. If a checkpoint contains several backbones, ``prefix='teacher'``
chooses one, as in ``load_checkpoint``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from swin_dense.archs.arch import resolve_arch
from swin_dense.archs.published import PublishedFile, published
from swin_dense.checkpoint import CheckpointError, load_checkpoint
from swin_dense.images.presets import PRESETS
from swin_dense.models.classifier import SwinClassifier
from swin_dense.models.swin import SwinBackbone
from swin_dense.models.swin_v2 import BACKBONES
from swin_dense.ops.layout import to_maps
from swin_dense.utils import checks, packages

packages.optional('swin_dense.integrations.timm', 'timm')
from timm.layers import Format, is_scriptable  # noqa: E402
from timm.models import (  # noqa: E402
    FeatureInfo,
    build_model_with_cfg,
    generate_default_cfgs,
    register_model,
)

# Maps our names to the published weights of `pretrained=True`, which timm's own Swins use too.
PRETRAINED = {
    'swin_dense_t': 'swin_t.in1k',
    'swin_dense_s': 'swin_s.in1k',
    'swin_dense_b': 'swin_b.in22k_in1k',
    'swin_dense_l': 'swin_l.in22k_in1k',
    'swinv2_dense_t': 'swinv2_t.in1k_w8',
    'swinv2_dense_s': 'swinv2_s.in1k_w8',
    'swinv2_dense_b': 'swinv2_b.in1k_w8',
    'swinv2_dense_l': 'swinv2_l.in22k_in1k_w16',
}
# Further options that these weights require.
_OPTIONS = {'swinv2_dense_l': {'pretrained_window_size': (12, 12, 12, 6)}}
# Strides of the stages for a last map of this stride in pixels.
STRIDES = {32: (4, 2, 2, 2), 16: (4, 2, 2, 1), 8: (4, 2, 1, 1)}
# Maps option names of timm's Swins to ours.
RENAMED = {
    'in_chans': 'in_channels',
    'embed_dim': 'embed_dims',
    'img_size': 'pretrain_img_size',
    'proj_drop_rate': 'drop_rate',
}


class _TimmModel(nn.Module):
    """Mixin with timm's interface of a model, for a module with a Swin as its ``backbone``."""

    backbone: SwinBackbone
    prefix: str | None = None  # which backbone of a checkpoint to load, see load_checkpoint

    @property
    def in_chans(self) -> int:
        return self.backbone.in_channels

    def _levels(self) -> list[dict[str, Any]]:
        """Return the entry of each stage for timm's ``feature_info``."""
        return [
            {
                'num_chs': channels,
                'reduction': math.prod(self.backbone.strides[: stage + 1]),
                'module': f'backbone.stages.{stage}',
            }
            for stage, channels in enumerate(self.backbone.arch.channels)
        ]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights of this model, or of any Swin that :func:`swin_dense.load_checkpoint` supports.

        Without ``strict``, a classifier keeps its head if that of the weights has other classes.
        """
        if not state_dict.keys() <= self.state_dict().keys():
            try:
                self._load_foreign(state_dict, strict=True)
            except CheckpointError:
                if strict:
                    raise
                self._load_foreign(state_dict, strict=False)
            state_dict = self.state_dict()
        return super().load_state_dict(state_dict, strict, assign)

    def load_pretrained(self, path: str) -> None:
        """Load the file of ``pretrained=True``, as timm asks for it; a classifier of other classes keeps its head."""
        cfg: Any = self.pretrained_cfg
        self._load_foreign(path, strict=getattr(self, 'num_classes', None) == cfg['num_classes'])

    def _load_foreign(self, source: str | Mapping[str, Any], *, strict: bool) -> None:
        load_checkpoint(self.backbone, source, prefix=self.prefix)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable or disable gradient checkpointing."""
        for stage in self.backbone.stages:
            for block in stage.blocks:
                block.with_cp = enable

    def no_weight_decay(self) -> set[str]:
        return {f'backbone.{name}' for name in self.backbone.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the patterns of parameter groups for timm's layer-wise learning rate decay."""
        return _prefix_patterns(self.backbone.group_matcher(coarse))


class SwinDenseFeatures(_TimmModel):
    """The feature pyramid, for ``features_only=True``: normalised maps (B, C, H, W).

    ``out_indices`` are the stages to return, negative ones from the end; an integer n selects the last n.
    """

    def __init__(self, network: str, arch: str, out_indices: int | Sequence[int] = 4, **options: Any) -> None:
        super().__init__()
        stages = len(options.get('depths') or resolve_arch(arch, network).depths)
        indices = _stage_indices('out_indices', out_indices, stages)
        self.backbone = BACKBONES[network](arch, out_indices=indices, **options)
        self.feature_info = FeatureInfo(self._levels(), tuple(indices))
        self.output_fmt = Format.NCHW

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return one map (B, C_i, ceil(H / stride_i), ceil(W / stride_i)) per stage, for images (B, in_chans, H, W)."""
        return list(self.backbone(x))


class SwinDenseClassifier(_TimmModel, SwinClassifier):
    """A classifier: backbone, norm, mean over tokens, dropout, linear layer.

    ``num_classes=0`` removes the linear layer, and ``global_pool=''`` returns the map without pooling.
    """

    def __init__(
        self,
        network: str,
        arch: str,
        num_classes: int = 1000,
        global_pool: str = 'avg',
        head_drop_rate: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(f'{network}_{arch}', max(num_classes, 1), **options)
        self.num_features = self.head_hidden_size = self.backbone.out_channels[-1]
        self.head_drop = nn.Dropout(checks.rate('drop_rate', head_drop_rate))
        self.feature_info = self._levels()
        self._set_classifier(num_classes, global_pool, self.head)

    def _load_foreign(self, source: str | Mapping[str, Any], *, strict: bool) -> None:
        if strict and isinstance(self.head, nn.Linear):
            load_checkpoint(self, source, prefix=self.prefix)
        else:
            load_checkpoint(self.backbone, source, prefix=self.prefix, final_norm=True)

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the linear layer, or remove it if ``num_classes`` is 0."""
        weight = next(self.backbone.parameters())
        head = nn.Linear(self.num_features, max(num_classes, 1), device=weight.device, dtype=weight.dtype)
        self._set_classifier(num_classes, self.global_pool if global_pool is None else global_pool, head)

    def _set_classifier(self, num_classes: int, global_pool: str, head: nn.Linear) -> None:
        checks.one_of('global_pool', global_pool, ('avg', ''))
        self.num_classes, self.global_pool = num_classes, global_pool
        self.head = head if num_classes else nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last map, (B, C, H, W)."""
        return self.backbone(x)[-1]

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the last map and the maps of some stages, (B, C_i, H_i, W_i), as timm's Swin does.

        ``indices`` are as in :class:`SwinDenseFeatures`; None is all. ``norm`` normalises the map of the last stage
        alone, and ``stop_early`` has no effect.
        """
        checks.one_of('output_fmt', output_fmt, ('NCHW',))
        stages = len(self.backbone.stages)
        wanted = _stage_indices('indices', stages if indices is None else indices, stages)
        outs = self.backbone.forward_stages(x)
        (features,) = self.backbone.output_maps(outs)
        maps = [to_maps(outs[stage]) for stage in wanted]
        if norm and stages - 1 in wanted:
            maps[-1] = features
        return maps if intermediates_only else (features, maps)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return the logits of a map, (B, num_classes), or with ``pre_logits`` the pooled features, (B, C)."""
        pooled = x.mean((2, 3)) if self.global_pool else x
        return pooled if pre_logits or not self.global_pool else self.head(self.head_drop(pooled))

    def forward(self, img: Tensor) -> Tensor:
        """Return the logits (B, num_classes) of images (B, in_chans, H, W)."""
        return self.forward_head(self.forward_features(img))


def _stage_indices(name: str, wanted: int | Sequence[int], stages: int) -> list[int]:
    """Convert timm's stage indices, which may be negative or a number of last stages, to a sorted list."""
    indices = range(-wanted, 0) if isinstance(wanted, int) else wanted
    if not indices or not all(-stages <= index < stages for index in indices):
        raise ValueError(
            f'{name} must be a number of stages from 1 to {stages}, or stages between {-stages} and {stages - 1}, got '
            f'{wanted!r}'
        )
    return sorted({index % stages for index in indices})


def _prefix_patterns(patterns: Any) -> Any:
    """Return nested patterns of parameter names with the prefix 'backbone.' added."""
    if isinstance(patterns, str):
        return patterns.replace('^', r'^backbone\.')
    if isinstance(patterns, dict):
        return {key: _prefix_patterns(value) for key, value in patterns.items()}
    if isinstance(patterns, (list, tuple)):
        return type(patterns)(map(_prefix_patterns, patterns))
    return patterns


def _build(
    factory: Callable[..., _TimmModel],
    device: Any = None,
    dtype: torch.dtype | None = None,
    prefix: str | None = None,
    **options: Any,
) -> nn.Module:
    """Build a model from the options that timm passes, on a device and with a floating-point dtype."""
    with torch.device(device if device is not None else torch.get_default_device()):
        model = factory(**{RENAMED.get(key, key): value for key, value in options.items()}).to(dtype)
    model.prefix = prefix
    return model


def _create(variant: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    if is_scriptable():
        raise ValueError(
            'scriptable=True is not supported, because torch.jit.script cannot compile the backbone: omit it, and '
            'write TorchScript with swin_dense.export_model(model, "x.ts")'
        )
    network, _, arch = variant.replace('_dense', '').partition('_')
    features = kwargs.pop('features_only', False)
    weights = published()[PRETRAINED[variant]]
    kwargs = {'window_size': weights.window_size, **_OPTIONS.get(variant, {}), **kwargs}
    if 'output_stride' in kwargs:
        output_stride = kwargs.pop('output_stride')
        checks.one_of('output_stride', output_stride, STRIDES)
        kwargs['strides'] = STRIDES[output_stride]
    ignored: tuple[str, ...] = ()
    if features:
        ignored = ('num_classes', 'global_pool', 'feature_cls', 'drop_rate')
    elif 'drop_rate' in kwargs:  # in timm, the rate of the head
        kwargs['head_drop_rate'] = kwargs.pop('drop_rate')
    for key in ignored:
        kwargs.pop(key, None)
    kind = SwinDenseFeatures if features else SwinDenseClassifier
    return build_model_with_cfg(
        functools.partial(_build, functools.partial(kind, network=network, arch=arch)),
        variant,
        pretrained,
        kwargs_filter=ignored,
        **kwargs,
    )


def _pretrained_cfg(weights: PublishedFile) -> dict[str, Any]:
    """Return timm's description of published weights, for our parameter names and any input size."""
    return {
        'url': weights.address,
        'custom_load': True,  # by load_pretrained, because these files contain more than tensors
        'input_size': (3, weights.img_size, weights.img_size),
        'pool_size': (weights.img_size // 32, weights.img_size // 32),
        'num_classes': weights.classes,
        'crop_pct': 0.9,
        'interpolation': 'bicubic',
        **PRESETS[weights.normalization],
        'first_conv': 'backbone.patch_embed.projection',
        'classifier': 'head',
        'license': weights.licence.lower(),
        'origin_url': weights.source,
    }


def _register(variant: str) -> None:
    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return _create(variant, pretrained, **kwargs)

    create.__name__ = create.__qualname__ = variant
    register_model(create)


default_cfgs = generate_default_cfgs({name: _pretrained_cfg(published()[file]) for name, file in PRETRAINED.items()})
for _name in PRETRAINED:
    _register(_name)
