"""Run a detector or segmentor on images; write annotated images and JSON.

    swin-dense predict mine.py work_dirs/mine/epoch_12.pth photo.jpg other.png --out predictions
    swin-dense predict model.onnx photo.jpg other.png --out predictions
    swin-dense predict model.onnx photos/ --out predictions --format coco
    swin-dense predict mine.py work_dirs/mine/epoch_12.pth scene.tif --out predictions --tile 1024 --overlap 256

The .onnx file must come from `swin-dense export CONFIG CHECKPOINT FILE`; it needs neither torch nor the frameworks. For
each image PHOTO.jpg, the command writes PHOTO.painted.jpg and PHOTO.json. With a detector, the JSON lists class, score,
box (x1, y1, x2, y2 in pixels) and mask (COCO's RLE) of every instance. With a segmentor, it lists the fraction of
pixels of every class, and PHOTO.labels.png contains the class of every pixel (in 16 bits if one is above 255). With a
panoptic model, it lists id, class and fraction of pixels of every segment, and PHOTO.panoptic.png contains the ids as
COCO does: red + 256 green + 256^2 blue.

With --tile, images of any size are read, predicted and written by tiles: nothing is painted, the classes are in
PHOTO.labels.tif, with the georeference of a GeoTIFF, and the same object is not listed twice. With --format coco, the
instances of all images are also in coco_results.json, for evaluation, and coco_annotations.json, for labelling tools.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import swin_dense
from swin_dense.commands._mm import read_config
from swin_dense.commands._options import add_device, add_force, add_settings, check_file
from swin_dense.utils import checks, packages
from swin_dense.utils.atomic import check_free, written_whole
from swin_dense.utils.choices import IMAGE_SUFFIXES, RUNTIMES

if TYPE_CHECKING:
    from swin_dense.workbench.runtime import Prediction

_COCO = ('coco_results.json', 'coco_annotations.json')


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
    add_settings(parser)
    parser.add_argument(
        '--score', type=float, default=0.3, help='omit instances with a lower score (default: %(default)s)'
    )
    add_device(parser)
    parser.add_argument('--runtime', choices=RUNTIMES, help='library that runs an .onnx file (default: onnxruntime)')
    parser.add_argument('--tile', type=int, metavar='PIXELS', help='predict large images in tiles of this size')
    parser.add_argument(
        '--overlap',
        type=int,
        metavar='PIXELS',
        help='overlap of tiles, at least the size of the objects (default: a quarter of --tile)',
    )
    parser.add_argument('--format', choices=['coco'], help=f'also write {" and ".join(_COCO)}')
    parser.add_argument(
        '--annotations',
        type=Path,
        metavar='FILE',
        help='with --format coco: annotations of COCO whose ids of images and categories to use',
    )


def run(args: argparse.Namespace) -> int:
    checks.rate('--score', args.score)
    model, images = _files(args)
    known = _check_outputs(args, images)
    predictor = _predictor(model, args)
    from swin_dense.utils.pixels import ImageError  # imports numpy, which --help does not need

    coco = swin_dense.runtime.Coco(predictor.classes, known) if args.format else None
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for path in images:
        stem = args.out / Path(path).stem
        try:
            record = _predict(predictor, path, stem, args)
        except (ImageError, OSError) as error:
            print(f'swin-dense predict: {error}', file=sys.stderr)
            failed += 1
            continue
        if coco is not None:
            coco.add(record)
    if coco is not None:
        for name, content in zip(_COCO, (coco.results(), coco.annotations()), strict=True):
            _write_json(args.out / name, content)
    print(f'{len(images) - failed} of {len(images)} images are in {args.out}')
    return 1 if failed else 0


def _files(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the files of the model, and the images; folders are replaced by the images in them."""
    is_exported = args.files[0].endswith('.onnx')
    model, places = args.files[: 2 - is_exported], args.files[2 - is_exported :]
    if not places:
        raise ValueError('give a config, a checkpoint and images, or an .onnx file and images')
    if is_exported and (args.device is not None or args.set):
        raise ValueError('--device and --set need a config and a checkpoint; an .onnx file runs on the CPU (--runtime)')
    if args.runtime is not None and not is_exported:
        raise ValueError('--runtime needs an .onnx file')
    images: list[str] = []
    for place in places:
        if Path(place).is_dir():
            files = (path for path in Path(place).rglob('*') if path.suffix.lower() in IMAGE_SUFFIXES)
            found = sorted(path for path in files if path.is_file())
            if not found:
                raise ValueError(f'the folder {place} contains no images ({", ".join(sorted(IMAGE_SUFFIXES))})')
            images += map(str, found)
        else:
            images.append(place)
    for path in images if '://' in model[-1] else [model[-1], *images]:
        check_file(path)
    return model, images


