"""Run a detector or segmentor on images; write annotated images and JSON.

    swin-dense predict mine.py work_dirs/mine/epoch_12.pth photo.jpg other.png --out predictions
    swin-dense predict model.onnx photos/ --out predictions

The .onnx file must come from `swin-dense export CONFIG CHECKPOINT --out FILE`; it needs neither torch nor the
frameworks. For each image PHOTO.jpg, the command writes PHOTO.painted.jpg and PHOTO.json. With a detector, the JSON
lists class, score, box (x1, y1, x2, y2 in pixels) and mask (COCO's RLE) of every instance. With a segmentor, it lists
the fraction of pixels of every class, and PHOTO.labels.png contains the class of every pixel (in 16 bits if one is
above 255). With a panoptic model, it lists id, class and fraction of pixels of every segment, and PHOTO.panoptic.png
contains the ids as COCO does: red + 256 green + 256^2 blue.

Results lie in the subfolders that the images lie in. An image that cannot be read or predicted is named, and the others
are predicted (exit status 1). For large images in tiles, see examples/predict_large.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import swin_dense
from swin_dense.commands._mm import read_config
from swin_dense.commands._options import add_device, add_force, add_settings, check_file
from swin_dense.images.listing import is_image, walk
from swin_dense.utils import checks
from swin_dense.utils.addresses import is_address
from swin_dense.utils.atomic import check_free, remove, write_json, written_whole
from swin_dense.utils.choices import PRECISIONS, RUNTIMES
from swin_dense.utils.errors import is_out_of_memory
from swin_dense.utils.signals import stop_signals

GROUP = 'models'
EXTRA = 'mm'
_ENDINGS = ('json', 'painted.jpg', 'labels.png', 'panoptic.png')
_LARGEST_JPEG = 65500  # pixels of a side


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'files',
        nargs='+',
        metavar='FILE',
        help='CONFIG CHECKPOINT IMAGE...: config file or name of a recipe, file or address of the weights of the '
        'whole model, and image files or folders of images; or MODEL.onnx IMAGE...',
    )
    parser.add_argument(
        '--out', type=Path, default=Path('predictions'), help='folder for the results (default: %(default)s)'
    )
    add_force(parser)
    parser.add_argument('--resume', action='store_true', help='leave out images whose JSON exists')
    add_settings(parser)
    parser.add_argument('--score', type=float, default=0.3, help='omit instances with a lower score (default: 0.3)')
    add_device(parser)
    parser.add_argument('--runtime', choices=RUNTIMES, help='library that runs an .onnx file (default: onnxruntime)')
    parser.add_argument(
        '--precision',
        choices=PRECISIONS,
        help='in which --runtime openvino computes; bfloat16 needs a processor that has it (default: float32)',
    )


def run(args: argparse.Namespace) -> int:
    checks.rate('--score', args.score)
    if args.resume and args.force:
        raise ValueError('--resume keeps results and --force replaces them; leave one of them out')
    model, images, unread = _files(args)
    predictor = _predictor(model, args)
    failed = 0
    for message in unread:
        print(f'swin-dense predict: {message}', file=sys.stderr)
    with stop_signals() as received:
        for image, out in images.items():
            if received:
                return 128 + received[0]
            if args.resume and _file(out, 'json').exists():
                continue
            for ending in _ENDINGS:  # of an earlier run
                remove(_file(out, ending))
            try:
                prediction = predictor.predict(image)
            except Exception as error:  # the runtimes and frameworks raise exceptions of any type
                failed += 1
                if os.environ.get('SWIN_DENSE_TRACEBACK'):
                    traceback.print_exc()
                lack = (
                    'too little memory; examples/predict_large.py predicts tiles: ' if is_out_of_memory(error) else ''
                )
                print(f'swin-dense predict: {image}: {lack}{" ".join(str(error).split())}', file=sys.stderr)
            else:
                _write(out, prediction)
    print(f'{len(images) - failed} of {len(images)} images are in {args.out}')
    return 1 if failed or unread else 0


def _files(args: argparse.Namespace) -> tuple[list[str], dict[str, Path], list[str]]:
    """Return the files of the model, the images with the path of their results, and what could not be searched."""
    is_exported = args.files[0].endswith('.onnx')
    model, places = args.files[: 2 - is_exported], args.files[2 - is_exported :]
    if not places:
        raise ValueError('give a config, a checkpoint and images, or an .onnx file and images')
    if is_exported and (args.device is not None or args.set):
        raise ValueError('--device and --set need a config and a checkpoint; an .onnx file runs on the CPU (--runtime)')
    for name in ('runtime', 'precision'):
        if getattr(args, name) is not None and not is_exported:
            raise ValueError(f'--{name} needs an .onnx file')
    if not is_address(model[-1]):
        check_file(model[-1])
    images: dict[str, Path] = {}
    skipped: dict[str, str | None] = {}
    for place in map(Path, places):
        if not place.is_dir():
            check_file(place)
            images[str(place)] = args.out / place.stem
            continue
        own = {os.path.realpath(args.out)}
        found = sorted(map(Path, walk(str(place), is_image, skipped, own)))
        if not found:
            raise ValueError(f'the folder {place} contains no images outside of {args.out}')
        images.update({str(path): args.out / path.relative_to(place).with_suffix('') for path in found})
    twice = {out for out in images.values() if [*images.values()].count(out) > 1}
    if twice:
        raise ValueError(
            f'several images would be written to {", ".join(map(str, twice))}; write them to other folders'
        )
    for out in images.values() if not args.resume else ():
        for ending in _ENDINGS:
            check_free(_file(out, ending), args.force)
    return model, images, [f'{path} {reason}' for path, reason in skipped.items() if reason is not None]


def _file(out: Path, ending: str) -> Path:
    return out.parent / f'{out.name}.{ending}'


def _predictor(model: list[str], args: argparse.Namespace) -> Any:
    """Return a ``runtime.Model`` or a ``workbench.predict.Predictor``, which have the same methods."""
    if len(model) == 1:
        runtime, precision = args.runtime or 'onnxruntime', args.precision or 'float32'
        return swin_dense.runtime.load(model[0], runtime=runtime, score=args.score, precision=precision)
    args.config = model[0]
    config = read_config(args)
    from swin_dense.commands._backbone import device_of
    from swin_dense.workbench.predict import Predictor

    return Predictor(config, model[1], str(device_of(args)), args.score)


def _write(out: Path, prediction: Any) -> None:
    """Write the results of an image, the JSON last, so that it marks complete results."""
    import numpy as np
    from PIL import Image

    pictures = {}
    if prediction.painted is not None and max(prediction.painted.shape) <= _LARGEST_JPEG:
        pictures['painted.jpg'] = prediction.painted
    if prediction.labels is not None:  # PNG has integers of 8 and 16 bits
        pictures['labels.png'] = prediction.labels.astype('uint8' if prediction.labels.max() < 256 else 'uint16')
    if prediction.panoptic is not None:
        is_segment = np.isin(prediction.panoptic, [one['id'] for one in prediction.record['segments']])
        ids = np.where(is_segment, prediction.panoptic, 0)
        pictures['panoptic.png'] = np.stack([ids % 256, ids // 256 % 256, ids // 256**2], 2).astype(np.uint8)
    out.parent.mkdir(parents=True, exist_ok=True)
    for ending, pixels in pictures.items():
        with written_whole(_file(out, ending)) as unfinished:
            Image.fromarray(pixels).save(unfinished, quality=95)
    write_json(_file(out, 'json'), prediction.record)
