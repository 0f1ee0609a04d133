"""Teach a Swin what another network knows, on images without labels: feature distillation in plain PyTorch.

    python examples/distill.py photos/ --teacher facebook/dinov2-small --student swin_t --out student.pth

The student keeps its pyramid of strides 4 to 32, and is saved with the names of mmdet. A teacher is any callable that
returns a map (B, C, h, w) for images (B, 3, H, W). The command takes vision transformers of transformers, such as
DINOv2 and DINOv3; from Python another Swin is `lambda images: swin(images)[-1]`. A licence of the teacher may restrict
what you do with the student.

The loss is 0.9 of the cosine and 0.1 of the smooth L1 distance to standardised features, the weights of AM-RADIO
(Ranzinger et al., CVPR 2024).
"""

import argparse
import itertools
import os
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from swin_dense import SwinBackbone, create_backbone, export_state_dict

Teacher = Callable[[Tensor], Tensor]
MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])  # of ImageNet


def feature_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Return the distance of maps (B, C, h, w), a scalar; the target is resized to the cells of the prediction."""
    channels_last = target.permute(0, 2, 3, 1)
    standardised = F.layer_norm(channels_last, channels_last.shape[-1:]).permute(0, 3, 1, 2)
    standardised = F.interpolate(standardised, predicted.shape[2:], mode='bilinear', antialias=True)
    cosine = F.cosine_similarity(predicted, standardised, dim=1).mean()
    return 0.9 * (1 - cosine) + 0.1 * F.smooth_l1_loss(predicted, standardised)


def distill(
    student: SwinBackbone,
    teacher: Teacher,
    batches: Iterable[Tensor],
    steps: int,
    levels: Sequence[int] = (2, 3),
    lr: float = 5e-4,
) -> list[float]:
    """Train a backbone to predict the maps of a teacher, and return the loss of each step.

    Args:
        student: the backbone; stays in training mode.
        teacher: returns a map (B, C, h, w) for a batch; must be in evaluation mode.
        batches: normalised images, (B, 3, H, W), of the student's device.
        steps: number of batches to train on.
        levels: the outputs of the student that learn the map, each through a 1x1 convolution of its own.
        lr: the largest learning rate.
    """
    batches = iter(batches)
    first = next(batches)
    with torch.no_grad():
        channels = teacher(first).shape[1]
    projections = nn.ModuleList(nn.Conv2d(student.out_channels[level], channels, 1) for level in levels)
    projections.to(first.device)
    student.train()
    optimizer = torch.optim.AdamW([*student.parameters(), *projections.parameters()], lr=lr, weight_decay=0.05)
    schedule = OneCycleLR(optimizer, lr, total_steps=steps)
    losses = []
    for images in itertools.islice(itertools.chain([first], batches), steps):
        with torch.no_grad():
            target = teacher(images)
        maps = student(images)
        predictions = [project(maps[level]) for level, project in zip(levels, projections, strict=True)]
        loss = torch.stack([feature_loss(predicted, target) for predicted in predictions]).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def vision_transformer(model: Any) -> Teacher:
    """Return a teacher: the tokens of patches, which are the last ones, as a map."""
    patch = model.config.patch_size

    def features(images: Tensor) -> Tensor:
        height, width = images.shape[2] // patch, images.shape[3] // patch
        tokens = model(images).last_hidden_state[:, -height * width :]
        return tokens.transpose(1, 2).unflatten(2, (height, width))

    return features


class Photographs(torch.utils.data.Dataset):
    """Random square crops of the images in a folder, mirrored half of the time, (3, side, side)."""

    def __init__(self, folder: Path, side: int) -> None:
        self.files = sorted(path for path in folder.rglob('*') if path.suffix.lower() in ('.jpg', '.jpeg', '.png'))
        self.side = side

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        image = ImageOps.exif_transpose(Image.open(self.files[index])).convert('RGB')
        crop = random.uniform(0.4, 1) * min(image.size)
        left, top = random.uniform(0, image.width - crop), random.uniform(0, image.height - crop)
        image = image.resize((self.side, self.side), Image.Resampling.BICUBIC, (left, top, left + crop, top + crop))
        pixels = (np.asarray(image) / 255 - MEAN) / STD
        mirrored = pixels[:, ::-1] if random.random() < 0.5 else pixels
        return torch.from_numpy(np.ascontiguousarray(mirrored.transpose(2, 0, 1), np.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path)
    parser.add_argument('--teacher', required=True, help='name or folder of a model for transformers')
    parser.add_argument('--student', default='swin_t')
    parser.add_argument('--checkpoint', help='weights from which the student starts')
    parser.add_argument('--epochs', type=int, default=100)
    parser.add_argument('--batch-size', type=int, default=32)
    parser.add_argument('--side', type=int, default=224, help='of the crops, a multiple of the patches of the teacher')
    parser.add_argument('--out', required=True)
    args = parser.parse_args()
    from transformers import AutoModel

    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    teacher = vision_transformer(AutoModel.from_pretrained(args.teacher).eval().to(device))
    student = create_backbone(args.student, args.checkpoint).to(device)
    photographs = Photographs(args.folder, args.side)
    loader = torch.utils.data.DataLoader(photographs, args.batch_size, shuffle=True, num_workers=os.cpu_count() or 0)
    batches = (images.to(device) for _ in range(args.epochs) for images in loader)
    losses = distill(student, teacher, batches, steps=args.epochs * len(loader))
    torch.save(export_state_dict(student), args.out)
    print(f'loss {losses[0]:.3f} at the start, {losses[-1]:.3f} at the end')


if __name__ == '__main__':
    main()
