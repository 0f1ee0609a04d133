"""Run a detector or segmentor on images; write annotated images and JSON.

    swin-dense predict mine.py work_dirs/mine/epoch_12.pth photo.jpg other.png --out predictions
    swin-dense predict model.onnx photo.jpg other.png --out predictions

The .onnx file must come from `swin-dense export CONFIG CHECKPOINT FILE`; it needs neither torch nor the frameworks. For
each image PHOTO.jpg, the command writes PHOTO.painted.jpg and PHOTO.json. With a detector, the JSON lists class, score,
box (x1, y1, x2, y2 in pixels) and mask (COCO's RLE) of every instance. With a segmentor, it lists the fraction of
pixels of every class, and PHOTO.labels.png contains the class of every pixel (in 16 bits if one is above 255). With a
panoptic model, it lists id, class and fraction of pixels of every segment, and PHOTO.panoptic.png contains the ids as
COCO does: red + 256 green + 256^2 blue.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from swin_dense.commands._mm import read_config
from swin_dense.commands._options import add_device, add_force, add_settings, check_file
from swin_dense.utils import checks
from swin_dense.utils.atomic import check_free, written_whole

if TYPE_CHECKING:
    from swin_dense.runtime import Prediction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'files',
        nargs='+',
        metavar='FILE',
        help='CONFIG CHECKPOINT IMAGE...: config file or name of a recipe, file or address of the weights of the '
        'whole model, and image files; or MODEL.onnx IMAGE...',
    )
    parser.add_argument(
        '--out', type=Path, default=Path('predictions'), help='folder for the results (default: %(default)s)'
    )
    add_force(parser)
    add_settings(parser)
    parser.add_argument(
        '--score', type=float, default=0.3, help='omit instances with a lower score (default: %(default)s)'
    )
    add_device(parser)
    parser.add_argument(
        '--runtime', choices=['onnxruntime', 'openvino'], help='library that runs an .onnx file (default: onnxruntime)'
    )


def run(args: argparse.Namespace) -> int:
    checks.rate('--score', args.score)
    is_exported = args.files[0].endswith('.onnx')
    model, images = args.files[: 2 - is_exported], args.files[2 - is_exported :]
    if not images:
        raise ValueError('give a config, a checkpoint and images, or an .onnx file and images')
    if is_exported and (args.device is not None or args.set):
        raise ValueError('--device and --set need a config and a checkpoint; an .onnx file runs on the CPU (--runtime)')
    if args.runtime is not None and not is_exported:
        raise ValueError('--runtime needs an .onnx file')
    for path in images if '://' in model[-1] else [model[-1], *images]:
        check_file(path)
    counts = Counter(Path(path).stem for path in images)
    twice = [stem for stem, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f'several images have the name {", ".join(twice)}; write them to separate folders (--out)')
    for stem in counts:
        for ending in ('painted.jpg', 'labels.png', 'panoptic.png', 'json'):
            check_free(args.out / f'{stem}.{ending}', args.force)
    predict = _predictor(model, args)
    from swin_dense.runtime import pictures  # not needed for --help

    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for path in images:
        try:
            pictures.read(path)
        except ValueError as error:
            print(f'swin-dense predict: {error}', file=sys.stderr)
            failed += 1
            continue
        write(args.out / Path(path).stem, predict(path))
    print(f'{len(images) - failed} of {len(images)} images are in {args.out}')
    return 1 if failed else 0


def _predictor(model: list[str], args: argparse.Namespace) -> Callable[[str], Prediction]:
    if len(model) == 1:
        from swin_dense import runtime

        return runtime.load(model[0], runtime=args.runtime or 'onnxruntime', score=args.score).predict
    args.config = model[0]
    config = read_config(args)
    from swin_dense.commands._backbone import device_of
    from swin_dense.mm.predict import Predictor

    return Predictor(config, model[1], str(device_of(args)), args.score)


def write(stem: Path, prediction: Prediction) -> None:
    """Write the results of one image, the JSON last, so that it marks a complete result."""
    import numpy as np
    from PIL import Image

    pictures = {'painted.jpg': prediction.painted}
    if prediction.labels is not None:  # PNG has integers of 8 and 16 bits
        pictures['labels.png'] = prediction.labels.astype('uint8' if prediction.labels.max() < 256 else 'uint16')
    if prediction.panoptic is not None:
        ids = prediction.panoptic
        pictures['panoptic.png'] = np.stack([ids % 256, ids // 256 % 256, ids // 256**2], 2).astype(np.uint8)
    for ending, pixels in pictures.items():
        with written_whole(stem.with_name(f'{stem.name}.{ending}')) as unfinished:
            Image.fromarray(pixels).save(unfinished.path, quality=95)
    with written_whole(stem.with_name(f'{stem.name}.json')) as unfinished:
        unfinished.path.write_text(json.dumps(prediction.record, indent=2) + '\n')
