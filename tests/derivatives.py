"""What most comparisons of networks begin with: random images, maps, and gradients of the image and the parameters."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def doubles(*shape: int, **options: Any) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, **options)


def weights_like(out: Tensor) -> Tensor:
    """Return different weights for all values of a map, so that errors of gradients do not cancel out."""
    places = torch.arange(
        out.numel(),
        dtype=torch.float64,
        device=out.device,
    )
    return places.sin().to(out.dtype).view_as(out)


def weighted_sum(outs: Iterable[Tensor]) -> Tensor:
    return sum((out * weights_like(out)).sum() for out in outs)


def maps_and_gradients(model: nn.Module, img: Tensor) -> list[Tensor | None]:
    """Return the maps, and the gradients of the image and of all parameters, of those that require one."""
    outs = model(img)
    wanted = [tensor for tensor in (img, *model.parameters()) if tensor.requires_grad]
    return [*outs, *torch.autograd.grad(weighted_sum(outs), wanted, allow_unused=True)]