def _check_outputs(args: argparse.Namespace, images: list[str]) -> Any:
    """Check the options and that no result would replace a file; return the content of ``--annotations``."""
    if args.tile is None and args.overlap is not None:
        raise ValueError('--overlap needs --tile')
    if args.tile is not None:
        checks.integer('--tile', args.tile)
        packages.require('this command', 'tifffile')
    if args.annotations is not None and args.format is None:
        raise ValueError('--annotations needs --format coco')
    counts = Counter(Path(path).stem for path in images)
    twice = [stem for stem, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f'several images have the name {", ".join(twice)}; write them to separate folders (--out)')
    for stem in counts:
        for ending in ('painted.jpg', 'labels.png', 'labels.tif', 'panoptic.png', 'json'):
            check_free(args.out / f'{stem}.{ending}', args.force)
    for name in _COCO if args.format else ():
        check_free(args.out / name, args.force)
    return None if args.annotations is None else json.loads(args.annotations.read_text(encoding='utf-8'))


def _predictor(model: list[str], args: argparse.Namespace) -> Any:
    """Return a ``runtime.Model`` or a ``workbench.predict.Predictor``, which have the same methods."""
    if len(model) == 1:
        return swin_dense.runtime.load(model[0], runtime=args.runtime or 'onnxruntime', score=args.score)
    args.config = model[0]
    config = read_config(args)
    from swin_dense.commands._backbone import device_of
    from swin_dense.workbench.predict import Predictor

    return Predictor(config, model[1], str(device_of(args)), args.score)


def _predict(predictor: Any, path: str, stem: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Predict an image, write the results, the JSON last, so that it marks complete results, and return the record."""
    with contextlib.ExitStack() as stack:
        if args.tile is None:
            prediction = predictor.predict(path)
        else:
            from PIL import Image

            from swin_dense.workbench.runtime.geotiff import label_file

            # Images that need tiles exceed PIL's limit, which protects against decompression bombs.
            Image.MAX_IMAGE_PIXELS = None
            make_labels = stack.enter_context(label_file(stem.with_name(f'{stem.name}.labels.tif'), path))
            prediction = predictor.predict_tiles(path, args.tile, args.overlap, make_labels)
    if args.tile is None:
        _write_pictures(stem, prediction)
    _write_json(stem.with_name(f'{stem.name}.json'), prediction.record)
    return prediction.record


def _write_pictures(stem: Path, prediction: Prediction) -> None:
    import numpy as np
    from PIL import Image

    pictures = {} if prediction.painted is None else {'painted.jpg': prediction.painted}
    if prediction.labels is not None:  # PNG has integers of 8 and 16 bits
        pictures['labels.png'] = prediction.labels.astype('uint8' if prediction.labels.max() < 256 else 'uint16')
    if prediction.panoptic is not None:
        ids = prediction.panoptic
        pictures['panoptic.png'] = np.stack([ids % 256, ids // 256 % 256, ids // 256**2], 2).astype(np.uint8)
    for ending, pixels in pictures.items():
        with written_whole(stem.with_name(f'{stem.name}.{ending}')) as unfinished:
            Image.fromarray(pixels).save(unfinished.path, quality=95)


def _write_json(path: Path, content: Any) -> None:
    with written_whole(path) as unfinished:
        unfinished.path.write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
