"""Measure top-1 and top-5 accuracy of a checkpoint's classifier on a folder of images.

    swin-dense eval imagenet/val --checkpoint swin_tiny_patch4_window7_224.pth
    swin-dense eval imagenet/val --checkpoint swinv2_tiny_window16_256.pth --size 256 --out scores.jsonl

FOLDER holds one folder of images per class; their names in order are the classes 0, 1 and so on. Images are resized,
cropped (below 384 pixels) and normalised as for the published accuracies. With --out, the same command goes on where it
stopped.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from swin_dense.classification.classifier import create_classifier
from swin_dense.classification.evaluate import Record, crops_at, evaluate, list_labelled
from swin_dense.features.inference import on_device
from swin_dense.features.job import stop_signals, weights_digest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('folder', type=Path, help='with a folder of images per class')
    parser.add_argument('--checkpoint', required=True, help='classifier of any family, a file or an address')
    parser.add_argument('--arch', help='swin_t to swin_l, swinv2_t to swinv2_l (default: as the checkpoint tells)')
    parser.add_argument('--window-size', type=int, metavar='N', help='in tokens (default: as the checkpoint tells)')
    parser.add_argument('--size', type=int, default=224, help='side of the input in pixels (default: %(default)s)')
    parser.add_argument(
        '--crop',
        action=argparse.BooleanOptionalAction,
        help='take the middle of an image, undistorted, else all of it (default: --no-crop from 384 pixels on)',
    )
    parser.add_argument('--classes', type=Path, metavar='FILE', help='names of the folders in order, one a line')
    parser.add_argument('--out', type=Path, metavar='FILE', help='keep what was found, to go on after an interruption')
    parser.add_argument('--batch-size', type=int, default=32, help='(default: %(default)s)')
    parser.add_argument('--workers', type=int, default=2, help='reading processes (default: %(default)s)')
    parser.add_argument('--device', help='(default: cuda where there is one, else cpu)')
    parser.add_argument('--json', action='store_true', help='print the result as JSON')


def run(args: argparse.Namespace) -> int:
    from swin_dense.commands._progress import progress_bar, say

    options: dict[str, Any] = {} if args.window_size is None else {'window_size': args.window_size}
    classifier = create_classifier(args.checkpoint, args.arch, **options)
    classifier = on_device(classifier, args.device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    classes = args.classes.read_text().split() if args.classes else None
    images = list_labelled(args.folder, classes, classifier.head.out_features)
    crop = crops_at(args.size) if args.crop is None else args.crop
    settings = {
        'weights': weights_digest(classifier),
        'window': classifier.backbone.window_size,
        'size': args.size,
        'crop': crop,
    }
    record = Record(args.out, settings) if args.out else None
    with stop_signals() as received, progress_bar() as progress:
        task = progress.add_task('', total=len(images))
        scores = evaluate(
            classifier,
            args.folder,
            images,
            args.size,
            crop=crop,
            batch_size=args.batch_size,
            workers=args.workers,
            record=record,
            on_image=lambda: progress.advance(task),
            should_stop=lambda: bool(received),
        )
    if record is not None:
        record.close()
    result = scores.as_dict()
    for name, reason in scores.broken.items():
        say(f'not read: {name}: {reason}')
    if args.json:
        print(json.dumps({**result, 'of': len(images), **settings}, indent=2))
    elif scores.images:
        percent = f'top-1 {result["top1"]:.2f} %, top-5 {result["top5"]:.2f} %'
        print(f'{percent} of {scores.images} images at {args.size} pixels')
    if received:
        return 128 + received[0]
    return 1 if scores.broken or not scores.images else 0
