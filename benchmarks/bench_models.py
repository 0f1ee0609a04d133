"""The models that benchmarks compare: our backends, and other libraries (peers) with our weights."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swin_dense import SwinBackbone, SwinV2Backbone, export_state_dict
from swin_dense.archs.arch import split_name
from swin_dense.models.swin_v2 import BACKBONES, SwinBlockV2
from swin_dense.ops import BACKENDS

DROP_PATH_RATE = 0.2


def build_ours(arch: str, window: int, name: str) -> SwinBackbone:
    """Build our backbone. ``name`` is a backend, with the suffix '+cp' for gradient checkpointing."""
    backend, _, extra = name.partition('+')
    if backend not in BACKENDS or extra not in ('', 'cp'):
        raise ValueError(f'a model of ours must be a backend of {BACKENDS}, with or without "+cp", got {name!r}')
    torch.manual_seed(0)
    kind = BACKBONES[split_name(arch)[0] or 'swin']
    ours = kind(arch, window_size=window, drop_path_rate=DROP_PATH_RATE, attn_backend=backend, with_cp=extra == 'cp')
    for module in ours.modules():
        if isinstance(module, SwinBlockV2):  # initial norms are 0: blocks would have no effect
            nn.init.ones_(module.norm1.weight)
            nn.init.ones_(module.norm2.weight)
    return ours


class _Maps(nn.Module):
    """A peer with outputs like ours: a tuple of normalised maps (B, C, H, W)."""

    def __init__(self, model: nn.Module, run: Callable[[nn.Module, Tensor], Sequence[Tensor]]) -> None:
        super().__init__()
        self.model = model
        self.run = run

    def forward(self, img: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.run(self.model, img))


class _Normed(_Maps):
    """A peer with maps (B, H, W, C) and no output norms, to which our output norms are added."""

    def __init__(self, model: nn.Module, run: Callable, channels: Sequence[int]) -> None:
        super().__init__(model, run)
        self.norms: Any = nn.ModuleList(nn.LayerNorm(count) for count in channels)

    def forward(self, img: Tensor) -> tuple[Tensor, ...]:
        maps = self.run(self.model, img)
        normed = [norm(x).permute(0, 3, 1, 2).contiguous() for norm, x in zip(self.norms, maps, strict=True)]
        return tuple(normed)


def maps_of_timm(model: Any, img: Tensor) -> list[Tensor]:
    """Return the map (B, H, W, C) of each stage of timm's Swin, without norms; likewise the next two functions."""
    return [x.permute(0, 2, 3, 1) for x in model.forward_intermediates(img, intermediates_only=True)]


def maps_of_torchvision(model: Any, img: Tensor) -> list[Tensor]:
    maps = []
    for index, layer in enumerate(model.features):
        img = layer(img)
        if index % 2:
            maps.append(img)
    return maps


def maps_of_transformers(model: Any, img: Tensor) -> list[Tensor]:
    return [x.permute(0, 2, 3, 1) for x in model(img).feature_maps]


def build_peer(name: str, ours: SwinBackbone, size: tuple[int, int]) -> nn.Module:
    """Build a peer with the weights of ``ours``.

    Raises:
        ImportError: the peer is not installed or cannot be imported, or has no such Swin.
    """
    stand_in_for_torchvision_operators()
    if isinstance(ours, SwinV2Backbone) and name not in HAVE_V2:
        raise ImportError(f'{name} has no Swin V2')
    return _BUILDERS[name](ours, size)


