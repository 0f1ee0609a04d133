"""SwinDense and SwinDenseV2: the backbones in mmengine's root registry, where all child registries find them."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mmengine.logging import print_log
from mmengine.model import BaseModule, PretrainedInit, initialize
from mmengine.registry import MODELS
from torch import Tensor, nn

from swin_dense.archs.arch import Arch
from swin_dense.checkpoint import Report, load_checkpoint
from swin_dense.mm.dialects import translated, why_unknown
from swin_dense.mm.training_files import let_mmengine_read_training_files
from swin_dense.models.layers import ACTIVATIONS, NORMS
from swin_dense.models.options import reject_unknown
from swin_dense.models.swin import SwinBackbone
from swin_dense.models.swin_v2 import SwinV2Backbone
from swin_dense.ops.layout import to_maps
from swin_dense.utils import checks

let_mmengine_read_training_files()

# Keys of an init_cfg of the type 'Pretrained': the options of load_checkpoint, and mmengine's map_location, which has
# no effect because weights are read on the CPU and copied to the device of the backbone.
_LOAD_OPTIONS = tuple(
    name for name in inspect.signature(load_checkpoint).parameters if name not in ('backbone', 'source', 'log')
)
_PRETRAINED_KEYS = ('type', 'checkpoint', 'map_location', *_LOAD_OPTIONS)


@MODELS.register_module()
class SwinDense(SwinBackbone, BaseModule):
    """:class:`SwinBackbone` as an mmengine module.

    Accepts the keyword arguments of the ``SwinTransformer`` of mmdet and mmsegmentation, with the same meaning.

    Args:
        arch: see :class:`SwinBackbone`.
        pretrained: checkpoint to start from; the older form of ``init_cfg``.
        convert_weights: has no effect, because the layout of a checkpoint is detected; accepted for existing configs.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` loads a checkpoint, and raises if it does not contain all
            parameters of the backbone. The dict also accepts the options of :func:`swin_dense.load_checkpoint`:
            ``prefix``, ``ema``, ``allow_partial`` and so on. Other mmengine
            initialisers work as in any mmengine module.
        allow_partial: whether ``init_cfg``, ``load_from`` and ``load_state_dict`` may leave some or all parameters of
            the backbone unchanged, for files that contain only a part of the backbone, or only a head.
        compile: compile only the backbone with ``torch.compile``: True, or a dict of its options. In contrast,
            mmengine's ``compile=True`` compiles whole training steps, which fails with some optimisers and heads.
        img_size: mmpretrain's name for ``pretrain_img_size``. It marks a config of a classifier, so it changes two
            defaults: ``out_indices`` to the last stage, and ``clamp_window`` to True. So do mmpretrain's names of
            architectures, 'tiny', 'small', 'base' and 'large'.
        output_missing_index_as_none: BEVDet's option: return one item per stage, None for those not in ``out_indices``.
        return_stereo_feat: BEVDet's option: return the map of the first stage, without a norm, before the others.
        **options: options of :class:`SwinBackbone`, or of the Swins of the authors, of mmdet 2.x and of mmpretrain,
            which keep the meaning that they have there: a warning lists the translations. Others raise. ``act_cfg``
            and ``norm_cfg`` may also name layers that are registered in mmengine.

    Raises:
        ValueError: both ``pretrained`` and ``init_cfg`` are given, or see :class:`SwinBackbone`.
        TypeError: ``pretrained`` or ``init_cfg`` has the wrong form, ``init_cfg`` has an unknown key, or see
            :class:`SwinBackbone`.

    Examples:
        >>> from mmengine.registry import MODELS
        >>> backbone = MODELS.build(dict(type='SwinDense', arch='t', drop_path_rate=0.2))
        >>> backbone.out_channels
        (96, 192, 384, 768)
    """

    def __init__(
        self,
        arch: str | Mapping[str, Any] | Arch = 't',
        *,
        pretrained: str | None = None,
        convert_weights: bool = False,
        init_cfg: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        allow_partial: bool = False,
        compile: bool | Mapping[str, Any] = False,
        img_size: int | Sequence[int] | None = None,
        output_missing_index_as_none: bool = False,
        return_stereo_feat: bool = False,
        **options: Any,
    ) -> None:
        if img_size is not None:
            options['img_size'] = img_size
        options, notes = translated({'arch': arch, **options}, self.network)
        allowed = self.option_names()
        unknown = {name: value for name, value in options.items() if name not in allowed}
        reject_unknown(unknown, allowed, why_unknown)
        if notes:
            lines = '\n  '.join(notes)
            said = f'{type(self).__name__} translated options of a config for another Swin:\n  {lines}'
            print_log(said, 'current', logging.WARNING)
        super().__init__(**_with_registered_layers(options))
        self.output_missing_index_as_none = checks.boolean('output_missing_index_as_none', output_missing_index_as_none)
        self.return_stereo_feat = checks.boolean('return_stereo_feat', return_stereo_feat)
        if return_stereo_feat:
            self.out_channels = (self.num_features[0], *self.out_channels)
            self.out_strides = (self.strides[0], *self.out_strides)
        if pretrained is not None:
            if not isinstance(pretrained, str):
                raise TypeError(f'pretrained must be a path or an address, got {pretrained!r}')
            if init_cfg:
                raise ValueError('pretrained and init_cfg both name a checkpoint; give only init_cfg')
            init_cfg = {'type': 'Pretrained', 'checkpoint': pretrained}
        for config in _listed(init_cfg):
            is_complete = isinstance(config, Mapping) and 'type' in config
            if not is_complete or (_is_pretrained(config) and 'checkpoint' not in config):
                raise TypeError(
                    f'init_cfg must be a dict with the key "type", or a list of them, got {init_cfg!r}; '
                    "for a checkpoint: dict(type='Pretrained', checkpoint=...)"
                )
            for key in config if _is_pretrained(config) else ():
                if key not in _PRETRAINED_KEYS:
                    raise TypeError(
                        f"init_cfg of the type 'Pretrained' has no key {key!r}"
                        f'{checks.closest(key, _PRETRAINED_KEYS)}; its keys are {list(_PRETRAINED_KEYS)}'
                    )
        self.init_cfg = copy.deepcopy(init_cfg)
        self.allow_partial = checks.boolean('allow_partial', allow_partial)
        if not isinstance(compile, (bool, Mapping)):
            raise TypeError(f'compile must be True, False or a dict of torch.compile options, got {compile!r}')
        if compile is not False:
            compile_options = {} if compile is True else compile
            self.compile(**compile_options)

    def init_weights(self) -> None:
        """Apply ``init_cfg``; without it, keep the official random initialisation."""
        configs = _listed(self.init_cfg)
        pretrained = [config for config in configs if _is_pretrained(config)]
        initialize(self, [config for config in configs if config not in pretrained])
        for config in pretrained:
            options = {key: config[key] for key in _LOAD_OPTIONS if key in config}
            options.setdefault('allow_partial', self.allow_partial)
            load_checkpoint(self, config['checkpoint'], **options, log=self.log_load)
        self.is_init = True

    def forward(self, img: Tensor) -> Any:
        """Compute the feature pyramid as :meth:`SwinBackbone.forward`, with the outputs that BEVDet's options add."""
        if not (self.output_missing_index_as_none or self.return_stereo_feat):
            return super().forward(img)
        outs = self.forward_stages(img)
        maps: Any = self.output_maps(outs)
        if self.output_missing_index_as_none:
            by_stage = dict(zip(self.out_indices, maps, strict=True))
            maps = tuple(map(by_stage.get, range(len(self.arch.depths))))
        if self.return_stereo_feat:
            maps = (to_maps(outs[0]), *maps)
        return maps

    def log_load(self, report: Report) -> None:
        """Write the report of a loaded checkpoint to the log of the run."""
        print_log(str(report), logger='current', level=report.level)


@MODELS.register_module()
class SwinDenseV2(SwinDense, SwinV2Backbone):
    """:class:`SwinV2Backbone` as an mmengine module, with the additional options of :class:`SwinDense`.

    Args:
        arch: see :class:`SwinBackbone`.
        window_size: see :class:`SwinV2Backbone`. A list of one window per stage marks a config of mmpretrain, as
            ``img_size`` does, by default 256 there.
        pretrained_window_sizes: mmpretrain's name for ``pretrained_window_size``.
        **options: options of :class:`SwinDense` and :class:`SwinV2Backbone`.

    Raises:
        ValueError: see :class:`SwinDense`.

    Examples:
        >>> backbone = SwinDenseV2(window_size=16, pretrained_window_size=8, out_indices=(2, 3))
        >>> backbone.out_strides
        (16, 32)
    """

    def __init__(
        self,
        arch: str | Mapping[str, Any] | Arch = 't',
        *,
        window_size: int | Sequence[int] = 8,
        pretrained_window_sizes: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        if pretrained_window_sizes is not None:
            if 'pretrained_window_size' in options:
                raise ValueError('pretrained_window_sizes and pretrained_window_size are the same option; give one')
            options['pretrained_window_size'] = pretrained_window_sizes
        if isinstance(window_size, Sequence) and len(window_size) > 2:
            options = {'img_size': 256, **options}  # mmpretrain's default
        super().__init__(arch, window_size=window_size, **options)


def _with_registered_layers(options: dict[str, Any]) -> dict[str, Any]:
    """Replace ``act_cfg`` and ``norm_cfg`` that name layers registered in mmengine by functions that build them."""
    for name, known, build in (('act_cfg', ACTIVATIONS, MODELS.build), ('norm_cfg', NORMS, _build_norm)):
        config = options.get(name)
        if isinstance(config, Mapping) and config.get('type') not in known and _registered(config.get('type')):
            options = {**options, name: functools.partial(build, dict(config))}
    return options


def _registered(kind: Any) -> Any:
    """Look up a name in the registry of the current scope and in its parents; return None if it is missing."""
    if not isinstance(kind, str):
        return kind
    with MODELS.switch_scope_and_registry(None) as registry:
        return registry.get(kind)


def _build_norm(config: dict[str, Any], channels: int) -> nn.Module:
    settings = {'eps': 1e-5, **config}  # the default of mmcv's build_norm_layer
    kind, requires_grad = _registered(settings.pop('type')), settings.pop('requires_grad', True)
    return kind(channels, **settings).requires_grad_(requires_grad)


def _listed(init_cfg: Any) -> list[Any]:
    return [init_cfg] if isinstance(init_cfg, (Mapping, str)) else list(init_cfg or [])


def _is_pretrained(config: Mapping[str, Any]) -> bool:
    return config['type'] in ('Pretrained', PretrainedInit)
