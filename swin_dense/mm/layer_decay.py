"""Layer-wise decay of the learning rate for the optimisers of mmdet and mmseg, whose own know no Swin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from swin_dense.models.layer_ids import layer_of, stage_of
from swin_dense.models.swin import SwinBackbone
from swin_dense.utils import checks

_DECAY_TYPES = ('layer_wise', 'stage_wise')
_OWN_KEYS = ('decay_rate', 'decay_type', 'num_layers')
_MMENGINES_KEYS = (
    'custom_keys',
    'bias_lr_mult',
    'bias_decay_mult',
    'norm_decay_mult',
    'dwconv_decay_mult',
    'flat_decay_mult',
    'dcn_offset_lr_mult',
    'bypass_duplicate',
)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class SwinLayerDecayConstructor(DefaultOptimWrapperConstructor):
    """Give every layer of a Swin backbone its own learning rate: ``decay_rate`` times that of the layer above.

    In a config, with the keys of mmdet's and mmseg's ``LearningRateDecayOptimizerConstructor``::

        optim_wrapper = dict(
            constructor='SwinLayerDecayConstructor',
            paramwise_cfg=dict(decay_rate=0.9, decay_type='layer_wise'),
            optimizer=dict(type='AdamW', lr=1e-4, weight_decay=0.05),
        )

    What lies outside of the backbone keeps the full rate. Weight decay spares biases, whatever has one dimension, and
    what ``no_weight_decay()`` of the backbone names. Layers are those of :meth:`SwinBackbone.get_layer_depth`.

    Args:
        optim_wrapper_cfg: of the optimiser wrapper; its ``optimizer`` needs an ``lr``.
        paramwise_cfg: ``decay_rate`` in (0, 1]; ``decay_type``, 'layer_wise' or 'stage_wise'; ``num_layers``, the
            number of blocks or stages, which needs not be given; and any key of mmengine's own constructor.

    Raises:
        ValueError: a value is not allowed, the model has no Swin backbone of ours, or it is sharded by FSDPStrategy.
        TypeError: a key is unknown or missing, or a value has the wrong type.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None) -> None:
        settings: dict[str, Any] = dict(paramwise_cfg or {})
        known = (*_OWN_KEYS, *_MMENGINES_KEYS)
        for key in settings:
            if key not in known:
                raise TypeError(f'unknown key {key!r} in paramwise_cfg{checks.closest(key, known)}; keys are {known}')
        if 'decay_rate' not in settings:
            raise TypeError('paramwise_cfg needs decay_rate; published recipes have 0.75 to 0.95')
        self.decay_rate = checks.number('decay_rate', settings['decay_rate'])
        if not 0 < self.decay_rate <= 1:
            raise ValueError(f'decay_rate must lie above 0 and be at most 1, got {self.decay_rate}')
        self.decay_type = settings.get('decay_type', 'layer_wise')
        checks.one_of('decay_type', self.decay_type, _DECAY_TYPES)
        self.num_layers = settings.get('num_layers')
        super().__init__(optim_wrapper_cfg, settings)
        if self.base_lr is None:
            raise TypeError('optimizer needs lr, the learning rate of what lies outside of the backbone')

    def add_params(self, params: list, module: nn.Module, prefix: str = '', is_dcn_module: Any = None) -> None:
        """Add the parameters of a module and what it contains; of the model itself, by layers."""
        first = len(params)
        super().add_params(params, module, prefix, is_dcn_module)
        if not prefix:
            params[first:] = self._by_layer(params[first:], module)

    def _by_layer(self, groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
        """Return groups of one parameter each, scaled by layer, as one group per layer and setting."""
        backbones = {name: module for name, module in model.named_modules() if isinstance(module, SwinBackbone)}
        if not backbones:
            raise ValueError(
                f'SwinLayerDecayConstructor found no Swin of swin_dense in {type(model).__name__}; '
                "the backbone must be of type 'SwinDense' or 'SwinDenseV2'"
            )
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise ValueError(
                'SwinLayerDecayConstructor spares from weight decay what has one dimension, and FSDPStrategy has made '
                "all parameters flat; take mmengine's own constructor, or DDPStrategy"
            )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        scales, spared = self._scales_of(backbones, names.values())
        merged: dict[tuple, dict[str, Any]] = {}
        for group in groups:
            (parameter,) = group.pop('params')
            name = names[id(parameter)]
            settings = {'lr_scale': scales[name], **group}
            settings['lr'] = scales[name] * cast('float', group.get('lr', self.base_lr))
            if self.base_wd is not None:
                is_spared = parameter.ndim == 1 or name.endswith('.bias') or name in spared
                settings['weight_decay'] = 0.0 if is_spared else group.get('weight_decay', self.base_wd)
            merged.setdefault(tuple(sorted(settings.items())), {**settings, 'params': [], 'param_names': []})
            kept = merged[tuple(sorted(settings.items()))]
            kept['params'].append(parameter)
            kept['param_names'].append(name)
        for kept in merged.values():
            said = ', '.join(f'{key}={kept[key]:.4g}' for key in ('lr', 'weight_decay') if key in kept)
            print_log(f'{said}: {", ".join(kept["param_names"])}', logger='current')
        return list(merged.values())

    def _scales_of(self, backbones: Mapping[str, SwinBackbone], names: Any) -> tuple[dict[str, float], set[str]]:
        """Return the factor on the rate by parameter, and the parameters that weight decay spares."""
        scales: dict[str, float] = dict.fromkeys(names, 1.0)
        spared: set[str] = set()
        for prefix, backbone in backbones.items():
            start = f'{prefix}.' if prefix else ''
            spared |= {start + name for name in backbone.no_weight_decay()}
            depths = backbone.arch.depths
            layers = sum(depths) if self.decay_type == 'layer_wise' else len(depths)
            if self.num_layers not in (None, layers):
                raise ValueError(
                    f'num_layers={self.num_layers}, but {self.decay_type} the backbone has {layers}; '
                    'leave num_layers out'
                )
            for name, _ in backbone.named_parameters():
                layer = layer_of(name, depths) if self.decay_type == 'layer_wise' else stage_of(name, layers)
                scales[start + name] = self.decay_rate ** (layers + 1 - layer)
        return scales, spared
