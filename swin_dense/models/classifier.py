"""Swin classifiers: a backbone with a linear head on the mean token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from swin_dense.archs.arch import Arch, network_of, resolve_arch
from swin_dense.archs.spec import Spec
from swin_dense.checkpoint.late import convert_before_load
from swin_dense.checkpoint.report import Report, log_report
from swin_dense.models.swin import SwinBackbone
from swin_dense.models.swin_v2 import BACKBONES
from swin_dense.utils import checks, compat


class SwinClassifier(nn.Module):
    """Swin Transformer for image classification: backbone, norm, mean over tokens, linear layer.

    Args:
        name: 'swin_t', 'swinv2_t' and the like, or ``arch`` of :class:`SwinBackbone`.
        num_classes: number of scores.
        clamp_window: whether to shrink windows, and to drop their shift, on maps that are not larger than the window.
            Published classifiers do this, dense models do not; see :class:`SwinBackbone`.
        **options: options of :class:`SwinBackbone` or :class:`SwinV2Backbone`.

    Attributes:
        backbone: the backbone; its last output norm is the final norm of the classifier.
        head: the linear layer.

    Examples:
        >>> classifier = SwinClassifier('swin_t', num_classes=10)
        >>> classifier(torch.rand(2, 3, 224, 224)).shape
        torch.Size([2, 10])
    """

    allow_partial = False  # see SwinBackbone

    def __init__(
        self,
        name: str | Mapping[str, Any] | Arch = 'swin_t',
        num_classes: int = 1000,
        *,
        clamp_window: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        if 'out_indices' in options:
            raise TypeError('a classifier reads the last stage; leave out_indices out')
        network = network_of(name) or 'swin'
        stages = len(options['depths'] if options.get('depths') else resolve_arch(name, network).depths)
        self.backbone: SwinBackbone = BACKBONES[network](
            name, out_indices=(stages - 1,), clamp_window=clamp_window, **options
        )
        self.head = nn.Linear(self.backbone.out_channels[-1], checks.integer('num_classes', num_classes))
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        compat.register_load_state_dict_pre_hook(self, convert_before_load)

    @property
    def network(self) -> str:
        """'swin' or 'swinv2', that of the backbone."""
        return self.backbone.network

    def spec(self) -> Spec:
        """Return the geometry with which checkpoints are compared: that of the backbone."""
        return replace(self.backbone.spec(), is_classifier=True)

    @property
    def input_preset(self) -> str | None:
        """That of the backbone."""
        return self.backbone.input_preset

    @input_preset.setter
    def input_preset(self, preset: str | None) -> None:
        self.backbone.input_preset = preset

    def log_load(self, report: Report) -> None:
        """Log the report of a checkpoint that ``load_state_dict`` has converted."""
        log_report(report)

    if TYPE_CHECKING:  # nn.Module declares neither arguments nor results

        def __call__(self, img: Tensor) -> Tensor: ...

    def forward(self, img: Tensor) -> Tensor:
        """Return the scores of images, (B, in_channels, H, W), before softmax: (B, num_classes)."""
        return self.head(self.backbone(img)[-1].mean((2, 3)))
