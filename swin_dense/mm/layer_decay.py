"""Layer-wise learning rate decay for mmdet and mmseg, whose own constructors do not support Swin."""

from __future__ import annotations

from typing import Any, cast

from mmengine.logging import print_log
from mmengine.optim import DefaultOptimWrapperConstructor
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from swin_dense.models.layer_ids import layer_of
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


class SwinLayerDecayConstructor(DefaultOptimWrapperConstructor):
    """Set the learning rate of each layer of a Swin backbone to ``decay_rate`` times that of the next layer.

    In a config, with the keys of the ``LearningRateDecayOptimizerConstructor`` of mmdet and mmseg::

        optim_wrapper = dict(
            constructor='SwinLayerDecayConstructor',
            paramwise_cfg=dict(decay_rate=0.9, decay_type='layer_wise'),
            optimizer=dict(type='AdamW', lr=1e-4, weight_decay=0.05),
        )

    Parameters outside of the backbone have the full learning rate. Biases, one-dimensional parameters and the
    parameters in ``no_weight_decay()`` of the backbone have no weight decay. Layers are counted as in
    :meth:`SwinBackbone.get_layer_depth`.

    Args:
        optim_wrapper_cfg: config of the optimiser wrapper; its ``optimizer`` needs an ``lr``.
        paramwise_cfg: ``decay_rate`` in (0, 1]; ``decay_type``, 'layer_wise' or 'stage_wise'; ``num_layers``, the
            number of blocks or stages, optional; and any key of mmengine's own constructor.

    Raises:
        ValueError: a value is not allowed, the model has no backbone of this package, or it is sharded by FSDPStrategy.
        TypeError: a key is unknown or missing, or a value has the wrong type.
    """

    def __init__(self, optim_wrapper_cfg: dict, paramwise_cfg: dict | None = None) -> None:
        settings: dict[str, Any] = dict(paramwise_cfg or {})
        known = (*_OWN_KEYS, *_MMENGINES_KEYS)
        for key in settings:
            if key not in known:
                raise TypeError(f'unknown key {key!r} in paramwise_cfg{checks.closest(key, known)}; keys are {known}')
        if 'decay_rate' not in settings:
            raise TypeError('paramwise_cfg needs decay_rate; published recipes use 0.75 to 0.95')
        self.decay_rate = checks.number('decay_rate', settings['decay_rate'])
        if not 0 < self.decay_rate <= 1:
            raise ValueError(f'decay_rate must be above 0 and at most 1, got {self.decay_rate}')
        self.decay_type = settings.get('decay_type', 'layer_wise')
        checks.one_of('decay_type', self.decay_type, _DECAY_TYPES)
        self.num_layers = settings.get('num_layers')
        super().__init__(optim_wrapper_cfg, settings)
        if self.base_lr is None:
            raise TypeError('optimizer needs lr, the learning rate of parameters outside of the backbone')

    def add_params(self, params: list, module: nn.Module, prefix: str = '', is_dcn_module: Any = None) -> None:
        """Add the parameters of a module and its children; for the whole model, group them by layer."""
        first = len(params)
        super().add_params(params, module, prefix, is_dcn_module)
        if not prefix:
            params[first:] = self._by_layer(params[first:], module)

    def _by_layer(self, groups: list[dict[str, Any]], model: nn.Module) -> list[dict[str, Any]]:
        """Scale groups of one parameter each by layer, and merge those with equal settings into one group."""
        backbones = {name: module for name, module in model.named_modules() if isinstance(module, SwinBackbone)}
        if not backbones:
            raise ValueError(
                f'SwinLayerDecayConstructor found no Swin of swin_dense in {type(model).__name__}; '
                "the backbone must have the type 'SwinDense' or 'SwinDenseV2'"
            )
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise ValueError(
                'SwinLayerDecayConstructor needs the shapes of parameters to choose those without weight decay, but '
                "FSDPStrategy has flattened them; use mmengine's own constructor, or DDPStrategy"
            )
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        scales = dict.fromkeys(names.values(), 1.0)
        undecayed: set[str] = set()
        for prefix, backbone in backbones.items():
            start = f'{prefix}.' if prefix else ''
            undecayed |= {start + name for name in backbone.no_weight_decay()}
            depths = backbone.arch.depths
            if self.decay_type == 'stage_wise':
                depths = (1,) * len(depths)
            layers = sum(depths)
            if self.num_layers not in (None, layers):
                raise ValueError(
                    f'num_layers={self.num_layers}, but with decay_type={self.decay_type!r} the backbone has {layers}; '
                    'leave num_layers out'
                )
            for name, _ in backbone.named_parameters():
                scales[start + name] = self.decay_rate ** (layers + 1 - layer_of(name, depths))
        merged: dict[tuple, dict[str, Any]] = {}
        for group in groups:
            (parameter,) = group.pop('params')
            name = names[id(parameter)]
            settings = {'lr_scale': scales[name], **group}
            settings['lr'] = scales[name] * cast('float', group.get('lr', self.base_lr))
            if self.base_wd is not None:
                is_undecayed = parameter.ndim == 1 or name.endswith('.bias') or name in undecayed
                settings['weight_decay'] = 0.0 if is_undecayed else group.get('weight_decay', self.base_wd)
            same = tuple(sorted(settings.items()))
            target = merged.setdefault(same, {**settings, 'params': [], 'param_names': []})
            target['params'].append(parameter)
            target['param_names'].append(name)
        for group in merged.values():
            rates = ', '.join(f'{key}={group[key]:.4g}' for key in ('lr', 'weight_decay') if key in group)
            print_log(f'{rates}: {", ".join(group["param_names"])}', logger='current')
        return list(merged.values())
