"""Feature distillation: a backbone learns the maps of a frozen teacher, on images without labels.

The loss and its weights are those of Ranzinger et al., AM-RADIO: Agglomerative Vision Foundation Model, CVPR 2024.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swin_dense.features.images import Statistic, normalize
from swin_dense.models.swin import SwinBackbone
from swin_dense.ops.windows import Pair
from swin_dense.pretraining.base import Pretraining, check_backbone, check_teacher_is_another
from swin_dense.pretraining.teachers import Teacher, check_maps, teacher_of
from swin_dense.utils import checks
from swin_dense.utils.choices import IMAGENET_MEAN, IMAGENET_STD

_LEAST_VARIANCE = 1e-6


class FeatureDistillation(Pretraining):
    """A frozen teacher around a backbone: the loss trains the backbone to predict the teacher's maps.

    Each map of the backbone is resized to the cells of a map of the teacher. A head of two linear layers per cell
    predicts the teacher's features there, which are standardised: from each channel its mean is subtracted, and it is
    divided by its standard deviation, both over all cells of all images of the training so far. The loss is the mean
    over the pairs of maps of ``cosine_weight * (1 - cosine) + smooth_l1_weight * smooth_l1``.

    A cell is compared only within the image. If the backbone or the teacher pads an image to whole cells, the part of a
    cell beyond the image has no weight in the resizing.

    Args:
        backbone: the network to train. All maps that it returns must learn, or their norms would get no gradient.
        teacher: a :class:`Teacher`, a network of a class that :func:`teacher_of` knows, or stored maps
            (:class:`swin_dense.pretraining.StoredMaps`). It is set to evaluation mode, moves between devices
            with this module, and is never trained nor part of ``state_dict()``.
        levels: pairs of indices: of a map that the backbone returns, and of the teacher's map that it learns. None: if
            both have the same number of maps, these are paired in their order; otherwise, each of the backbone's learns
            the teacher's of the nearest stride.
        mask_patch: side in pixels of the cells of which some are hidden from the backbone, a multiple of its patch
            size. The teacher sees the whole image, and all cells are compared.
        mask_ratio: share of these cells, rounded up to a whole number for each image. 0 hides none.
        mean: the mean that was subtracted from the images, see :class:`Teacher`, which gets them without it; None, with
            ``std=None``, for images in [0, 1].
        std: likewise the standard deviation.
        cosine_weight: factor on 1 minus the cosine similarity of the features of a cell.
        smooth_l1_weight: factor on the smooth L1 loss of the features.

    Raises:
        ValueError: an option has a value that is not allowed.
        TypeError: an option has the wrong type, or the class of the teacher is not known.

    Examples:
        >>> from swin_dense import SwinBackbone
        >>> teacher = SwinBackbone('s', clamp_window=True)  # with weights that are worth learning
        >>> model = FeatureDistillation(SwinBackbone('t', clamp_window=True), teacher)
        >>> losses = model(torch.rand(2, 3, 96, 96))
        >>> list(losses)
        ['loss_features']
        >>> sum(losses.values()).backward()
    """

    teacher: Teacher

    def __init__(
        self,
        backbone: SwinBackbone,
        teacher: Any,
        *,
        levels: Sequence[Sequence[int]] | None = None,
        mask_patch: int = 32,
        mask_ratio: float = 0.0,
        mean: Statistic = IMAGENET_MEAN,
        std: Statistic = IMAGENET_STD,
        cosine_weight: float = 0.9,
        smooth_l1_weight: float = 0.1,
    ) -> None:
        check_backbone(backbone)
        check_teacher_is_another(teacher, backbone)
        if not 0 <= checks.number('mask_ratio', mask_ratio) < 1:
            raise ValueError(f'mask_ratio must be at least 0, which hides nothing, and below 1, got {mask_ratio}')
        teacher = teacher_of(teacher)
        if teacher.in_channels not in (None, backbone.in_channels):
            raise ValueError(
                f'the teacher takes images with {teacher.in_channels} channels, the backbone with '
                f'{backbone.in_channels}; give a teacher for the same images'
            )
        super().__init__(backbone, teacher, mask_patch, mask_ratio)
        self.levels = _pairs(levels, backbone, teacher)
        self.mean, self.std = mean, std
        self._undo(torch.zeros(1, backbone.in_channels, 1, 1))  # raises for a mean of other channels
        self.cosine_weight = checks.number('cosine_weight', cosine_weight)
        self.smooth_l1_weight = checks.number('smooth_l1_weight', smooth_l1_weight)
        # On cells (..., C): two linear layers, which are 1x1 convolutions of a map, and a norm between.
        self.heads = nn.ModuleList()
        for ours, theirs in self.levels:
            inputs, outputs = backbone.out_channels[ours], teacher.out_channels[theirs]
            first, last = nn.Linear(inputs, outputs), nn.Linear(outputs, outputs)
            self.heads.append(nn.Sequential(first, nn.LayerNorm(outputs), nn.GELU(), last))
        self.statistics = nn.ModuleList(_Statistics(channels) for channels in teacher.out_channels)

    def forward(
        self, img: Tensor, maps: Sequence[Tensor] | None = None, mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Compute the loss.

        Args:
            img: normalised images, (B, in_channels, H, W).
            maps: the maps of the teacher for these images, if they are stored; None computes them.
            mask: hidden cells as :meth:`draw_mask` returns them; None draws them, if there is a ``mask_ratio``.

        Returns:
            'loss_features'.
        """
        targets = self.targets(img, maps)
        return {'loss_features': self.feature_losses(self.predict(img, mask), targets).mean()}

    def targets(self, img: Tensor, maps: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return the standardised maps of the teacher, (B, C_i, rows, columns); in training mode, they also count.

        See :meth:`forward` for the arguments.
        """
        with torch.no_grad():
            if maps is None:
                maps = self.teacher(self._undo(img))
            check_maps(self.teacher, maps, (img.shape[2], img.shape[3]), len(img))
            dtype = torch.promote_types(img.dtype, torch.float32)
            return [standardize(one.to(dtype)) for standardize, one in zip(self.statistics, maps, strict=True)]

    def predict(self, img: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """Return the prediction of a map of the teacher by each pair of ``levels``, (B, C_i, rows, columns)."""
        if self.mask_token is None:
            ours = self.backbone(img)
        else:
            mask = self.draw_mask(img) if mask is None else mask
            ours = self.backbone(img, self.hidden_patches(img, mask), self.mask_token)
        size = (img.shape[2], img.shape[3])
        predictions = []
        for (level, target), head in zip(self.levels, self.heads, strict=True):
            resized = self._resized(ours[level], self.backbone.out_strides[level], size, target)
            predictions.append(head(resized.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return predictions

    def _resized(self, x: Tensor, stride: int, size: Pair, target: int) -> Tensor:
        """Return the means of a map (B, C, H, W) of images of this size over the cells of a map of the teacher."""
        weights = []
        seen, counts = self.teacher.input_size(*size), self.teacher.map_sizes(*size)[target]
        for axis in (0, 1):
            side = self.teacher.out_strides[target] * size[axis] / seen[axis]  # the teacher's images may be resized
            shares = cell_shares(size[axis], (stride, x.shape[2 + axis]), (side, counts[axis]))
            weights.append(shares.to(x))
        return torch.einsum('ih,bchw,jw->bcij', weights[0], x, weights[1])

    def feature_losses(self, predictions: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """Return the loss of each image, (B,), from :meth:`predict` and :meth:`targets`."""
        losses = []
        for (_, target), prediction in zip(self.levels, predictions, strict=True):
            theirs = targets[target]
            ours = prediction.to(theirs.dtype)  # autocast may have halved it
            cosine = F.cosine_similarity(ours, theirs, dim=1).mean((1, 2))
            smooth_l1 = F.smooth_l1_loss(ours, theirs, reduction='none').mean((1, 2, 3))
            losses.append(self.cosine_weight * (1 - cosine) + self.smooth_l1_weight * smooth_l1)
        return torch.stack(losses).mean(0)

    def _undo(self, img: Tensor) -> Tensor:
        """Return images as they were before normalisation, in [0, 1]."""
        if self.mean is None and self.std is None:
            return img
        zero, one = (normalize(img.new_full((img.shape[1], 1, 1), value), self.mean, self.std) for value in (0.0, 1.0))
        return (img - zero) / (one - zero)


class _Statistics(nn.Module):
    """Standardises the channels of maps by their mean and variance over all maps of the training so far."""

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer('count', torch.zeros((), dtype=torch.int64))
        self.register_buffer('mean', torch.zeros(channels))
        self.register_buffer('variance', torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self._add(x)
        mean, variance = (one.to(x.dtype)[:, None, None] for one in (self.mean, self.variance))
        return (x - mean) / (variance + _LEAST_VARIANCE).sqrt()

    def _add(self, x: Tensor) -> None:
        """Merge the statistics of maps (B, C, H, W), of all processes that train together, into those so far."""
        mean = _over_processes(x.mean((0, 2, 3)))
        variance = _over_processes((x - mean[:, None, None]).square().mean((0, 2, 3)))
        cells = x.numel() // x.shape[1]
        self.count += cells
        share = cells / self.count.to(x.dtype)
        shift = mean - self.mean
        self.mean += share * shift
        self.variance.copy_((1 - share) * self.variance + share * variance + share * (1 - share) * shift.square())


def _over_processes(values: Tensor) -> Tensor:
    """Return the mean over the processes that train together, whose batches are equal."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return values
    torch.distributed.all_reduce(values)
    return values / torch.distributed.get_world_size()


def cell_shares(length: int, ours: tuple[float, int], theirs: tuple[float, int]) -> Tensor:
    """Return how the cells of one grid along an axis of an image are covered by those of another.

    Args:
        length: of the axis, in pixels; what lies beyond does not count.
        ours: side in pixels and number of the covering cells, which begin at 0.
        theirs: side in pixels and number of the covered cells.

    Returns:
        (covered cells, covering cells) float64: which share of a covered cell, within the image, lies in each other.
    """
    covering, covered = (
        (torch.arange(count + 1, dtype=torch.float64) * side).clamp(max=length) for side, count in (ours, theirs)
    )
    first, last = torch.maximum(covered[:-1, None], covering[:-1]), torch.minimum(covered[1:, None], covering[1:])
    common = (last - first).clamp(min=0)
    return common / common.sum(1, keepdim=True)


def _pairs(levels: Any, backbone: SwinBackbone, teacher: Teacher) -> tuple[Pair, ...]:
    ours, theirs = backbone.out_strides, teacher.out_strides
    if levels is None:
        if len(ours) == len(theirs):
            return tuple((index, index) for index in range(len(ours)))
        return tuple(
            (index, min(range(len(theirs)), key=lambda other: abs(math.log(theirs[other] / stride))))
            for index, stride in enumerate(ours)
        )
    pairs = tuple(dict.fromkeys(checks.pair('an entry of levels', pair, minimum=0) for pair in levels))
    if any(level >= len(ours) or target >= len(theirs) for level, target in pairs):
        raise ValueError(
            f'levels must be pairs of indices: of the maps of the backbone, with the strides {list(ours)}, and of '
            f'those of the teacher, with the strides {list(theirs)}, got {levels!r}'
        )
    trained = {level for level, _ in pairs}
    untrained = [index for index in range(len(ours)) if index not in trained]
    if untrained:
        stages = tuple(backbone.out_indices[level] for level in sorted(trained))
        raise ValueError(
            f'no map of the teacher is paired with the maps {untrained} of the backbone, whose norms would get no '
            f'gradient; build the backbone with out_indices={stages}, or add pairs to levels'
        )
    return pairs
