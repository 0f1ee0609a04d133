"""A small detection task that detectors of any library learn within a few steps."""

import torch

from tests.conftest import TINY

HEIGHT, WIDTH = 97, 133
# Without drop path, so that few steps suffice.
OPTIONS = {**TINY, 'drop_path_rate': 0.0}


def scene(seed=0):
    """Return a noise image with two bright rectangles, and its target in torchvision's format."""
    image = 0.1 * torch.rand(3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(seed))
    boxes = torch.tensor([[10.0, 12.0, 50.0, 60.0], [70.0, 30.0, 120.0, 85.0]])
    masks = torch.zeros(2, HEIGHT, WIDTH, dtype=torch.uint8)
    for index, (left, top, right, bottom) in enumerate(boxes.int().tolist()):
        masks[index, top:bottom, left:right] = 1
        image[index, top:bottom, left:right] += 0.8
    return image, {'boxes': boxes, 'labels': torch.tensor([1, 2]), 'masks': masks}


def train(model, compute_losses, steps=20, lr=1e-3):
    torch.manual_seed(0)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    losses = []
    for _ in range(steps):
        loss = sum(compute_losses().values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def without_gradient(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]
