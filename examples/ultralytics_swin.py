"""A YOLO head of Ultralytics on a Swin, trained as Ultralytics trains.

    python examples/ultralytics_swin.py coco8.yaml --checkpoint swin_t.in1k

Ultralytics' parser knows one module with several outputs, ``TorchVision``, of which ``Index`` takes a map; a module of
ours takes that place. The sides of images must be multiples of 32. Ultralytics is licensed under AGPL-3.0.
"""

import argparse
from pathlib import Path

import torch
from ultralytics import YOLO
from ultralytics.nn import tasks

from swin_dense import create_backbone
from swin_dense.images.presets import IMAGENET_MEAN, IMAGENET_STD

# The head of YOLOv8 on maps of strides 8, 16 and 32.
CONFIG = """\
nc: 80
scales: {n: [0.33, 0.25, 1024], s: [0.33, 0.50, 1024]}
backbone:
  - [-1, 1, TorchVision, [768, swin_t, CHECKPOINT]]
  - [0, 1, Index, [192, 1]]
  - [0, 1, Index, [384, 2]]
  - [0, 1, Index, [768, 3]]
head:
  - [-1, 1, nn.Upsample, [None, 2, nearest]]
  - [[-1, 2], 1, Concat, [1]]
  - [-1, 3, C2f, [512]]
  - [-1, 1, nn.Upsample, [None, 2, nearest]]
  - [[-1, 1], 1, Concat, [1]]
  - [-1, 3, C2f, [256]]  # 9
  - [-1, 1, Conv, [256, 3, 2]]
  - [[-1, 6], 1, Concat, [1]]
  - [-1, 3, C2f, [512]]  # 12
  - [-1, 1, Conv, [512, 3, 2]]
  - [[-1, 3], 1, Concat, [1]]
  - [-1, 3, C2f, [1024]]  # 15
  - [[9, 12, 15], 1, Detect, [nc]]
"""


class Swin(torch.nn.Module):
    """A Swin for images from 0 to 1, as Ultralytics passes them; it returns the image and maps of strides 8 to 32."""

    def __init__(self, name: str, checkpoint: str | None = None) -> None:
        super().__init__()
        self.backbone = create_backbone(name, checkpoint, out_indices=(1, 2, 3))
        self.register_buffer('mean', torch.tensor(IMAGENET_MEAN)[:, None, None])
        self.register_buffer('std', torch.tensor(IMAGENET_STD)[:, None, None])

    def forward(self, img: torch.Tensor) -> list[torch.Tensor]:
        return [img, *self.backbone((img - self.mean) / self.std)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', help='data set as Ultralytics describes it, a .yaml file')
    parser.add_argument('--checkpoint', default='swin_t.in1k', help='weights of the backbone, as of load_checkpoint')
    parser.add_argument('--epochs', type=int, default=100)
    args = parser.parse_args()
    tasks.TorchVision = Swin
    # Its parser reads a file of the current folder, and no path with slashes.
    Path('yolo-swin.yaml').write_text(CONFIG.replace('CHECKPOINT', args.checkpoint))
    YOLO('yolo-swin.yaml').train(data=args.data, epochs=args.epochs)


if __name__ == '__main__':
    main()
