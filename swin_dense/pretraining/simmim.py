"""SimMIM: pretrain a backbone on images without labels, by predicting the pixels of hidden patches.

Sources: Xie et al., SimMIM: A Simple Framework for Masked Image Modeling, CVPR 2022; the normalised target is that of
Swin V2. The frozen teacher is that of Mendieta et al., Towards Geospatial Foundation Models via Continual Pretraining
(GFM), ICCV 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.models.swin import SwinBackbone
from swin_dense.pretraining.base import Pretraining, check_backbone, check_teacher_is_another
from swin_dense.utils import checks

_LEAST_VARIANCE = 1e-6  # of the authors' normalised target


class SimMIM(Pretraining):
    """Masked image modelling around a backbone: the loss trains it, and the rest is thrown away.

    A random share of square cells of each image is replaced by a learnt token. One linear layer predicts the pixels of
    each cell from the last map of the backbone, and the loss compares the hidden pixels. The defaults are the authors'.
    With a teacher, the loss also compares the two networks' mean features before the last stage: the backbone sees the
    image with hidden cells, the teacher all of it.

    Args:
        backbone: the network to train, with ``clamp_window=True``, as in all published pretraining, and with only the
            last stage in ``out_indices``, because the norms of other outputs would get no gradient.
        mask_patch: side in pixels of a cell, a multiple of the patch size.
        mask_ratio: share of the cells that are hidden, rounded up to a whole number of cells for each image.
        norm_target: side in pixels, an odd number, of the neighbourhood whose mean and standard deviation normalise
            each target pixel; the authors use 47 for Swin V2. None leaves the target as it is.
        teacher: a trained backbone of the same channels, with ``clamp_window=True``. It is set to evaluation mode,
            moves between devices with this module, and is never trained nor part of ``state_dict()``.
        teacher_size: side in pixels to which images are resized for the teacher, the size that it was trained with;
            None keeps the size of the images.
        teacher_weight: factor on the teacher's loss.

    Raises:
        ValueError: an option has a value that is not allowed, or a backbone differs from the above.
        TypeError: an option has the wrong type.

    Examples:
        >>> from swin_dense import SwinBackbone
        >>> backbone = SwinBackbone('t', window_size=6, out_indices=(3,), clamp_window=True, drop_path_rate=0.0)
        >>> model = SimMIM(backbone)
        >>> losses = model(torch.rand(2, 3, 192, 192))
        >>> list(losses)
        ['loss_pixels']
        >>> sum(losses.values()).backward()
    """

    teacher: SwinBackbone | None
    projection: nn.Linear  # only with a teacher

    def __init__(
        self,
        backbone: SwinBackbone,
        *,
        mask_patch: int = 32,
        mask_ratio: float = 0.6,
        norm_target: int | None = None,
        teacher: SwinBackbone | None = None,
        teacher_size: int | None = 224,
        teacher_weight: float = 1.0,
    ) -> None:
        _check_backbone('backbone', backbone)
        last = len(backbone.arch.depths) - 1
        if backbone.out_indices != (last,):
            raise ValueError(
                f'SimMIM trains the last stage alone, because norms of other outputs would get no gradient; build the '
                f'backbone with out_indices=({last},), got {backbone.out_indices}'
            )
        if not 0 < checks.number('mask_ratio', mask_ratio) < 1:
            raise ValueError(f'mask_ratio must be above 0 and below 1, got {mask_ratio}; the authors use 0.6')
        if norm_target is not None and (checks.integer('norm_target', norm_target, minimum=3) % 2) == 0:
            raise ValueError(f'norm_target must be an odd number of pixels, got {norm_target}; the authors use 47')
        if teacher is not None:
            _check_teacher(teacher, backbone)
        super().__init__(backbone, teacher, mask_patch, mask_ratio)
        self.norm_target = norm_target
        self.teacher_size = None if teacher_size is None else checks.integer('teacher_size', teacher_size)
        self.teacher_weight = checks.number('teacher_weight', teacher_weight)
        channels = backbone.out_channels[-1]
        stride = backbone.out_strides[-1]
        self.decoder = nn.Conv2d(channels, backbone.in_channels * stride**2, kernel_size=1)
        if teacher is not None:
            self.projection = nn.Linear(channels, channels)

    def forward(self, img: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        """Compute the losses, whose sum is to be minimised.

        Args:
            img: normalised images, (B, in_channels, H, W).
            mask: hidden cells as :meth:`draw_mask` returns them; None draws them.

        Returns:
            'loss_pixels', and 'loss_teacher' if there is a teacher.
        """
        mask = self.draw_mask(img) if mask is None else mask
        reconstruction, stages = self._reconstruct(img, mask)
        losses = {'loss_pixels': self.pixel_loss(img, reconstruction, mask)}
        if self.teacher is not None:
            whole = img
            if self.teacher_size is not None:
                size = (self.teacher_size, self.teacher_size)
                whole = F.interpolate(img, size, mode='bilinear', align_corners=True)
            with torch.no_grad():
                _, their_stages = self.teacher(whole, return_stages=True)
            # Autocast may have halved them.
            ours = self.projection(_before_last(stages)).to(img.dtype)
            theirs = _before_last(their_stages).to(img.dtype)
            similarity = F.cosine_similarity(ours, theirs, dim=1).mean()
            losses['loss_teacher'] = -self.teacher_weight * similarity
        return losses

    def reconstruct(self, img: Tensor, mask: Tensor) -> Tensor:
        """Predict all pixels of images, (B, in_channels, H, W), from the cells that are not hidden.

        With ``norm_target`` the prediction is that of the normalised target; see :meth:`local_statistics`.
        """
        return self._reconstruct(img, mask)[0]

    def _reconstruct(self, img: Tensor, mask: Tensor) -> tuple[Tensor, Sequence[tuple[Tensor, Tensor]]]:
        """Return all pixels, and what each stage of the backbone returned."""
        _, _, height, width = img.shape
        hidden = self.hidden_patches(img, mask)
        (features,), stages = self.backbone(img, hidden, self.mask_token, return_stages=True)
        pixels = F.pixel_shuffle(self.decoder(features), self.backbone.out_strides[-1])
        return pixels[:, :, :height, :width], stages

    def pixel_loss(self, img: Tensor, reconstruction: Tensor, mask: Tensor) -> Tensor:
        """Return the mean absolute difference between target and reconstruction over hidden pixels and channels."""
        target = img
        if self.norm_target is not None:
            mean, deviation = self.local_statistics(img)
            target = (img - mean) / deviation
        hidden = self.hidden_pixels(img, mask)
        error = F.l1_loss(reconstruction, target, reduction='none') * hidden
        return error.sum() / hidden.sum().clamp(min=1) / img.shape[1]

    def local_statistics(self, img: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the neighbourhood of each pixel, both (B, C, H, W)."""
        side = self.norm_target or 1
        img = img.to(torch.promote_types(img.dtype, torch.float32))  # a difference of squares

        def average(x: Tensor, is_count: bool = False) -> Tensor:
            return F.avg_pool2d(x, side, stride=1, padding=side // 2, count_include_pad=is_count)

        mean = average(img)
        count = average(torch.ones_like(img), is_count=True) * side**2
        variance = (average(img**2) - mean**2) * (count / (count - 1))
        return mean, (variance.clamp(min=0) + _LEAST_VARIANCE).sqrt()


def _check_backbone(name: str, backbone: Any) -> None:
    check_backbone(backbone, name)
    if not backbone.clamp_window:
        raise ValueError(
            f'build the {name} with clamp_window=True: published pretraining shifts no window of a map that has only '
            'one, as here the last map of 192 pixels with window 6'
        )


def _check_teacher(teacher: Any, backbone: SwinBackbone) -> None:
    _check_backbone('teacher', teacher)
    check_teacher_is_another(teacher, backbone)
    stages = len(backbone.arch.depths)
    if stages < 2 or len(teacher.stages) != stages:
        raise ValueError(
            f'the teacher has {len(teacher.stages)} stages and the backbone {stages}; both need the same number, at '
            'least 2, because they are compared before the last'
        )
    for what, theirs, ours in (
        ('bands of an image (in_channels)', teacher.in_channels, backbone.in_channels),
        ('channels of the last stage', teacher.num_features[-1], backbone.num_features[-1]),
    ):
        if theirs != ours:
            raise ValueError(
                f'the teacher has {theirs} {what}, the backbone {ours}; give a teacher of the same architecture and '
                'the same in_channels'
            )


def _before_last(stages: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean over the map that enters the last stage, (B, C)."""
    return stages[-2][1].mean((1, 2))
