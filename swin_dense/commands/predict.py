"""Run a detector or segmentor on images; write annotated images and JSON.

    swin-dense predict mine.py work_dirs/mine/epoch_12.pth photo.jpg other.png --out predictions
    swin-dense predict model.onnx photo.jpg other.png --out predictions
    swin-dense predict model.onnx photos/ --out predictions --format coco
    swin-dense predict mine.py work_dirs/mine/epoch_12.pth scene.tif --out predictions --tile 1024 --overlap 256

The .onnx file must come from `swin-dense export CONFIG CHECKPOINT --out FILE`; it needs neither torch nor the
frameworks. For each image PHOTO.jpg, the command writes PHOTO.painted.jpg and PHOTO.json. With a detector, the JSON
lists class, score, box (x1, y1, x2, y2 in pixels) and mask (COCO's RLE) of every instance. With a segmentor, it lists
the fraction of pixels of every class, and PHOTO.labels.png contains the class of every pixel (in 16 bits if one is
above 255). With a panoptic model, it lists id, class and fraction of pixels of every segment, and PHOTO.panoptic.png
contains the ids as COCO does: red + 256 green + 256^2 blue.

With --tile, images of any size are read, predicted and written by tiles: nothing is painted, the classes are in
PHOTO.labels.tif, with the georeference of a GeoTIFF, and the same object is not listed twice. With --format coco, the
instances of all images are also in coco_results.json, for evaluation, and coco_annotations.json, for labelling tools.

Results lie in the subfolders that the images lie in. An image that cannot be read or predicted is named, and the others
are predicted (exit status 1). To continue after an interruption, run the same command again with --resume.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections import Counter
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import swin_dense
from swin_dense.commands._images import ImageFile, images_at
from swin_dense.commands._mm import read_config
from swin_dense.commands._options import add_device, add_force, add_settings, check_file
from swin_dense.utils import checks, packages
from swin_dense.utils.addresses import is_address
from swin_dense.utils.atomic import check_free, write_json
from swin_dense.utils.choices import PRECISIONS, RUNTIMES
from swin_dense.utils.signals import stop_signals

if TYPE_CHECKING:
    from swin_dense.workbench.runtime import Coco

GROUP = 'models'
EXTRA = 'mm'
_COCO = ('coco_results.json', 'coco_annotations.json')
_ENDINGS = ('json', 'painted.jpg', 'labels.png', 'labels.tif', 'panoptic.png')
_SETTINGS = '.predict.json'  # the options that determine the results in a folder


def _output(out: Path, image: ImageFile, ending: str) -> Path:
    """Return the file of a result: the JSON of the image a/b.jpg is a/b.json."""
    return out / f'{PurePath(image.name).with_suffix("")}.{ending}'


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
    parser.add_argument('--resume', action='store_true', help='predict only images that have no result yet')
    add_settings(parser)
    parser.add_argument(
        '--score', type=float, help='omit instances with a lower score (default: 0.3; 0 with --annotations)'
    )
    add_device(parser)
    parser.add_argument('--runtime', choices=RUNTIMES, help='library that runs an .onnx file (default: onnxruntime)')
    parser.add_argument(
        '--precision',
        choices=PRECISIONS,
        help='in which --runtime openvino computes; bfloat16 needs a processor that has it (default: float32)',
    )
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
    _check_options(args)
    model, images, unread = _files(args)
    settings = _check_outputs(args, model, images)
    known = None if args.annotations is None else _json(args.annotations)
    predictor = _predictor(model, args)
    coco = swin_dense.runtime.Coco(predictor.classes, known) if args.format else None
    absent = {} if coco is None else _absent(coco, images)
    _say(*unread, *absent.values())
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(args.out / _SETTINGS, settings)
    done, failed = 0, len(unread) + len(absent)
    with stop_signals() as received:
        try:
            for image in images:
                if received:
                    break
                if image in absent:
                    continue
                record = _finished(image, args) or _try(predictor, image, args)
                if record is None:
                    failed += 1
                    continue
                if coco is not None:
                    coco.add(record, image.name)
                done += 1
        except OSError as error:  # those of reading an image belong to it
            failed += 1
            _say(
                f'error: cannot write to {args.out}: {error.strerror or error}. Finished images are kept: make room or '
                'allow writing, then run the same command again with --resume'
            )
        finally:
            if coco is not None and done:
                for name, content in zip(_COCO, (coco.results(), coco.annotations()), strict=True):
                    write_json(args.out / name, content)
    print(f'{done} of {len(images)} images are in {args.out}')
    if received:
        _say('stopped before the end; run the same command again with --resume to continue')
        return 128 + received[0]
    return 1 if failed else 0


def _say(*lines: str) -> None:
    for line in lines:
        print(f'swin-dense predict: {line}', file=sys.stderr)


def _check_options(args: argparse.Namespace) -> None:
    if args.tile is None and args.overlap is not None:
        raise ValueError('--overlap needs --tile')
    if args.annotations is not None and args.format is None:
        raise ValueError('--annotations needs --format coco')
    if args.resume and args.force:
        raise ValueError('--resume keeps results and --force replaces them; leave one of them out')
    if args.score is None:  # the average precision counts detections of any score
        args.score = 0.3 if args.annotations is None else 0.0
    checks.rate('--score', args.score)
    if args.tile is not None:
        checks.integer('--tile', args.tile)
        packages.require('this command', 'tifffile')


def _files(args: argparse.Namespace) -> tuple[list[str], list[ImageFile], list[str]]:
    """Return the files of the model, the images, also those in folders, and messages on what cannot be searched."""
    is_exported = args.files[0].endswith('.onnx')
    model, places = args.files[: 2 - is_exported], args.files[2 - is_exported :]
    if not places:
        raise ValueError('give a config, a checkpoint and images, or an .onnx file and images')
    if is_exported and (args.device is not None or args.set):
        raise ValueError('--device and --set need a config and a checkpoint; an .onnx file runs on the CPU (--runtime)')
    for name in ('runtime', 'precision'):
        if getattr(args, name) is not None and not is_exported:
            raise ValueError(f'--{name} needs an .onnx file')
    out = os.path.realpath(args.out)
    for place in places:
        if Path(place).is_dir() and os.path.realpath(place) == out:
            raise ValueError(
                f'--out is {place}, the folder of the images; choose another one, such as {args.out}/predictions'
            )
    images, unread = images_at(places, [out])
    if not is_address(model[-1]):
        check_file(model[-1])
    return model, images, unread


def _check_outputs(args: argparse.Namespace, model: list[str], images: list[ImageFile]) -> dict[str, Any] | None:
    """Check that no result would replace a file, and return the settings to record, None for those of several runs."""
    counts = Counter(_output(Path(), image, 'json') for image in images)
    twice = [str(path.with_suffix('')) for path, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f'several images have the name {", ".join(twice)}; write them to separate folders (--out)')
    if not args.resume:
        written = [_output(args.out, image, ending) for image in images for ending in _ENDINGS]
        for path in (*written, *(args.out / name for name in _COCO if args.format)):
            try:
                check_free(path, args.force)
            except FileExistsError as error:
                raise FileExistsError(f'{error}, --resume keeps it') from None
    settings = _settings(args, model)
    if not (args.out / _SETTINGS).exists():
        is_empty = not any(_output(args.out, image, 'json').exists() for image in images)
        recorded = settings if is_empty else None
    else:
        recorded = _json(args.out / _SETTINGS)
        if recorded is not None:
            recorded.setdefault('precision', None)  # earlier versions did not have this option
    if recorded == settings:
        return settings
    if args.resume:
        differ = [key for key in settings if (recorded or {}).get(key) != settings[key]]
        raise ValueError(
            f'{args.out} contains predictions of several or unknown options, or of another {", ".join(differ)}, which '
            '--resume would mix with others; choose another folder (--out), or replace them (--force)'
        )
    return None


def _settings(args: argparse.Namespace, model: list[str]) -> dict[str, Any]:
    """Return the options that determine the results, with the version of the weights."""
    weights = Path(model[-1])
    status = weights.stat() if weights.exists() else None
    files = [os.path.abspath(path) if Path(path).exists() else path for path in model]
    version = status and [status.st_size, status.st_mtime_ns]
    options = {name: getattr(args, name) for name in ('set', 'runtime', 'precision', 'score', 'tile', 'overlap')}
    return {'model': files, 'version of the weights': version, **options}


def _json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding='utf-8'))
    except ValueError as error:
        raise ValueError(f'{path} is not a JSON file ({error})') from error


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


def _absent(coco: Coco, images: list[ImageFile]) -> dict[ImageFile, str]:
    """Return the images that are not among the annotations, and messages; if no image is, it is an error."""
    absent = {
        image: f'the annotations have no image {image.name}, so it is left out'
        for image in images
        if coco.entry_of(image.path, image.name) is None
    }
    if len(absent) == len(images):
        raise ValueError(
            f'the annotations have no image {images[0].name}, nor any other of those given; give the folder that the '
            'names in the annotations start from, or leave --annotations out'
        )
    return absent


def _finished(image: ImageFile, args: argparse.Namespace) -> Any:
    """Return the record of an image that is finished, or None."""
    if not args.resume:
        return None
    try:
        record = _json(_output(args.out, image, 'json'))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get('image') == image.path else None


def _try(predictor: Any, image: ImageFile, args: argparse.Namespace) -> dict[str, Any] | None:
    """Predict an image, and return its record; print why it cannot be read or predicted, and return None.

    Raises:
        OSError: the results cannot be written.
    """
    from swin_dense.workbench.runtime import results  # imports numpy, which --help does not need

    try:
        outputs = {ending: _output(args.out, image, ending) for ending in _ENDINGS}
        return results.predict(predictor, image.path, outputs, args.tile, args.overlap)
    except Exception as error:  # the runtimes and frameworks raise exceptions of any type
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        if os.environ.get('SWIN_DENSE_TRACEBACK'):
            traceback.print_exc()
        _say(results.reason(image.path, error))
        return None
