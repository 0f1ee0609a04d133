"""The Swin backbone.

Tokens are (B, H, W, C) from the patch embedding on, and are permuted to (B, C, H, W) at the outputs only.
Source: Liu et al., Swin Transformer: Hierarchical Vision Transformer using Shifted Windows, ICCV 2021.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from swin_dense.archs.arch import Arch
from swin_dense.archs.spec import Spec
from swin_dense.checkpoint.late import convert_before_load
from swin_dense.checkpoint.report import Report, log_report
from swin_dense.models import options
from swin_dense.models.attention import ShiftedWindowAttention, WindowAttention
from swin_dense.models.block import SwinBlock, SwinStage
from swin_dense.models.layer_ids import UNDECAYED, layer_of
from swin_dense.models.layers import (
    FFN,
    ActivationConfig,
    NormConfig,
    PatchEmbed,
    PatchMerging,
    build_norm,
)
from swin_dense.ops import BACKENDS
from swin_dense.ops.layout import resize_position, to_maps
from swin_dense.ops.windows import Size
from swin_dense.utils import checks, compat, memory
from swin_dense.utils.names import unwrapped


class SwinBackbone(nn.Module):
    """Swin Transformer backbone that turns an image of any size into a feature pyramid.

    Options have the names and meanings of mmdet and mmsegmentation, and parameters have their names, shapes and order.
    Checkpoints of other families are converted when they are loaded.

    Args:
        arch: 't', 's', 'b', 'l' or a dict with ``embed_dims``, ``depths`` and ``num_heads``.
        embed_dims: channels of the first stage; overrides the architecture's.
        depths: blocks per stage; overrides the architecture's.
        num_heads: heads per stage; overrides the architecture's.
        pretrain_img_size: image size in pixels that the absolute position embedding was trained for.
        in_channels: channels of the image.
        patch_size: side of a patch in pixels.
        window_size: side, or (height, width), of a window in tokens, or a list with one of them per stage. Two integers
            are always a (height, width).
        mlp_ratio: ratio of the hidden channels of the MLPs to their input channels.
        strides: the patch size, followed by the stride of each patch merging; None means 2 for each merging.
        out_indices: indices of the stages whose maps are returned; None returns all. Later stages are not built.
        qkv_bias: whether queries, keys and values have a bias.
        qk_scale: factor on the query-key product; None means ``head_dim ** -0.5``. With 0, attention depends on the
            relative position only ('rel. pos. w/o app.' in the paper).
        patch_norm: whether patch embedding and patch merging have a norm.
        drop_rate: dropout after the embedding, after the attention projection and in the MLPs.
        attn_drop_rate: dropout of attention weights.
        drop_path_rate: stochastic depth rate of the last block; the rates rise linearly from 0 at the first block.
        use_abs_pos_embed: whether to add a learnt absolute position embedding, interpolated to the size of the map.
        use_rel_pos_bias: whether to add a learnt relative position bias.
        use_shift: whether every second block shifts its windows by half a window.
        act_cfg: activation of the MLPs, such as ``dict(type='GELU')``, or a function that builds the layer.
        norm_cfg: norm, such as ``dict(type='LN')``, or a function that takes the number of channels and builds a norm
            over the last axis.
        with_cp: what to recompute in the backward pass to save memory: True for blocks, 'mlp' for only their MLPs;
            one value, or one per stage.
        frozen_stages: -1 freezes nothing, 0 the embedding, k also the first k stages and their output norms.
        attn_backend: one of ``swin_dense.ops.BACKENDS``. 'auto' is a kernel on GPUs where a trial finds it right, and
            torch's attention elsewhere.
            Gradients of gradients, as of a gradient penalty, need 'reference' on a GPU, and on a CPU if a position
            bias is frozen or left out.
        clamp_window: whether to shrink windows, and to drop their shift, on maps that are not larger than the window,
            as the official classification code does. By default such maps are padded, as in the official detection
            code.

    Attributes:
        out_channels: channels of each returned map.
        out_strides: stride in pixels of each returned map.
        windows: (height, width) in tokens of the windows of every stage.
        num_features: channels of every stage, including those that are not returned.
        position_grid: (height, width) in tokens of the absolute position embedding.
        input_preset: the normalisation that the loaded weights expect, where their publisher is recognised, a name for
            :func:`swin_dense.features.preset`; None if unknown.

    Raises:
        ValueError: an option has a value that is not allowed, or options contradict each other.
        TypeError: an option has the wrong type or is unknown.

    Examples:
        >>> backbone = SwinBackbone('t', out_indices=(1, 2, 3), frozen_stages=1)
        >>> maps = backbone(torch.rand(1, 3, 100, 150))
        >>> [tuple(level.shape) for level in maps]
        [(1, 192, 13, 19), (1, 384, 7, 10), (1, 768, 4, 5)]
        >>> backbone.out_channels, backbone.out_strides
        ((192, 384, 768), (8, 16, 32))
    """

    input_preset: str | None = None
    allow_partial = False  # whether load_state_dict accepts missing parameters; an option of SwinDense

    # SwinV2Backbone overrides these.
    network = 'swin'
    _block = SwinBlock
    _merging = PatchMerging

    if TYPE_CHECKING:  # nn.Module declares neither arguments nor results

        def __call__(self, img: Tensor) -> tuple[Tensor, ...]: ...

    def __init__(
        self,
        arch: str | Mapping[str, Any] | Arch = 't',
        *,
        embed_dims: int | None = None,
        depths: Sequence[int] | None = None,
        num_heads: Sequence[int] | None = None,
        pretrain_img_size: int | Sequence[int] = 224,
        in_channels: int = 3,
        patch_size: int = 4,
        window_size: int | Sequence[int] = 7,
        mlp_ratio: float = 4,
        strides: Sequence[int] | None = None,
        out_indices: Sequence[int] | None = None,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        patch_norm: bool = True,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        use_abs_pos_embed: bool = False,
        use_rel_pos_bias: bool = True,
        use_shift: bool = True,
        act_cfg: ActivationConfig = {'type': 'GELU'},
        norm_cfg: NormConfig = {'type': 'LN'},
        with_cp: bool | str | Sequence[bool | str] = False,
        frozen_stages: int = -1,
        attn_backend: str = 'auto',
        clamp_window: bool = False,
        **unknown: NoReturn,  # a type that no value has, so that checkers report unknown options
    ) -> None:
        super().__init__()
        options.reject_unknown(unknown, self.option_names())
        self.arch = options.resolved_arch(arch, self.network, embed_dims, depths, num_heads)
        stages = len(self.arch.depths)
        patch_size = checks.integer('patch_size', patch_size)
        self.in_channels = checks.integer('in_channels', in_channels)
        self.windows = options.window_per_stage(window_size, stages)
        self.clamp_window = checks.boolean('clamp_window', clamp_window)
        self.strides = options.strides_of_stages(strides, patch_size, stages)
        self.out_indices = options.output_stages(out_indices, stages)
        built = self.out_indices[-1] + 1
        self.frozen_stages = options.frozen_count(frozen_stages, built)
        self.qk_scale = None if qk_scale is None else checks.number('qk_scale', qk_scale)
        self.use_rel_pos_bias = checks.boolean('use_rel_pos_bias', use_rel_pos_bias)
        has_positions = checks.boolean('use_abs_pos_embed', use_abs_pos_embed)
        drop_rate = checks.rate('drop_rate', drop_rate)
        drop_path_rates = options.drop_path_by_block(checks.rate('drop_path_rate', drop_path_rate), self.arch.depths)
        hidden_channels = [options.mlp_channels(mlp_ratio, channels) for channels in self.arch.channels[:built]]
        with_cp = options.checkpointing_per_stage(with_cp, stages)
        stage_norm_cfg = norm_cfg if checks.boolean('patch_norm', patch_norm) else None
        self.position_grid = options.grid_of_positions(pretrain_img_size, patch_size)
        shifts = [options.window_shift(use_shift, window) for window in self.windows]
        attention = {
            'qkv_bias': checks.boolean('qkv_bias', qkv_bias),
            'attn_drop_rate': checks.rate('attn_drop_rate', attn_drop_rate),
            'proj_drop_rate': drop_rate,
            'backend': checks.one_of('attn_backend', attn_backend, BACKENDS),
        }

        self.num_features = list(self.arch.channels)
        self.out_channels = tuple(self.arch.channels[stage] for stage in self.out_indices)
        self.out_strides = tuple(math.prod(self.strides[: stage + 1]) for stage in self.out_indices)

        self.patch_embed = PatchEmbed(self.in_channels, self.arch.embed_dims, patch_size, stage_norm_cfg)
        self.absolute_pos_embed: nn.Parameter | None = None
        if has_positions:
            positions = torch.zeros(1, math.prod(self.position_grid), self.arch.embed_dims)
            self.absolute_pos_embed = nn.Parameter(positions)
        self.pos_drop = nn.Dropout(drop_rate)
        self.stages = nn.ModuleList()
        for stage in range(built):
            channels = self.arch.channels[stage]
            blocks = []
            for block, drop_path in enumerate(drop_path_rates[stage]):
                heads, window = self.arch.num_heads[stage], self.windows[stage]
                w_msa = self._make_attention(channels, heads, window_size=window, **attention)
                attn = ShiftedWindowAttention(w_msa, shifts[stage] if block % 2 else (0, 0), self.clamp_window)
                ffn = FFN(channels, hidden_channels[stage], act_cfg, drop_rate)
                blocks.append(self._block(attn, ffn, norm_cfg, channels, drop_path, with_cp[stage]))
            is_last = stage + 1 == built
            downsample = None if is_last else self._merging(channels, self.strides[stage + 1], stage_norm_cfg)
            self.stages.append(SwinStage(blocks, downsample))
        for stage, channels in zip(self.out_indices, self.out_channels, strict=True):
            self.add_module(f'norm{stage}', build_norm(norm_cfg, channels))

        compat.register_load_state_dict_pre_hook(self, convert_before_load)
        self.reset_parameters()
        self._freeze()
        if next(self.parameters()).is_cpu:
            memory.keep_freed()

    @classmethod
    def option_names(cls) -> list[str]:
        """Return the names of the options of this class, including those of its base classes."""
        names: dict[str, None] = {}  # a set that keeps the order
        for base in cls.__mro__:
            if issubclass(base, SwinBackbone) and '__init__' in vars(base):
                for parameter in inspect.signature(base).parameters.values():
                    if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                        names[parameter.name] = None
        return list(names)

    def _make_attention(self, channels: int, num_heads: int, **settings: Any) -> WindowAttention:
        position = self.use_rel_pos_bias
        return WindowAttention(channels, num_heads, qk_scale=self.qk_scale, use_rel_pos_bias=position, **settings)

    def spec(self) -> Spec:
        """Return the geometry with which checkpoints are compared."""
        return Spec(
            self.network,
            self.arch,
            len(self.stages),
            self.windows,
            self.position_grid,
            self.strides,
            self.clamp_window,
        )

    def log_load(self, report: Report) -> None:
        """Log the report of a checkpoint that ``load_state_dict`` has converted."""
        log_report(report)

    @property
    def window_size(self) -> Size | tuple[Size, ...]:
        """(height, width) of the windows in tokens, or one per stage where they differ; fixed, as the bias tables."""
        return self.windows[0] if len(set(self.windows)) == 1 else self.windows

    def reset_parameters(self) -> None:
        """Initialise all parameters as the official code does: truncated normal, LayerNorm as the identity.

        Other layers that functions in ``act_cfg`` and ``norm_cfg`` have built, such as RMSNorm, keep their values.
        """
        for module in self.modules():
            initialise(module)
        if self.absolute_pos_embed is not None:
            nn.init.trunc_normal_(self.absolute_pos_embed, std=0.02)

    def train(self, mode: bool = True) -> SwinBackbone:
        """Set training or evaluation mode, but keep frozen stages frozen; return self."""
        super().train(mode)
        self._freeze()
        return self

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Return the layer index of a parameter and the number of layers, as mmpretrain's backbones do.

        Args:
            param_name: name of a parameter of the backbone, or of a model that contains it.
            prefix: prefix of the backbone's parameters in the model, with its dot. Other names belong to the head.
        """
        depths = self.arch.depths
        layers = sum(depths) + 2
        name = unwrapped(param_name)
        if not name.startswith(prefix):
            return layers - 1, layers
        return layer_of(name.removeprefix(prefix), depths), layers

    def no_weight_decay(self) -> set[str]:
        """Return the names of parameters without weight decay, besides biases and norms, as timm's models do."""
        return {name for name, _ in self.named_parameters() if not UNDECAYED.isdisjoint(name.split('.'))}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the parameter groups of timm's layer decay, as timm's Swin does: a merging joins the next stage."""
        if coarse:
            return {'stem': r'^patch_embed', 'blocks': r'^stages\.(\d+)'}
        merging = [(rf'^stages\.{stage}\.downsample', (stage + 1, 0)) for stage in range(len(self.stages))]
        blocks = [*merging, (r'^stages\.(\d+)\.\w+\.(\d+)', None), (r'^norm', (99999,))]
        return {'stem': r'^patch_embed', 'blocks': blocks}

    def forward(self, img: Tensor) -> tuple[Tensor, ...]:
        """Compute the feature pyramid.

        Args:
            img: (B, in_channels, H, W), any H and W of at least 1 pixel.

        Returns:
            One (B, C_i, ceil(H / stride_i), ceil(W / stride_i)) per output stage.
        """
        return self.output_maps(self.forward_stages(img))

    def forward_stages(self, img: Tensor) -> list[Tensor]:
        """Return the map of every stage, (B, H_i, W_i, C_i), before the output norms."""
        x = self.embed(img)
        outs = []
        for stage in self.stages:
            out, x = stage(x)
            outs.append(out)
        return outs

    def output_maps(self, outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the normalised maps, (B, C_i, H_i, W_i), of the output stages, given those of all stages."""
        maps = []
        for stage in self.out_indices:
            norm = getattr(self, f'norm{stage}')
            maps.append(to_maps(norm(outs[stage])))
        return tuple(maps)

    def embed(self, img: Tensor) -> Tensor:
        """Return the tokens that enter the first stage: (B, in_channels, h, w) to (B, H, W, C)."""
        try:
            x = self.patch_embed(img)
            if self.absolute_pos_embed is not None:
                position = resize_position(self.absolute_pos_embed, self.position_grid, x.shape[1:3])
                x = x + position.to(x.dtype)
            return self.pos_drop(x)
        except Exception:
            _check_image(img, self.in_channels, self.patch_embed)
            raise

    def _freeze(self) -> None:
        if self.frozen_stages >= 0:
            _freeze_module(self.patch_embed)
            self.pos_drop.eval()
            if self.absolute_pos_embed is not None:
                self.absolute_pos_embed.requires_grad_(False)
        for stage in range(self.frozen_stages):
            _freeze_module(self.stages[stage])
            if stage in self.out_indices:
                _freeze_module(getattr(self, f'norm{stage}'))


