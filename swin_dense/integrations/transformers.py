"""A Swin backbone for models of transformers.

UperNetForSemanticSegmentation(UperNetConfig(backbone_config=SwinDenseConfig('swin_t'), num_labels=2))
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from swin_dense.archs import split_name
from swin_dense.archs.weights import place_of, published
from swin_dense.checkpoint import load_checkpoint
from swin_dense.checkpoint.fit import Target
from swin_dense.checkpoint.load import find_backbone, load_found
from swin_dense.integrations import require, set_checkpointing
from swin_dense.models.create import BACKBONES, options_for
from swin_dense.models.swin import SwinBackbone, initialise
from swin_dense.ops import plain
from swin_dense.utils import checks

require('transformers', '5.23.0')
from transformers import (  # noqa: E402
    AutoBackbone,
    AutoConfig,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    SwinConfig,
)
from transformers.backbone_utils import BackboneConfigMixin, BackboneMixin  # noqa: E402
from transformers.modeling_outputs import BackboneOutput  # noqa: E402

ACTIVATIONS = {'gelu': 'GELU', 'relu': 'ReLU', 'silu': 'SiLU', 'swish': 'SiLU'}
# Arguments of from_pretrained that locate the config.
HUB_ARGUMENTS = {'cache_dir', 'force_download', 'local_files_only', 'revision', 'subfolder', 'token'}
# Further arguments of PreTrainedConfig, which are no fields of it.
CONFIG_ARGUMENTS = {
    'attn_implementation',
    'experts_implementation',
    'name_or_path',
    'num_labels',
    'output_attentions',
    'per_layer_config',
    'torch_dtype',
}
# The options of both backbones.
OPTIONS = {
    parameter.name
    for kind in BACKBONES.values()
    for parameter in inspect.signature(kind).parameters.values()
    if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != 'out_indices'
}


class SwinDenseConfig(BackboneConfigMixin, PreTrainedConfig):
    """The config of a Swin, for ``backbone_config`` of transformers' models.

    Args:
        arch: a name such as 'swin_t' or 'swinv2_t', or a dict with ``embed_dims``, ``depths`` and ``num_heads``.
        options: options of :class:`swin_dense.SwinBackbone` or :class:`swin_dense.SwinV2Backbone` by name. They can
            also be passed as keyword arguments.
        out_features: names of the stages to return, 'stage1' to 'stage4'; None for all.
        out_indices: indices of the stages, 1 to 4, instead of names. 0 is the stem, which cannot be returned.
        **kwargs: options of the backbone and arguments of ``PreTrainedConfig``.

    Raises:
        TypeError: an argument is neither an option nor an argument of ``PreTrainedConfig``, or contradicts the options.
        ValueError: the stem is among the outputs.
    """

    model_type = 'swin_dense'

    def __init__(
        self,
        arch: str | Mapping[str, Any] = 'swin_t',
        options: Mapping[str, Any] | None = None,
        out_features: list[str] | None = None,
        out_indices: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        self.arch = arch
        own = {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()}
        self.options = {**(options or {}), **own}
        # The attributes that transformers' models read from a config, taken from a backbone on meta.
        with torch.device('meta'):
            backbone = self._build(None)
        stages = len(backbone.arch.depths)
        derived = {
            'num_channels': backbone.in_channels,
            'hidden_size': backbone.arch.channels[-1],
            'stage_names': ['stem', *(f'stage{stage}' for stage in range(1, stages + 1))],
        }
        for name, value in kwargs.items():
            if name in derived and value != derived[name]:
                raise TypeError(
                    f'{name} follows from the options of the backbone and must be {derived[name]}, got {value!r}'
                )
            known = {*derived, *CONFIG_ARGUMENTS, *(field.name for field in fields(PreTrainedConfig))}
            if name not in known and not hasattr(PreTrainedConfig, name) and not name.startswith('_'):
                raise TypeError(
                    f'unknown option {name!r} of a Swin{checks.closest(name, OPTIONS)}; SwinDenseConfig.of_swin '
                    'converts a SwinConfig, which has other names'
                )
        super().__init__(**{name: value for name, value in kwargs.items() if name not in derived})
        for name, value in derived.items():
            setattr(self, name, value)
        self.set_output_features_output_indices(
            out_features=out_features or (None if out_indices else self.stage_names[1:]), out_indices=out_indices
        )
        if 'stem' in self.out_features:
            raise ValueError(f'out_features must be among {self.stage_names[1:]}: the stem is not returned')

    def build(self) -> SwinBackbone:
        """Return a backbone with these options and random weights."""
        return self._build([index - 1 for index in self.out_indices])

    def _build(self, stages: list[int] | None) -> SwinBackbone:
        network = (split_name(self.arch)[0] if isinstance(self.arch, str) else None) or 'swin'
        return BACKBONES[network](self.arch, out_indices=stages, **self.options)

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Any:
        """Return the config saved as a dict. ``kwargs`` may also override options of the backbone."""
        own = {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()}
        if 'window_size' in own and 'pretrained_window_size' not in own:
            with torch.device('meta'):
                own.update(cls(**config_dict)._build(None)._kept_by_other_windows())
        return super().from_dict({**config_dict, **own}, **kwargs)

    @classmethod
    def of_swin(cls, config: PreTrainedConfig, **kwargs: Any) -> SwinDenseConfig:
        """Return the config that corresponds to a SwinConfig of transformers, with ``kwargs`` that override it."""
        if config.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f'the activation {config.hidden_act!r} is not supported; it must be one of {list(ACTIVATIONS)}'
            )
        options = {
            'pretrain_img_size': config.image_size,
            'patch_size': config.patch_size,
            'in_channels': config.num_channels,
            'window_size': config.window_size,
            'mlp_ratio': config.mlp_ratio,
            'qkv_bias': config.qkv_bias,
            'drop_rate': config.hidden_dropout_prob,
            'attn_drop_rate': config.attention_probs_dropout_prob,
            'drop_path_rate': config.drop_path_rate,
            'use_abs_pos_embed': config.use_absolute_embeddings,
            'act_cfg': {'type': ACTIVATIONS[config.hidden_act]},
            'norm_cfg': {'type': 'LN', 'eps': config.layer_norm_eps},
        }
        arch = {'embed_dims': config.embed_dim, 'depths': list(config.depths), 'num_heads': list(config.num_heads)}
        if kwargs.keys().isdisjoint(('out_features', 'out_indices')):
            kwargs['out_features'] = config.out_features
        return cls(arch, options, **kwargs)


class SwinDenseBackbone(BackboneMixin, PreTrainedModel):
    """A backbone for transformers' models, created by ``backbone_config=SwinDenseConfig(...)``.

    Args:
        config: the options.

    Attributes:
        backbone: the :class:`swin_dense.SwinBackbone`. Load other checkpoints with
            ``swin_dense.load_checkpoint(model.backbone, ...)``.
    """

    config_class = SwinDenseConfig
    main_input_name = 'pixel_values'
    supports_gradient_checkpointing = True
    has_attentions = False
    _no_split_modules: ClassVar[list[str]] = ['SwinStage']

    def __init__(self, config: SwinDenseConfig) -> None:
        super().__init__(config)
        self.backbone = config.build()
        channels = self.backbone.arch.channels
        self.num_features = [channels[0], *channels]
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the parameters of one module. transformers calls it for parameters missing in a checkpoint."""
        initialise(module)
        if isinstance(module, SwinBackbone) and module.absolute_pos_embed is not None:
            nn.init.trunc_normal_(module.absolute_pos_embed, std=0.02)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        set_checkpointing(self.backbone, enable)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *args: Any,
        config: Any = None,
        prefix: str | None = None,
        **kwargs: Any,
    ) -> SwinDenseBackbone:
        """Load a model saved with ``save_pretrained``, or a Swin of transformers, from a folder or the Hub.

        Args:
            pretrained_model_name_or_path: the folder, the name on the Hub, or the name of published weights, such as
                'swin_t.in1k', for which ``kwargs`` are arguments of :class:`SwinDenseConfig`.
            *args: see ``PreTrainedModel.from_pretrained``.
            config: a config to use instead of the saved one.
            prefix: which backbone, if the weights of a Swin of transformers contain several.
            **kwargs: options that override the saved ones, and arguments of ``PreTrainedModel.from_pretrained``. For a
                Swin of transformers, ``revision`` is the only such argument.

        Raises:
            TypeError: an unsupported argument is given for a Swin of transformers, or ``prefix`` for another model.
        """
        name = str(pretrained_model_name_or_path)
        if config is None and place_of(name) != name:
            own = {option: kwargs.pop(option) for option in OPTIONS & kwargs.keys()}
            weights = find_backbone(name, prefix)
            _, options = options_for(weights, published()[name].arch, own)
            options.pop('out_indices', None)
            model = cls(SwinDenseConfig(**options, **kwargs))
            load_found(Target.of(model.backbone), weights)
            return model.eval()
        if config is None:
            hub_arguments = {name: kwargs[name] for name in HUB_ARGUMENTS & kwargs.keys()}
            found = AutoConfig.from_pretrained(pretrained_model_name_or_path, **hub_arguments)
            if isinstance(found, SwinConfig):
                revision = kwargs.pop('revision', None)
                if args or (unknown := kwargs.keys() - OPTIONS - {'out_features', 'out_indices'}):
                    raise TypeError(
                        f'{", ".join(sorted(unknown)) if not args else "positional arguments"}: a Swin of transformers '
                        'takes only options of the backbone and a revision; to change its dtype or device, call '
                        '.to(...) afterwards'
                    )
                model = cls(SwinDenseConfig.of_swin(found, **kwargs))
                if not os.path.isdir(name):
                    name = f'hf://{name}' + ('' if revision is None else f'@{revision}')
                load_checkpoint(model.backbone, name, prefix=prefix)
                return model.eval()
        if prefix is not None:
            raise TypeError('prefix chooses a backbone in weights of a Swin of transformers only')
        return super().from_pretrained(pretrained_model_name_or_path, *args, config=config, **kwargs)

    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> BackboneOutput | tuple[Any, ...]:
        """Return the maps (B, C_i, ceil(H / stride_i), ceil(W / stride_i)) for images (B, num_channels, H, W).

        Hidden states are the maps of the stages before their norms, (B, C, H, W). Attention weights cannot be
        returned, because they are not materialised.
        """
        if output_attentions:
            raise ValueError('output_attentions cannot be True: attention weights are not materialised')
        states = None
        if output_hidden_states:
            maps, stages = self.backbone(pixel_values, return_stages=True)
            states = tuple(plain.to_maps(out) for out, _ in stages)
        else:
            maps = self.backbone(pixel_values)
        output = BackboneOutput(feature_maps=maps, hidden_states=states, attentions=None)
        return output.to_tuple() if return_dict is False else output


AutoConfig.register(SwinDenseConfig.model_type, SwinDenseConfig)
AutoBackbone.register(SwinDenseConfig, SwinDenseBackbone)
AutoModel.register(SwinDenseConfig, SwinDenseBackbone)