def must_agree(name: str, size: tuple[int, int], window: int) -> bool:
    """Return whether a peer computes the official function at this size; see the notes in benchmarks/README.md."""
    maps = [(-(-size[0] // stride), -(-size[1] // stride)) for stride in (4, 8, 16, 32)]
    is_regular = min(map(min, maps)) > window and not (size[0] % 32 or size[1] % 32)
    fits = all(side % window == 0 for pair in maps for side in pair)
    return name in ('mmdet', 'mmseg') or (is_regular and (name != 'timm' or fits))


def _mm(package: str, ours: SwinBackbone, size: tuple[int, int]) -> nn.Module:
    peer = importlib.import_module(f'{package}.models.backbones.swin').SwinTransformer(
        embed_dims=ours.arch.embed_dims,
        depths=ours.arch.depths,
        num_heads=ours.arch.num_heads,
        window_size=ours.window_size[0],
        drop_path_rate=DROP_PATH_RATE,
    )
    _load(peer, ours, package)
    return peer


def _timm(ours: SwinBackbone, size: tuple[int, int]) -> nn.Module:
    import timm

    is_v2 = isinstance(ours, SwinV2Backbone)
    peer = timm.create_model(
        'swinv2_tiny_window8_256' if is_v2 else 'swin_tiny_patch4_window7_224',
        img_size=size,
        embed_dim=ours.arch.embed_dims,
        depths=ours.arch.depths,
        num_heads=ours.arch.num_heads,
        window_size=ours.window_size[0],
        drop_path_rate=DROP_PATH_RATE,
        always_partition=True,
    )
    _load(peer, ours, 'timm')
    return _with_our_norms(_Normed(peer, maps_of_timm, ours.out_channels), ours)


def _torchvision(ours: SwinBackbone, size: tuple[int, int]) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    parts = {}
    if isinstance(ours, SwinV2Backbone):
        parts = {'block': swin.SwinTransformerBlockV2, 'downsample_layer': swin.PatchMergingV2}
    window = list(ours.window_size)
    depths, heads = list(ours.arch.depths), list(ours.arch.num_heads)
    peer = swin.SwinTransformer(
        [4, 4], ours.arch.embed_dims, depths, heads, window, stochastic_depth_prob=DROP_PATH_RATE, **parts
    )
    _load(peer, ours, 'torchvision')
    return _with_our_norms(_Normed(peer, maps_of_torchvision, ours.out_channels), ours)


def _transformers(ours: SwinBackbone, size: tuple[int, int]) -> nn.Module:
    import transformers

    is_v2 = isinstance(ours, SwinV2Backbone)
    config = (transformers.Swinv2Config if is_v2 else transformers.SwinConfig)(
        embed_dim=ours.arch.embed_dims,
        depths=list(ours.arch.depths),
        num_heads=list(ours.arch.num_heads),
        window_size=ours.window_size[0],
        image_size=size,
        drop_path_rate=DROP_PATH_RATE,
        out_features=['stage1', 'stage2', 'stage3', 'stage4'],
    )
    peer = (transformers.Swinv2Backbone if is_v2 else transformers.SwinBackbone)(config)
    _load(peer, ours, 'transformers')
    if is_v2:
        return _with_our_norms(_Normed(peer, maps_of_transformers, ours.out_channels), ours)
    return _Maps(peer, lambda model, img: model(img).feature_maps)


_BUILDERS: dict[str, Callable[[SwinBackbone, tuple[int, int]], nn.Module]] = {
    'mmdet': functools.partial(_mm, 'mmdet'),
    'mmseg': functools.partial(_mm, 'mmseg'),
    'timm': _timm,
    'transformers': _transformers,
    'torchvision': _torchvision,
}
HAVE_V2 = ('timm', 'transformers', 'torchvision')
PEERS = tuple(_BUILDERS)


def _load(peer: nn.Module, ours: SwinBackbone, family: str) -> None:
    """Load our weights into a peer. Only its classifier may be missing; our output norms are ignored."""
    missing, _ = peer.load_state_dict(export_state_dict(ours, family), strict=False)
    unexplained = [name for name in missing if not {'norm', 'head', 'swin'} & {name.split('.')[0]}]
    if unexplained:
        raise RuntimeError(f'{family} has parameters that were not loaded: {unexplained}')


def _with_our_norms(peer: _Normed, ours: SwinBackbone) -> _Normed:
    for stage, norm in enumerate(peer.norms):
        norm.load_state_dict(getattr(ours, f'norm{stage}').state_dict())
    return peer


def stand_in_for_torchvision_operators() -> None:
    """Make torchvision importable if its compiled operators do not fit this torch. Its Swin does not use them."""
    spec = find_spec('torchvision')
    if spec is None or spec.origin is None or _STAND_INS:
        return
    try:
        torch.ops.load_library(Path(spec.origin).parent / '_C.so')
    except OSError:
        library = torch.library.Library('torchvision', 'DEF')
        both = ('roi_align', 'deform_conv2d', 'ps_roi_align', 'ps_roi_pool', 'roi_pool')
        for name in ('qnms', 'nms', *both, *(f'_{name}_backward' for name in both)):
            library.define(f'{name}(Tensor input) -> Tensor')
        _STAND_INS.append(library)


# Keeps the library alive, because its operators are removed when it is deleted.
_STAND_INS: list[torch.library.Library] = []
