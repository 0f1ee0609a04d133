"""Measure whether Mona and LoRA help a detector that has few labelled images, on blood cells, beside full fine-tuning.

    git clone https://github.com/Shenggan/BCCD_Dataset
    python benchmarks/adapters_boxes.py BCCD_Dataset/BCCD --json benchmarks/adapters_boxes.json --weights build/adapters

The data are BCCD: photographs of blood under a microscope with boxes of red cells, white cells and platelets. The
detector is mmdet's FCOS with narrow layers. The methods (all but that of norms alone), the learning rates, and the
base, which SimMIM pretrained on frames of streets, are those of ``adapters.py``, whose folder ``--weights`` is. Each
method has the rate that is better on val, with a seed that the table does not use. A seed draws the labelled images of
train, the head and the order; AP is that of COCO on all images of test. A run that is stopped continues when it is
started again.
"""

import argparse
import contextlib
import functools
import io
import json
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from adapters import METHODS, SEED_OF_RATES, measure, only_method_trains, trained_share
from bench_host import processor
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.utils import register_all_modules
from mmengine.config import ConfigDict
from mmengine.logging import MMLogger
from mmengine.structures import InstanceData
from pretraining import ARCH, train
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

import swin_dense.mm  # noqa: F401 (registers SwinDense)
from swin_dense import load_checkpoint
from swin_dense.features.images import normalize, read_image
from swin_dense.utils.choices import IMAGENET_MEAN, IMAGENET_STD

BASE = 'SimMIM'
CLASSES = ('RBC', 'WBC', 'Platelets')
SIZE = (144, 192)  # of the photographs, which have 480 x 640 pixels
LABELS = 50
BATCH = 2
WIDTH = 64
FCOS = {
    'type': 'FCOS',
    'neck': {'type': 'FPN', 'out_channels': WIDTH, 'num_outs': 4},
    'bbox_head': {
        'type': 'FCOSHead',
        'num_classes': len(CLASSES),
        'in_channels': WIDTH,
        'feat_channels': WIDTH,
        'stacked_convs': 2,
        'strides': [4, 8, 16, 32],
        'regress_ranges': ((-1, 16), (16, 32), (32, 64), (64, 1e8)),
        'norm_cfg': {'type': 'GN', 'num_groups': 8},
        'norm_on_bbox': True,
        'centerness_on_reg': True,
        'dcn_on_last_conv': False,
        'center_sampling': True,
        'conv_bias': True,
        'loss_bbox': {'type': 'GIoULoss', 'loss_weight': 1.0},
    },
    'test_cfg': {
        'nms_pre': 1000,
        'min_bbox_size': 0,
        'score_thr': 0.05,
        'nms': {'type': 'nms', 'iou_threshold': 0.6},
        'max_per_img': 100,
    },
}


def read_photographs(root, split):
    """Return photographs (N, 3, H, W), normalised, and of each the boxes (M, 4), in its pixels, and classes (M,)."""
    photographs, objects = [], []
    for name in (root / 'ImageSets' / 'Main' / f'{split}.txt').read_text().split():
        photograph = read_image(root / 'JPEGImages' / f'{name}.jpg')
        shrink = torch.tensor([SIZE[1] / photograph.shape[2], SIZE[0] / photograph.shape[1]] * 2)
        photographs.append(F.interpolate(photograph[None], SIZE, mode='bilinear', antialias=True)[0])
        boxes, classes = [], []
        for entry in ET.parse(root / 'Annotations' / f'{name}.xml').iter('object'):
            box = [float(entry.findtext(f'bndbox/{side}')) for side in ('xmin', 'ymin', 'xmax', 'ymax')]
            if box[0] < box[2] and box[1] < box[3]:
                boxes.append(box)
                classes.append(CLASSES.index(entry.findtext('name')))
        objects.append((torch.tensor(boxes).view(-1, 4) * shrink, torch.tensor(classes, dtype=torch.long)))
    return normalize(torch.stack(photographs), IMAGENET_MEAN, IMAGENET_STD), objects


def sample(boxes=None, classes=None):
    """Return mmdet's description of a photograph, with its objects for the training."""
    meta = {'img_shape': SIZE, 'ori_shape': SIZE, 'pad_shape': SIZE, 'batch_input_shape': SIZE, 'scale_factor': (1, 1)}
    described = DetDataSample(metainfo=meta)
    if boxes is not None:
        described.gt_instances = InstanceData(bboxes=boxes, labels=classes)
    return described


