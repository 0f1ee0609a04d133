"""What SimMIM and feature distillation share: cells that are hidden, and a teacher that is no submodule."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from swin_dense.models.swin import SwinBackbone
from swin_dense.ops.windows import window_grid
from swin_dense.utils import checks


class Pretraining(nn.Module):
    """A backbone that learns from images without labels, of which some cells may be hidden, beside a frozen teacher.

    Args:
        backbone: the network to train.
        teacher: a network that is set to evaluation mode, moves between devices with this module, and is never trained
            nor part of ``state_dict()``; or None.
        mask_patch: side in pixels of a cell, a multiple of the patch size.
        mask_ratio: share of the cells that are hidden, rounded up to a whole number of cells for each image.
    """

    teacher: Any

    def __init__(self, backbone: SwinBackbone, teacher: nn.Module | None, mask_patch: int, mask_ratio: float) -> None:
        super().__init__()
        patch = backbone.strides[0]
        if checks.integer('mask_patch', mask_patch) % patch:
            raise ValueError(f'mask_patch must be a multiple of {patch}, the stride of the patches, got {mask_patch}')
        self.mask_patch = mask_patch
        self.mask_ratio = float(mask_ratio)
        self.backbone = backbone
        self.mask_token: nn.Parameter | None = None
        if mask_ratio:
            self.mask_token = nn.Parameter(torch.empty(backbone.arch.embed_dims))
            nn.init.trunc_normal_(self.mask_token, std=0.02)
        if teacher is not None:
            teacher.eval()
        self.__dict__['teacher'] = teacher  # no submodule: its weights are neither among the parameters nor saved

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move or convert the teacher too, which is no submodule."""
        if self.teacher is not None:
            self.teacher._apply(fn)
        return super()._apply(fn, recurse)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Allocate the parameters on a device, but not those of the teacher: no checkpoint restores their values."""
        teacher, self.__dict__['teacher'] = self.teacher, None
        try:
            return super().to_empty(device=device, recurse=recurse)
        finally:
            self.__dict__['teacher'] = teacher

    def draw_mask(self, img: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Choose at random which cells of each image are hidden.

        Args:
            img: (B, C, H, W), of which only shape and device matter.
            generator: source of randomness on the CPU; None is torch's own.

        Returns:
            (B, ceil(H / mask_patch), ceil(W / mask_patch)) bool, True where hidden.
        """
        rows, columns = _cells(img, self.mask_patch)
        hidden = math.ceil(rows * columns * self.mask_ratio)
        # Not torch.rand, which torch.compile cannot trace with a generator for sizes that vary.
        lots = torch.empty(len(img), rows * columns, device='cpu').uniform_(generator=generator)
        is_hidden = lots.argsort(1) < hidden
        return is_hidden.view(-1, rows, columns).to(img.device)

    def hidden_pixels(self, img: Tensor, mask: Tensor) -> Tensor:
        """Return which pixels of images (B, C, H, W) a mask hides, (B, 1, H, W) bool."""
        return _enlarge(mask, self.mask_patch, img.shape[2:]).unsqueeze(1)

    def hidden_patches(self, img: Tensor, mask: Tensor) -> Tensor:
        """Return which patches of images (B, C, H, W) a mask hides, as the backbone takes them.

        Raises ValueError if the mask does not have one entry for each cell of the images.
        """
        expected = (len(img), *_cells(img, self.mask_patch))
        if mask.shape != expected:
            raise ValueError(
                f'mask must be {expected}, one entry for each cell of {self.mask_patch} pixels of an image of '
                f'{tuple(img.shape)}, got {tuple(mask.shape)}'
            )
        patch = self.backbone.strides[0]
        return _enlarge(mask, self.mask_patch // patch, _cells(img, patch))


def check_backbone(backbone: Any, name: str = 'backbone') -> None:
    """Raise TypeError unless this is a Swin of this package."""
    if not isinstance(backbone, SwinBackbone):
        raise TypeError(f'{name} must be a SwinBackbone or SwinV2Backbone, got {type(backbone).__name__}')


def check_teacher_is_another(teacher: Any, backbone: SwinBackbone) -> None:
    """Raise ValueError if the backbone is its own teacher."""
    if teacher is backbone:
        raise ValueError('teacher and backbone are the same module; a teacher has weights of its own, which stay fixed')


def _cells(img: Tensor, side: int) -> tuple[int, int]:
    """Return the rows and columns of cells of ``side`` pixels that cover images, (B, C, H, W)."""
    return window_grid(img.shape[2], img.shape[3], (side, side))


def _enlarge(mask: Tensor, cell: int, size: Any) -> Tensor:
    """Repeat every entry of (B, rows, columns) to cell x cell entries, and cut the result to (B, *size)."""
    enlarged = mask.repeat_interleave(cell, 1).repeat_interleave(cell, 2)
    return enlarged[:, : size[0], : size[1]]
