"""Train torchvision's Mask R-CNN with a Swin backbone on a data set in COCO format, and evaluate it with pycocotools.

    python examples/torchvision_mask_rcnn.py DATA OUT --checkpoint swin_tiny_patch4_window7_224.pth --epochs 12

DATA contains annotations/instances_train2017.json and instances_val2017.json, train2017/ and val2017/. The script
writes metrics.json, model.pth and images with predictions to OUT. It needs torchvision and pycocotools, but no mm
package. ``--small`` trains the network of configs/demo from scratch, which takes minutes on a CPU with the data of
tools/make_demo_data.py.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pycocotools import mask as run_lengths
from pycocotools.cocoeval import COCOeval
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from torchvision.datasets import CocoDetection, wrap_dataset_for_transforms_v2
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelMaxPool
from torchvision.transforms import v2
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from swin_dense import create_backbone

WARM_UP_STEPS = 30
NOT_DECAYED = ('norm', 'relative_position_bias_table', 'absolute_pos_embed')


class SwinFPN(nn.Module):
    """A Swin with a feature pyramid network. RetinaNet and FCOS take ``LastLevelP6P7`` in place of the pooling."""

    def __init__(self, name: Any, checkpoint: Any = None, out_channels: int = 256, **options: Any) -> None:
        super().__init__()
        self.body = create_backbone(name, checkpoint, **options).train()
        self.fpn = FeaturePyramidNetwork(list(self.body.out_channels), out_channels, LastLevelMaxPool())
        self.out_channels = out_channels  # read by torchvision's detectors

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.fpn(OrderedDict((str(level), maps) for level, maps in enumerate(self.body(images))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data', type=Path, metavar='DATA', help='folder of a data set in COCO format')
    parser.add_argument('out', type=Path, metavar='OUT', help='folder to write to')
    parser.add_argument('--name', default='swin_t', help='name of the backbone (default: %(default)s)')
    parser.add_argument('--checkpoint', help='pretrained weights of the backbone')
    parser.add_argument(
        '--small', action='store_true', help='train the small network of configs/demo, without enlarging images'
    )
    parser.add_argument('--epochs', type=int, default=12, help='(default: %(default)s)')
    parser.add_argument('--batch-size', type=int, default=2, help='(default: %(default)s)')
    parser.add_argument('--lr', type=float, default=1e-4, help='learning rate (default: %(default)s)')
    parser.add_argument('--workers', type=int, default=2, help='worker processes of the loader (default: %(default)s)')
    parser.add_argument('--pictures', type=int, default=6, help='validation images to draw (default: %(default)s)')
    parser.add_argument(
        '--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='(default: %(default)s)'
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    train_set, val_set = open_split(args.data, 'train'), open_split(args.data, 'val')
    num_classes = max(train_set.coco.getCatIds()) + 1  # category ids have gaps; 0 is the background
    if args.small:
        model = small_mask_rcnn(num_classes)
    else:
        model = MaskRCNN(SwinFPN(args.name, args.checkpoint), num_classes=num_classes)
    model.to(args.device)
    started = time.perf_counter()
    steps = train(model, train_set, args)
    seconds = {'train': time.perf_counter() - started}
    torch.save(model.state_dict(), args.out / 'model.pth')
    metrics = evaluate(model, val_set, args)
    seconds['test'] = time.perf_counter() - started - seconds['train']
    metrics |= {'steps': steps, 'seconds': {name: round(value, 1) for name, value in seconds.items()}}
    (args.out / 'metrics.json').write_text(json.dumps(metrics, indent=2) + '\n')
    print(json.dumps(metrics, indent=2))


class Instances(CocoDetection):
    """A split of COCO without crowd annotations. The training split omits images without annotations."""

    def __init__(self, data: Path, split: str) -> None:
        super().__init__(data / f'{split}2017', str(data / 'annotations' / f'instances_{split}2017.json'))
        if split == 'train':
            self.ids = [image for image in self.ids if self._load_target(image)]

    def _load_target(self, id: int) -> list[dict]:
        return [annotation for annotation in super()._load_target(id) if not annotation['iscrowd']]


def open_split(data: Path, split: str) -> Instances:
    """Return a split of a data set: pairs of an image, (3, H, W) between 0 and 1, and a target dict for torchvision."""
    split_set = Instances(data, split)
    flips = [v2.RandomHorizontalFlip()] if split == 'train' else []
    split_set.transforms = v2.Compose([v2.ToImage(), *flips, v2.ToDtype(torch.float32, scale=True)])
    return wrap_dataset_for_transforms_v2(split_set, target_keys=('image_id', 'boxes', 'labels', 'masks'))


def small_mask_rcnn(num_classes: int) -> MaskRCNN:
    """Build the network of configs/demo/mask-rcnn_swin-demo_fpn.py with torchvision's modules."""
    channels, hidden = 64, 256
    arch = {'embed_dims': 32, 'depths': (2, 2, 2, 2), 'num_heads': (1, 2, 4, 8)}
    return MaskRCNN(
        SwinFPN(arch, out_channels=channels, drop_path_rate=0.0),
        min_size=160,
        max_size=256,
        rpn_anchor_generator=AnchorGenerator(tuple((4 * 2**level,) for level in range(2, 7)), ((0.5, 1.0, 2.0),) * 5),
        rpn_pre_nms_top_n_train=500,
        rpn_pre_nms_top_n_test=500,
        rpn_post_nms_top_n_train=200,
        rpn_post_nms_top_n_test=100,
        box_batch_size_per_image=64,
        box_head=TwoMLPHead(channels * 7**2, hidden),
        box_predictor=FastRCNNPredictor(hidden, num_classes),
        mask_head=MaskRCNNHeads(channels, (channels, channels), 1),
        mask_predictor=MaskRCNNPredictor(channels, channels, num_classes),
    )


