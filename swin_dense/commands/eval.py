"""Measure the top-1 and top-5 accuracy of a classifier on a folder of images.

    swin-dense eval imagenet/val --checkpoint swin_t.in1k
    swin-dense eval imagenet/val --checkpoint swinv2_tiny_window16_256.pth --size 256 --json

FOLDER must contain one folder of images per class; sorted by name, they are the classes 0, 1 and so on. The command
resizes, crops (below 384 pixels) and normalises images as in the published evaluations.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from swin_dense.commands._options import (
    add_adapter,
    add_backbone,
    add_loading,
    add_normalization,
    add_size,
    backbone_options,
    check_backbone,
    check_file,
    check_integers,
    normalization_of,
)
from swin_dense.features.listing import lines_in
from swin_dense.utils import packages
from swin_dense.utils.signals import stop_signals

GROUP = 'backbones'
EXTRA = 'features'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('folder', type=Path, help='folder with one folder of images per class')
    add_backbone(parser, required=True)
    add_adapter(parser)
    add_normalization(parser)
    add_size(parser, 'must be a square (default: 224)', default=(224, 224))
    parser.add_argument(
        '--crop',
        action=argparse.BooleanOptionalAction,
        help='crop the centre without distortion, or resize the whole image (default: --crop below 384 pixels)',
    )
    parser.add_argument(
        '--classes',
        type=Path,
        metavar='FILE',
        help='text file with the folder names in the order of the classes, one per line',
    )
    add_loading(parser, batch_size=32)
    parser.add_argument('--json', action='store_true', help='print the result as JSON')


def run(args: argparse.Namespace) -> int:
    check_integers(args, batch_size=1, workers=0)
    size, width = args.size
    if size != width:
        raise ValueError(f'--size must be a square, got {size} {width}')
    if not args.folder.is_dir():
        raise FileNotFoundError(f'there is no folder {args.folder}')
    options_of_images = normalization_of(args)
    if args.classes is not None:
        check_file(args.classes)
    check_backbone(args)
    packages.require('this command', 'tqdm')
    # These import torch, which --help does not need.
    from swin_dense.analysis.accuracy import WHOLE_FROM, evaluate, list_labelled
    from swin_dense.commands._backbone import device_of
    from swin_dense.commands._progress import Progress, say
    from swin_dense.features import Normalization
    from swin_dense.features.inference import on_device
    from swin_dense.models.classifier import create_classifier

    device, options = device_of(args), backbone_options(args)
    weights = {'adapter_checkpoint': args.adapter_checkpoint, 'prefix': args.prefix}
    classifier = on_device(create_classifier(args.checkpoint, args.arch, **weights, **options), device)
    how = Normalization(**options_of_images)
    how.check_for(classifier.backbone)
    classes = [line.strip() for line in lines_in(args.classes)] if args.classes else None
    images = list_labelled(args.folder, classes, classifier.head.out_features)
    crop = size < WHOLE_FROM if args.crop is None else args.crop
    with stop_signals() as received, Progress(len(images)) as progress:
        scores = evaluate(
            classifier,
            images,
            size,
            crop=crop,
            normalization=how,
            channels=classifier.backbone.in_channels,
            batch_size=args.batch_size,
            workers=args.workers,
            on_image=progress.show,
            should_stop=lambda: bool(received),
        )
    result = scores.as_dict()
    for reason in scores.broken.values():
        say(f'not read: {reason}')
    if args.json:
        settings = {'window': classifier.backbone.window_size, 'size': size, 'crop': crop, **options_of_images}
        print(json.dumps({**result, 'of': len(images), **settings}, indent=2))
    elif scores.images:
        percent = f'top-1 {result["top1"]:.2f} %, top-5 {result["top5"]:.2f} %'
        print(f'{percent} of {scores.images} images at {size} pixels')
    if received:
        return 128 + received[0]
    return 1 if scores.broken or not scores.images else 0