def draw(chosen, generator, photographs, objects):
    """Return a batch of random photographs among those chosen, half of them mirrored, and their objects."""
    batch, samples = [], []
    for index in chosen[torch.randint(len(chosen), (BATCH,), generator=generator)].tolist():
        photograph, (boxes, classes) = photographs[index], objects[index]
        if torch.rand((), generator=generator) < 0.5:
            photograph = photograph.flip(-1)
            boxes = torch.stack([SIZE[1] - boxes[:, 2], boxes[:, 1], SIZE[1] - boxes[:, 0], boxes[:, 3]], 1)
        batch.append(photograph)
        samples.append(sample(boxes, classes))
    return torch.stack(batch), samples


def average_precision(model, photographs, objects):
    """Return AP and AP50 of COCO, in %."""
    truth, found = [], []
    for index, (photograph, (boxes, classes)) in enumerate(zip(photographs, objects, strict=True)):
        truth += entries(index, boxes, classes, torch.ones(len(boxes)), len(truth) + 1)
        with torch.no_grad():
            instances = model.predict(photograph[None], [sample()], rescale=False)[0].pred_instances
        found += entries(index, instances.bboxes, instances.labels, instances.scores, len(found) + 1)
    coco, results = COCO(), COCO()
    images = [{'id': index, 'height': SIZE[0], 'width': SIZE[1]} for index in range(len(photographs))]
    categories = [{'id': index, 'name': name} for index, name in enumerate(CLASSES)]
    with contextlib.redirect_stdout(io.StringIO()):
        for one, annotations in ((coco, truth), (results, found)):
            one.dataset = {'images': images, 'categories': categories, 'annotations': annotations}
            one.createIndex()
        evaluation = COCOeval(coco, results, 'bbox')
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {'AP': 100 * float(evaluation.stats[0]), 'AP50': 100 * float(evaluation.stats[1])}


def entries(image, boxes, classes, scores, first):
    """Return the objects of an image as COCO writes them."""
    sides = np.asarray(torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1), dtype=float)
    return [
        {
            'id': first + index,
            'image_id': image,
            'category_id': int(classes[index]),
            'bbox': side.tolist(),
            'area': float(side[2] * side[3]),
            'iscrowd': 0,
            'score': float(scores[index]),
        }
        for index, side in enumerate(sides)
    ]


def tune(weights, data, steps, method, seed, rate):
    """Return AP of a detector trained with few labelled photographs, and the trained share of the backbone.

    It is that on test, or on val for the seed that chooses the learning rate.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    backbone = {'type': 'SwinDense', **ARCH, **METHODS[method]}
    channels = [ARCH['embed_dims'] * 2**stage for stage in range(4)]
    neck = {**FCOS['neck'], 'in_channels': channels}
    model = MODELS.build(ConfigDict({**FCOS, 'backbone': backbone, 'neck': neck}))
    torch.manual_seed(seed)  # so that the head is the same for each method
    model.neck.init_weights()
    model.bbox_head.init_weights()
    load_checkpoint(model.backbone, weights, log=None)
    only_method_trains(model.backbone, method)
    photographs, objects = data['train']
    chosen = torch.randperm(len(photographs), generator=generator)[:LABELS]
    clock = time.time()

    def step_loss():
        return sum(model.loss(*draw(chosen, generator, photographs, objects)).values())

    loss = train(model.train(), steps, rate, step_loss)
    return {
        **average_precision(model.eval(), *data['val' if seed == SEED_OF_RATES else 'test']),
        'last loss': loss,
        'trained share': trained_share(model.backbone),
        'seconds': time.time() - clock,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('root', type=Path, help='the folder BCCD of BCCD_Dataset')
    parser.add_argument('--json', type=Path, required=True, help='an existing file is continued')
    parser.add_argument('--weights', type=Path, required=True, help='the folder with the base that adapters.py wrote')
    parser.add_argument('--seeds', type=int, default=5)
    parser.add_argument('--steps', type=int, default=200, help='of each fine-tuning')
    args = parser.parse_args()
    torch.set_num_threads(1)
    register_all_modules()
    MMLogger.get_instance('mmengine', log_level='WARNING')  # its heads list their parameters
    data = {split: read_photographs(args.root, split) for split in ('train', 'val', 'test')}
    report = {
        'processor': processor(),
        'threads': 1,
        'torch': torch.__version__,
        'arch': ARCH,
        'image size': SIZE,
        'images of test': len(data['test'][0]),
        'labelled images': LABELS,
        'batch': BATCH,
        'steps': args.steps,
        'rows': json.loads(args.json.read_text())['rows'] if args.json.exists() else [],
    }
    weights, _ = torch.load(args.weights / f'{BASE}.pth', weights_only=True)
    tune_row = functools.partial(tune, weights, data, args.steps)
    measure(args, report, BASE, 'AP', tune_row, [method for method in METHODS if method != 'norms'])


if __name__ == '__main__':
    main()
