"""A Swin backbone for models of transformers, and a function that replaces the Swin inside an existing model.

UperNetForSemanticSegmentation(UperNetConfig(backbone_config=SwinDenseConfig('swin_t'), num_labels=2))
print(replace_swin(Mask2FormerForUniversalSegmentation.from_pretrained(...)))
"""

from __future__ import annotations

import inspect
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from swin_dense.checkpoint import load_checkpoint
from swin_dense.checkpoint.export import export_parameters
from swin_dense.checkpoint.families import plain_name
from swin_dense.checkpoint.find import find
from swin_dense.checkpoint.fit import Target, is_standard
from swin_dense.integrations import require, run_stages, set_checkpointing
from swin_dense.models.archs import split_name
from swin_dense.models.create import BACKBONES
from swin_dense.models.swin import SwinBackbone
from swin_dense.utils import compat

require('transformers', '5.23.0', 'transformers')
import transformers  # noqa: E402
from transformers import (  # noqa: E402
    AutoBackbone,
    AutoConfig,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    SwinConfig,
    SwinModel,
)
from transformers.backbone_utils import BackboneConfigMixin, BackboneMixin  # noqa: E402
from transformers.modeling_outputs import BackboneOutput  # noqa: E402
from transformers.models.maskformer.modeling_maskformer_swin import (  # noqa: E402
    MaskFormerSwinBaseModelOutput,
    MaskFormerSwinModel,
)
from transformers.models.swin import modeling_swin  # noqa: E402

_logger = logging.getLogger(__name__)
ACTIVATIONS = {'gelu': 'GELU', 'relu': 'ReLU', 'silu': 'SiLU', 'swish': 'SiLU'}
# Arguments of from_pretrained that locate the config.
HUB_ARGUMENTS = {'cache_dir', 'force_download', 'local_files_only', 'revision', 'subfolder', 'token'}
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
        TypeError: an argument is unknown but similar to an option, or contradicts the options of the backbone.
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
        derived = self._derived()
        for name, value in kwargs.items():
            if name in derived and value != derived[name]:
                raise TypeError(
                    f'{name} follows from the options of the backbone and must be {derived[name]}, got {value!r}'
                )
            is_known = name in derived or hasattr(PreTrainedConfig, name)
            if not is_known and (meant := get_close_matches(name, OPTIONS, 1, 0.8)):
                raise TypeError(f'unknown option {name!r} of a Swin; did you mean {meant[0]!r}?')
        super().__init__(**{name: value for name, value in kwargs.items() if name not in derived})
        for name, value in derived.items():
            setattr(self, name, value)
        self.set_output_features_output_indices(
            out_features=out_features or (None if out_indices else self.stage_names[1:]), out_indices=out_indices
        )
        if 'stem' in self.out_features:
            raise ValueError(f'out_features must be among {self.stage_names[1:]}: the stem is not returned')

    def _derived(self) -> dict[str, Any]:
        """Return the attributes that transformers' models read from a config, taken from a backbone on meta."""
        with torch.device('meta'):
            backbone = self._build(None)
        stages = len(backbone.arch.depths)
        return {
            'num_channels': backbone.in_channels,
            'hidden_size': backbone.arch.channels[-1],
            'stage_names': ['stem', *(f'stage{stage}' for stage in range(1, stages + 1))],
        }

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
        return super().from_dict({**config_dict, **own}, **kwargs)

    @classmethod
    def of_swin(cls, config: PreTrainedConfig, **kwargs: Any) -> SwinDenseConfig:
        """Return the config that corresponds to a SwinConfig of transformers.

        Args:
            config: the config of transformers' Swin.
            **kwargs: arguments that override it.

        Raises:
            ValueError: the activation is not supported.
        """
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
        outputs = {'out_features': config.out_features} if 'out_features' not in kwargs | {'out_indices': 0} else {}
        return cls(arch, options, **outputs, **kwargs)


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
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, (nn.Conv2d, nn.LayerNorm)):
            module.reset_parameters()
        elif hasattr(module, 'reset_position'):
            module.reset_position()
        elif isinstance(module, SwinBackbone) and module.absolute_pos_embed is not None:
            nn.init.trunc_normal_(module.absolute_pos_embed, std=0.02)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        set_checkpointing(self.backbone, enable)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, config: Any = None, **kwargs: Any
    ) -> SwinDenseBackbone:
        """Load a model saved with ``save_pretrained``, or a Swin of transformers, from a folder or the Hub.

        Args:
            pretrained_model_name_or_path: the folder or the name on the Hub.
            *args: see ``PreTrainedModel.from_pretrained``.
            config: a config to use instead of the saved one.
            **kwargs: options that override the saved ones, and arguments of ``PreTrainedModel.from_pretrained``. For a
                Swin of transformers, ``revision`` is the only such argument.

        Raises:
            TypeError: an unsupported argument is given for a Swin of transformers.
        """
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
                load_checkpoint(model.backbone, _source_of(pretrained_model_name_or_path, revision))
                return model.eval()
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
        _refuse_attentions(output_attentions)
        stages = range(len(self.backbone.stages)) if output_hidden_states else ()
        maps, states = run_stages(self.backbone, pixel_values, stages)
        output = BackboneOutput(feature_maps=maps, hidden_states=states or None, attentions=None)
        return output.to_tuple() if return_dict is False else output