def _freeze_module(module: nn.Module) -> None:
    module.eval()
    module.requires_grad_(False)


def initialise(module: nn.Module) -> None:
    """Initialise the parameters of one module, without those of its children, as the official code does."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, (nn.Conv2d, nn.LayerNorm)):
        module.reset_parameters()
    elif isinstance(module, WindowAttention):
        module.reset_position()


def _check_image(img: object, in_channels: int, patch_embed: nn.Module) -> None:
    """Raise an error that says why the patch embedding, which has failed, cannot take an image, if that is known."""
    if isinstance(img, torch.fx.Proxy):
        raise TypeError(
            'torch.fx cannot trace this backbone, because its windows depend on the image size; select maps with '
            'out_indices, register forward hooks on its stages, or use torch.export'
        )
    if not isinstance(img, Tensor):
        raise TypeError(f'img must be a torch.Tensor, got {type(img).__name__}')
    if img.is_nested or img.layout != torch.strided:
        kind = 'nested' if img.is_nested else str(img.layout)
        raise TypeError(f'img must be a dense tensor, got {kind}; pad images to one size, or call to_dense()')
    if img.ndim != 4:
        raise ValueError(f'img must have the shape (B, {in_channels}, H, W), got {tuple(img.shape)}')
    if not img.is_floating_point():
        raise TypeError(
            f'img must be a floating-point tensor, got {img.dtype}; normalise the image first, '
            'or call extract_pyramid, which normalises it'
        )
    if img.shape[1] != in_channels:
        raise ValueError(
            f'img must have {in_channels} channels, got {img.shape[1]} in the shape {tuple(img.shape)}; '
            f'build the backbone with in_channels={img.shape[1]}, or pass (B, {in_channels}, H, W)'
        )
    if 0 in img.shape[2:]:
        raise ValueError(f'height and width of img must be at least 1 pixel, got the shape {tuple(img.shape)}')
    dtypes = sorted({parameter.dtype for parameter in patch_embed.parameters()}, key=str)
    if dtypes and img.dtype not in dtypes:
        raise TypeError(
            f'img is {img.dtype}, but the weights are {dtypes[0]}; convert one of them, for example '
            f'img.to({dtypes[0]}), or run the backbone under torch.autocast'
        )