def parameter_groups(model: nn.Module) -> list[dict]:
    """Return two parameter groups: norms and position tables have no weight decay."""
    not_decayed = [parameter for name, parameter in model.named_parameters() if any(key in name for key in NOT_DECAYED)]
    ids = set(map(id, not_decayed))
    others = [parameter for parameter in model.parameters() if id(parameter) not in ids]
    return [{'params': others}, {'params': not_decayed, 'weight_decay': 0.0}]


def train(model: nn.Module, data: Instances, args: argparse.Namespace) -> int:
    """Train with AdamW, a warm-up and a cosine schedule, and return the number of steps."""
    loader = DataLoader(
        data,
        args.batch_size,
        shuffle=True,
        num_workers=args.workers,
        collate_fn=lambda batch: tuple(zip(*batch, strict=True)),
    )
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=args.lr, weight_decay=0.05)
    warm_up = lr_scheduler.LinearLR(optimizer, 0.01, total_iters=WARM_UP_STEPS)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, max(1, args.epochs * len(loader)))
    schedule = lr_scheduler.ChainedScheduler([warm_up, cosine])
    model.train()
    for epoch in range(args.epochs):
        for step, (images, targets) in enumerate(loader):
            images = [image.to(args.device) for image in images]
            targets = [{key: value.to(args.device) for key, value in with_labels.items() if key != 'image_id'}
                       for with_labels in targets]  # fmt: skip
            losses = model(images, targets)
            loss = sum(losses.values())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            schedule.step()
            if step % 20 == 0:
                print(f'epoch {epoch + 1}/{args.epochs}, step {step}/{len(loader)}, loss {loss.item():.3f}', flush=True)
    return args.epochs * len(loader)


@torch.no_grad()
def evaluate(model: nn.Module, data: Instances, args: argparse.Namespace) -> dict[str, float]:
    """Return the average precision of boxes and masks, and save the first images with predictions."""
    model.eval()
    results = []
    for index in range(len(data)):
        image, _ = data[index]
        found = {key: value.cpu() for key, value in model([image.to(args.device)])[0].items()}
        results += coco_results(data.ids[index], found)
        if index < args.pictures:
            v2.functional.to_pil_image(painted(image, found, data.coco)).save(args.out / f'{data.ids[index]}.jpg')
    metrics = {}
    for kind in ('bbox', 'segm'):
        evaluation = COCOeval(data.coco, data.coco.loadRes(results), kind) if results else None
        if evaluation is not None:
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        metrics[f'{kind}_mAP'] = float(evaluation.stats[0]) if evaluation else 0.0
        metrics[f'{kind}_mAP_50'] = float(evaluation.stats[1]) if evaluation else 0.0
    return metrics


def coco_results(image_id: int, found: dict[str, Tensor]) -> list[dict]:
    """Convert the detections in an image to COCO's result format."""
    results, keys = [], ('boxes', 'labels', 'scores', 'masks')
    for box, label, score, mask in zip(*(found[key] for key in keys), strict=True):
        left, top, right, bottom = box.tolist()
        encoded = run_lengths.encode(np.asfortranarray((mask[0] > 0.5).byte().numpy()))
        results.append(
            {
                'image_id': image_id,
                'category_id': int(label),
                'score': float(score),
                'bbox': [left, top, right - left, bottom - top],
                'segmentation': {'size': encoded['size'], 'counts': encoded['counts'].decode()},
            }
        )
    return results


def painted(image: Tensor, found: dict[str, Tensor], coco) -> Tensor:
    """Draw masks, boxes and class names of detections with a score of at least 0.5, and return (3, H, W) uint8."""
    sure = found['scores'] >= 0.5
    picture = v2.functional.to_dtype(image.as_subclass(Tensor), torch.uint8, scale=True)
    names = [coco.cats[int(label)]['name'] for label in found['labels'][sure]]
    if not names:
        return picture
    picture = draw_segmentation_masks(picture, found['masks'][sure, 0] > 0.5, alpha=0.5)
    return draw_bounding_boxes(picture, found['boxes'][sure], names)


if __name__ == '__main__':
    main()