class SwinDenseEncoder(nn.Module):
    """A replacement for the encoder of transformers' SwinModel that uses our stages. Embeddings and norms stay.

    State dicts keep the parameter names and layouts of transformers, so that checkpoints are interchangeable with the
    original model.

    Args:
        backbone: the backbone that provides the stages.
        theirs: the state dict of the replaced encoder.
    """

    # transformers' encoder needs this argument for maps smaller than a window; its SwinBackbone always passes it.
    any_size: ClassVar[dict[str, Any]] = {'always_partition': True}

    def __init__(self, backbone: SwinBackbone, theirs: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.stages = backbone.stages
        self._target = Target.of(backbone)
        self._theirs = {plain_name(f'swin.encoder.{key}'): key for key in theirs}
        self._indices = {key: tensor for key, tensor in theirs.items() if key.endswith('relative_position_index')}
        self._register_state_dict_hook(_write_as_theirs)
        compat.register_load_state_dict_pre_hook(self, _read_theirs)

    @property
    def gradient_checkpointing(self) -> bool:
        """Whether gradient checkpointing is enabled. transformers sets this attribute."""
        return any(getattr(module, 'with_cp', False) for module in self.stages.modules())

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        set_checkpointing(self.stages, enable)

    def _run(self, tokens: Tensor, size: tuple[int, int], clamp: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each stage its map, (B, H, W, C), and the output of its patch merging."""
        for module in self.stages.modules():
            if hasattr(module, 'clamp_window'):
                module.clamp_window = clamp
        x = tokens.unflatten(1, size)
        for stage in self.stages:
            before = stage(x)
            x = before if stage.downsample is None else stage.downsample(before)
            yield before, x

    def forward(
        self,
        hidden_states: Tensor,
        input_dimensions: tuple[int, int],
        always_partition: bool = False,
        output_hidden_states: bool = False,
        output_hidden_states_before_downsampling: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Return the output of transformers' SwinEncoder for tokens (B, H * W, C) of an H x W map."""
        _refuse_attentions(output_attentions)
        maps = [(hidden_states.unflatten(1, input_dimensions),) * 2]
        maps += self._run(hidden_states, input_dimensions, clamp=not always_partition)
        reshaped = [before if output_hidden_states_before_downsampling else after for before, after in maps]
        return modeling_swin.SwinEncoderOutput(
            last_hidden_state=maps[-1][1].flatten(1, 2),
            hidden_states=tuple(after.flatten(1, 2) for _, after in maps) if output_hidden_states else None,
            reshaped_hidden_states=tuple(_to_maps(x) for x in reshaped) if output_hidden_states else None,
        )


class MaskFormerEncoder(SwinDenseEncoder):
    """A replacement for the encoder of MaskFormer's copy of SwinModel."""

    any_size: ClassVar[dict[str, Any]] = {}

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        input_dimensions: tuple[int, int],
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> Any:
        """Return the output of MaskFormerSwinEncoder with one hidden state per stage, the only one MaskFormer reads."""
        _refuse_attentions(output_attentions)
        maps = list(self._run(hidden_states, input_dimensions, clamp=False))
        output = MaskFormerSwinBaseModelOutput(
            last_hidden_state=maps[-1][1].flatten(1, 2),
            hidden_states=(hidden_states, *((before.flatten(1, 2),) for before, _ in maps)),
            hidden_states_spatial_dimensions=tuple(after.shape[1:3] for _, after in maps),
        )
        return output if return_dict else output.to_tuple()


def _write_as_theirs(
    encoder: SwinDenseEncoder, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any]
) -> None:
    """Convert an encoder's state dict to transformers' names, unless it contains adapters or quantised weights."""
    own = {key.removeprefix(prefix): tensor for key, tensor in state_dict.items() if key.startswith(prefix)}
    if not all(is_standard(key) and type(tensor) in (Tensor, nn.Parameter) for key, tensor in own.items()):
        return
    for key in own:
        del state_dict[prefix + key]
    exported = export_parameters(own, 'transformers', encoder._target)
    state_dict.update({prefix + encoder._theirs[plain_name(key)]: tensor for key, tensor in exported.items()})
    state_dict.update({prefix + key: tensor for key, tensor in encoder._indices.items()})


def _read_theirs(encoder: SwinDenseEncoder, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Convert entries with transformers' names to our names, before ``load_state_dict`` reads them."""
    given = {key: tensor for key, tensor in state_dict.items() if key.startswith(f'{prefix}layers.')}
    if not given:
        return
    found = find({f'encoder.{key.removeprefix(prefix)}': tensor for key, tensor in given.items()}, 'the file')
    for key in given:
        del state_dict[key]
    state_dict.update({prefix + name: tensor for name, tensor in found.parameters.items()})


ENCODERS = {SwinModel: SwinDenseEncoder, MaskFormerSwinModel: MaskFormerEncoder}


@dataclass
class Replacement:
    """Time and memory of one replaced Swin, before and after.

    Attributes:
        name: name of the module in the model, '' for the model itself.
        kind: name of its class.
        image_size: (height, width) of the image for the measurement, in pixels.
        seconds: time of one call, before and after.
        peak_bytes: peak of memory allocated by one call, before and after.
    """

    name: str
    kind: str
    image_size: tuple[int, int]
    seconds: tuple[float, float]
    peak_bytes: tuple[int, int]

    def __str__(self) -> str:
        (slow, fast), (much, little) = self.seconds, self.peak_bytes
        return (
            f'{self.name or "the model"} ({self.kind}) on {self.image_size[0]} x {self.image_size[1]} pixels: '
            f'{1000 * slow:.0f} ms before, {1000 * fast:.0f} ms after ({fast / slow - 1:+.0%}); '
            f'{much / 2**20:.0f} MiB before, {little / 2**20:.0f} MiB after ({little / much - 1:+.0%})'
        )


@dataclass
class Replacements:
    """The result of :func:`replace_swin`. ``str`` formats it as text."""

    items: list[Replacement]

    def __str__(self) -> str:
        return '\n'.join(map(str, self.items))


def replace_swin(model: nn.Module, image_size: tuple[int, int] = (512, 512)) -> Replacements:
    """Replace the encoder of each Swin in a model of transformers by our stages with the same weights, in place.

    Outputs stay equal up to rounding; attention weights can no longer be returned. Afterwards, ``named_parameters``
    returns our names for the encoders, while state dicts and files keep the names of transformers.

    Args:
        model: a SwinModel, MaskFormer's copy of it, or a model that contains one of these.
        image_size: (height, width) in pixels of the random image on which time and memory are measured. The model runs
            in its current mode; in training mode, the backward pass is included.

    Returns:
        The replaced modules, with time and memory before and after.

    Raises:
        ValueError: the model contains no supported Swin, or is configured to return attention weights.
        RuntimeError: our stages give other outputs than those of the installed transformers. The model is unchanged.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module) in ENCODERS]
    if not found:
        kinds = ' or '.join(kind.__name__ for kind in ENCODERS)
        raise ValueError(f'{type(model).__name__} contains no {kinds} of transformers, so there is nothing to replace')
    encoders = []
    for _, swin in found:
        _refuse_attentions(swin.config.output_attentions)
        encoders.append(_our_encoder(swin))
        _check_agreement(encoders[-1], swin, image_size)
    items = []
    for (name, swin), ours in zip(found, encoders, strict=True):
        before = _measure(swin, image_size)
        theirs, swin.encoder = swin.encoder, ours
        try:
            after = _measure(swin, image_size)
        except BaseException:
            swin.encoder = theirs
            raise
        items.append(Replacement(name, type(swin).__name__, image_size, *zip(before, after, strict=True)))  # type: ignore[arg-type]
    report = Replacements(items)
    _logger.info(str(report))
    return report


def _our_encoder(swin: nn.Module) -> SwinDenseEncoder:
    """Return our stages with the weights of a SwinModel."""
    config = SwinDenseConfig.of_swin(swin.config, out_features=None)
    weight = next(swin.encoder.parameters())
    backbone = config.build().to(weight.dtype)
    # Convert requires_grad like the values: load tensors of ones or zeros. Our joined qkv is trained if any of q, k
    # and v is.
    trained = {key: torch.full(x.shape, float(x.requires_grad)) for key, x in swin.state_dict(keep_vars=True).items()}
    load_checkpoint(backbone, trained, log=None)
    for parameter in backbone.parameters():
        parameter.requires_grad_(bool(parameter.any()))
    load_checkpoint(backbone, swin.state_dict(), log=None)
    encoder = ENCODERS[type(swin)](backbone, swin.encoder.state_dict())
    encoder.gradient_checkpointing = any(
        getattr(module, 'gradient_checkpointing', False) for module in swin.encoder.modules()
    )
    return encoder.to(weight.device).train(swin.encoder.training)


@torch.no_grad()
def _check_agreement(ours: SwinDenseEncoder, swin: nn.Module, image_size: tuple[int, int]) -> None:
    """Raise a RuntimeError if our encoder and that of a SwinModel disagree, as with an untested version."""
    theirs = swin.encoder
    weight = next(theirs.parameters())
    grid = tuple(-(-side // swin.config.patch_size) for side in image_size)
    tokens = torch.randn(1, grid[0] * grid[1], swin.config.embed_dim, device=weight.device, dtype=weight.dtype)
    modes = [(module, module.training) for encoder in (ours, theirs) for module in encoder.modules()]
    found, expected = (
        encoder.eval()(tokens, grid, **type(ours).any_size).last_hidden_state for encoder in (ours, theirs)
    )
    for module, mode in modes:
        module.training = mode
    difference = ((found - expected).norm() / expected.norm()).item()
    if not difference < torch.finfo(weight.dtype).eps ** (1 / 3):  # far above rounding errors, including TF32
        raise RuntimeError(
            f'our stages differ from those of {type(swin).__name__} in transformers {transformers.__version__} by '
            f'{difference:.1%} of the output, so the model was not changed; please report it'
        )


def _measure(swin: nn.Module, image_size: tuple[int, int]) -> tuple[float, int]:
    """Return the time in seconds and the peak of allocated bytes of one call of a Swin."""
    weight = next(swin.parameters())
    image = torch.randn(1, swin.config.num_channels, *image_size, device=weight.device, dtype=weight.dtype)
    is_cuda = weight.device.type == 'cuda'

    def call() -> None:
        with torch.set_grad_enabled(swin.training):
            output = swin(image, **ENCODERS[type(swin)].any_size).last_hidden_state
            if output.requires_grad:
                output.sum().backward()
        if is_cuda:
            torch.cuda.synchronize()

    gradients = [parameter.grad for parameter in swin.parameters()]
    call()
    times = []
    for _ in range(3):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities, profile_memory=True) as profiled:
        call()
    for parameter, gradient in zip(swin.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return min(times), _peak(profiled)


def _peak(profiled: profile) -> int:
    """Return the peak of allocated bytes in a profile."""
    results = profiled.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted((e for e in results.events() if e.name() == '[memory]'), key=lambda event: event.start_ns())
    now = peak = 0
    for event in events:
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def _source_of(name_or_path: Any, revision: str | None) -> str:
    """Return the path of a local folder, or the address of a repository on the Hub."""
    if os.path.isdir(name_or_path):
        return str(name_or_path)
    return f'hf://{name_or_path}' + ('' if revision is None else f'@{revision}')


def _refuse_attentions(output_attentions: bool | None) -> None:
    if output_attentions:
        raise ValueError('output_attentions cannot be True: attention weights are not materialised')


def _to_maps(x: Tensor) -> Tensor:
    """Return (B, H, W, C) as (B, C, H, W)."""
    return x.permute(0, 3, 1, 2).contiguous()


AutoConfig.register(SwinDenseConfig.model_type, SwinDenseConfig)
AutoBackbone.register(SwinDenseConfig, SwinDenseBackbone)
AutoModel.register(SwinDenseConfig, SwinDenseBackbone)
