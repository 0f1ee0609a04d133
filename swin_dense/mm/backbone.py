"""SwinDense and SwinDenseV2: the backbones registered for mmengine, where every child registry finds them."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mmengine.logging import print_log
from mmengine.model import BaseModule, PretrainedInit, initialize
from mmengine.registry import MODELS
from torch import nn

from swin_dense.checkpoint import Report, load_checkpoint
from swin_dense.mm.resume import allow_training_checkpoints
from swin_dense.models.archs import Arch, resolve_arch
from swin_dense.models.layers import ACTIVATIONS, NORMS
from swin_dense.models.swin import SwinBackbone
from swin_dense.models.swin_v2 import SwinV2Backbone
from swin_dense.utils import checks

allow_training_checkpoints()

# What an init_cfg of the type 'Pretrained' may say beside it: what load_checkpoint takes, and mmengine's map_location,
# which changes nothing, as weights are read on the CPU and copied to where the backbone is.
_LOAD_OPTIONS = tuple(
    name for name in inspect.signature(load_checkpoint).parameters if name not in ('backbone', 'source', 'log')
)
_PRETRAINED_KEYS = ('type', 'checkpoint', 'map_location', *_LOAD_OPTIONS)


@MODELS.register_module()
class SwinDense(SwinBackbone, BaseModule):
    """:class:`SwinBackbone` as an mmengine module.

    Takes the keyword arguments of the ``SwinTransformer`` of mmdet and mmsegmentation, with their meaning.

    Args:
        arch: see :class:`SwinBackbone`.
        pretrained: checkpoint to start from, the older way to say ``init_cfg``.
        convert_weights: accepted so that existing configs build; has no effect, as the layout of a checkpoint is
            detected.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` loads a checkpoint and raises where the backbone's
            parameters do not arrive. It takes the options of :func:`swin_dense.load_checkpoint` too: ``prefix``,
            ``ema``, ``allow_partial``, ``table_resize``, ``in_channels`` and so on. Any other mmengine initialiser
            works as in every mmengine module.
        allow_partial: let ``init_cfg``, ``load_from`` and ``load_state_dict`` leave parameters of the backbone as they
            are, some or all: for files that hold half a backbone, or a head alone.
        compile: put the backbone alone through ``torch.compile``, True or a dict with its options. mmengine's own
            ``compile=True`` compiles whole training steps, in which torch cannot follow every optimiser and head.
        img_size: mmpretrain's name of ``pretrain_img_size``, by which its configs, of classifiers, are known: where it
            is given, ``out_indices`` is the last stage and ``clamp_window`` True, unless they are given too.
        **options: options of :class:`SwinBackbone`, which refuses any other. ``act_cfg`` and ``norm_cfg`` may also name
            what is registered in mmengine.

    Raises:
        ValueError: both ``pretrained`` and ``init_cfg`` are given, or see :class:`SwinBackbone`.
        TypeError: ``pretrained`` or ``init_cfg`` is of another form, ``init_cfg`` has a key that nothing reads, or see
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
        **options: Any,
    ) -> None:
        if img_size is not None:
            if 'pretrain_img_size' in options:
                raise ValueError('img_size and pretrain_img_size are two ways to say the same; give one')
            depths = options.get('depths') or resolve_arch(arch, self._prefix).depths
            options = {
                'out_indices': (len(depths) - 1,),
                'clamp_window': True,
                **options,
                'pretrain_img_size': img_size,
            }
        super().__init__(arch, **_with_registered_layers(options))
        if pretrained is not None:
            if not isinstance(pretrained, str):
                raise TypeError(f'pretrained must be a path or an address, got {pretrained!r}')
            if init_cfg:
                raise ValueError('pretrained and init_cfg are two ways to say the same; give only init_cfg')
            init_cfg = {'type': 'Pretrained', 'checkpoint': pretrained}
        for config in _listed(init_cfg):
            is_complete = isinstance(config, Mapping) and 'type' in config
            if not is_complete or (_is_pretrained(config) and 'checkpoint' not in config):
                raise TypeError(
                    f'init_cfg must be a dict with the key "type", or a list of them, got {init_cfg!r}; '
                    "for a checkpoint: dict(type='Pretrained', checkpoint=...)"
                )
            if _is_pretrained(config):
                _refuse_unknown(config)
        self.init_cfg = copy.deepcopy(init_cfg)
        self.allow_partial = checks.boolean('allow_partial', allow_partial)
        if not isinstance(compile, (bool, Mapping)):
            raise TypeError(f'compile must be True, False or a dict of options of torch.compile, got {compile!r}')
        if compile is not False:
            self.compile(**({} if compile is True else compile))

    def init_weights(self) -> None:
        """Initialise as ``init_cfg`` says; without one, keep the official random initialisation."""
        configs = _listed(self.init_cfg)
        pretrained = [config for config in configs if _is_pretrained(config)]
        initialize(self, [config for config in configs if config not in pretrained])
        for config in pretrained:
            options = {key: config[key] for key in _LOAD_OPTIONS if key in config}
            options.setdefault('allow_partial', self.allow_partial)
            load_checkpoint(self, config['checkpoint'], **options, log=self.log_load)
        self.is_init = True

    def log_load(self, report: Report) -> None:
        """Put what a load did into the log of the run."""
        print_log(str(report), logger='current', level=report.level)


@MODELS.register_module()
class SwinDenseV2(SwinDense, SwinV2Backbone):
    """:class:`SwinV2Backbone` as an mmengine module; takes its options and those that :class:`SwinDense` adds.

    Args:
        arch: see :class:`SwinBackbone`.
        window_size: see :class:`SwinV2Backbone`. Beside ``img_size`` it may be mmpretrain's list of the windows per
            stage, which says how the largest shrinks to the maps of such an image; ``clamp_window`` does that.
        pretrained_window_sizes: mmpretrain's name of ``pretrained_window_size``.
        **options: of :class:`SwinDense` and :class:`SwinV2Backbone`.

    Raises:
        ValueError: a list of windows is not how the largest one shrinks, or see :class:`SwinDense`.

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
                raise ValueError('pretrained_window_sizes and pretrained_window_size say the same; give one')
            options['pretrained_window_size'] = pretrained_window_sizes
        if options.get('img_size') is not None and isinstance(window_size, Sequence) and len(window_size) > 2:
            window_size = _before_clamping(window_size, options['img_size'], options.get('patch_size', 4))
        super().__init__(arch, window_size=window_size, **options)


def _before_clamping(windows: Sequence[int], img_size: int | Sequence[int], patch_size: int) -> int:
    """Return the window that clamping to the maps of an image turns into these, stage by stage."""
    windows = checks.integers('window_size', windows)
    side = min(checks.pair('img_size', img_size)) // patch_size
    clamped = tuple(min(max(windows), side // 2**stage) for stage in range(len(windows)))
    if windows != clamped:
        raise ValueError(
            f'window_size={list(windows)}: a window of {max(windows)} shrinks to {list(clamped)} at '
            f'img_size={img_size}, and other windows per stage do not exist here; give one window_size'
        )
    return max(windows)


def _with_registered_layers(options: dict[str, Any]) -> dict[str, Any]:
    """Return options in which activations and norms that users registered in mmengine are built by its registry."""
    for name, known, build in (('act_cfg', ACTIVATIONS, _build_activation), ('norm_cfg', NORMS, _build_norm)):
        config = options.get(name)
        if isinstance(config, Mapping) and config.get('type') not in known and _registered(config.get('type')):
            options = {**options, name: functools.partial(build, dict(config))}
    return options


def _registered(kind: Any) -> Any:
    """Return what the registry of the framework in use, or one of its parents, has under a name, or None."""
    if not isinstance(kind, str):
        return kind
    with MODELS.switch_scope_and_registry(None) as registry:
        return registry.get(kind)


def _build_activation(config: dict[str, Any]) -> nn.Module:
    settings = dict(config)
    return _registered(settings.pop('type'))(**settings)


def _build_norm(config: dict[str, Any], channels: int) -> nn.Module:
    settings = {'eps': 1e-5, **config}  # as mmcv's build_norm_layer has it
    kind, requires_grad = _registered(settings.pop('type')), settings.pop('requires_grad', True)
    return kind(channels, **settings).requires_grad_(requires_grad)


def _listed(init_cfg: Any) -> list[Any]:
    return [init_cfg] if isinstance(init_cfg, (Mapping, str)) else list(init_cfg or [])


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    for key in config:
        if key not in _PRETRAINED_KEYS:
            raise TypeError(
                f"init_cfg of the type 'Pretrained' has no key {key!r}{checks.closest(key, _PRETRAINED_KEYS)}; "
                f'its keys are {list(_PRETRAINED_KEYS)}'
            )


def _is_pretrained(config: Mapping[str, Any]) -> bool:
    return config['type'] in ('Pretrained', PretrainedInit)
