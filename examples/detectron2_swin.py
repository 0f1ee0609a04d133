"""Backbones for detectron2. Importing this module registers 'D2SwinDense' and 'D2SwinV2Dense'.

cfg = get_cfg()
add_swin_config(cfg)  # call it before merging a YAML file with MODEL.SWIN
cfg.MODEL.BACKBONE.NAME = 'D2SwinDense'
model.backbone.bottom_up = L(D2SwinDense)(arch='t', freeze_at=0)  # in a lazy config
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from detectron2.config import CfgNode, configurable
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from torch import Tensor

from swin_dense.archs.arch import Arch
from swin_dense.checkpoint import load_checkpoint
from swin_dense.models.swin import SwinBackbone
from swin_dense.models.swin_v2 import SwinV2Backbone
from swin_dense.utils import checks

_SAME_NAMES = (
    'arch',
    'pretrain_img_size',
    'patch_size',
    'depths',
    'num_heads',
    'window_size',
    'pretrained_window_size',
    'mlp_ratio',
    'qkv_bias',
    'qk_scale',
    'drop_rate',
    'attn_drop_rate',
    'drop_path_rate',
    'patch_norm',
    'out_features',
    'checkpoint',
    'prefix',
)
# Maps the keys of MODEL.SWIN, those of Mask2Former's configs, to arguments.
KEYS = {
    **{name.upper(): name for name in _SAME_NAMES},
    'EMBED_DIM': 'embed_dims',
    'APE': 'use_abs_pos_embed',
    'USE_CHECKPOINT': 'with_cp',
}
FEATURES = ('res2', 'res3', 'res4', 'res5')


def add_swin_config(cfg: CfgNode) -> None:
    """Add an empty section MODEL.SWIN to a config. Its keys are those of ``KEYS``, all optional."""
    cfg.MODEL.SWIN = CfgNode(new_allowed=True)


class _Detectron2:
    """Mixin with detectron2's interface of a backbone.

    Args:
        arch: see :class:`swin_dense.SwinBackbone`.
        out_features: names of the returned maps, 'res2' to 'res5'.
        freeze_at: 0 freezes nothing, 1 the patch embedding, 2 also the first stage, and so on.
        checkpoint: pretrained weights of the backbone, see :func:`swin_dense.load_checkpoint`. For weights of a whole
            model, use MODEL.WEIGHTS.
        prefix: which backbone, if the checkpoint contains several.
        **options: options of the backbone.
    """

    @configurable
    def __init__(
        self,
        arch: str | Mapping[str, Any] | Arch = 't',
        *,
        out_features: Sequence[str] = FEATURES,
        freeze_at: int = 0,
        checkpoint: Any = None,
        prefix: str | None = None,
        **options: Any,
    ) -> None:
        for name in out_features:
            checks.one_of('every entry of out_features', name, FEATURES)
        stages = sorted({FEATURES.index(name) for name in out_features})
        frozen_stages = checks.integer('freeze_at', freeze_at, minimum=0) - 1
        super().__init__(arch, out_indices=stages, frozen_stages=frozen_stages, **options)
        self._out_features = [FEATURES[stage] for stage in self.out_indices]  # type: ignore[attr-defined]
        self._out_feature_channels = dict(zip(self._out_features, self.out_channels, strict=True))  # type: ignore[attr-defined]
        self._out_feature_strides = dict(zip(self._out_features, self.out_strides, strict=True))  # type: ignore[attr-defined]
        if checkpoint is not None:
            load_checkpoint(self, checkpoint, prefix=prefix)  # type: ignore[arg-type]

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: ShapeSpec) -> dict[str, Any]:
        """Return the arguments given by a config."""
        section = cfg.MODEL.get('SWIN', {})
        for key in section:
            checks.one_of('every key of MODEL.SWIN', key, tuple(KEYS))
        given = {KEYS[key]: value for key, value in section.items()}
        return {'in_channels': input_shape.channels, 'freeze_at': cfg.MODEL.BACKBONE.FREEZE_AT, **given}

    def forward(self, img: Tensor) -> dict[str, Tensor]:
        """Return a dict of maps (B, C_i, ceil(H / stride_i), ceil(W / stride_i)) by name, for images (B, C, H, W)."""
        return dict(zip(self._out_features, super().forward(img), strict=True))  # type: ignore[misc]


@BACKBONE_REGISTRY.register()
class D2SwinDense(_Detectron2, SwinBackbone, Backbone):
    """Swin backbone for detectron2."""


@BACKBONE_REGISTRY.register()
class D2SwinV2Dense(_Detectron2, SwinV2Backbone, Backbone):
    """Swin V2 backbone for detectron2."""
