"""Run a detector or segmentor on images; write annotated images and JSON.

    swin-dense predict mask-rcnn_swin-t-p4-w7_fpn_1x_coco photo.jpg
    swin-dense predict mine.py work_dirs/mine/epoch_12.pth photo.jpg other.png --out predictions
    swin-dense predict model.onnx photos/ --out predictions

The first argument is the model. Without a checkpoint, the name of a recipe stands for its published weights
(`swin-dense zoo --weights` lists them), which are downloaded once. A config file, or a recipe with other weights, is
followed by a checkpoint. The second argument is the checkpoint unless it is a folder or ends as images do. An .onnx
file must come from `swin-dense export CONFIG CHECKPOINT --out FILE`, and an .xml file from its conversion by OpenVINO,
which needs its .bin file beside it; they need neither torch nor the frameworks.

For each image PHOTO.jpg, the command writes PHOTO.painted.jpg and PHOTO.json; if there is also a PHOTO.png, both keep
their suffix: PHOTO.jpg.json and PHOTO.png.json. With a detector, the JSON lists class, score, box (x1, y1, x2, y2 in
pixels) and mask (COCO's RLE) of every instance. With a segmentor, it lists the fraction of pixels of every class, and
PHOTO.labels.png has the class of every pixel (16 bits if a class is above 255). With a panoptic model, it lists id,
class and fraction of pixels of every segment, and PHOTO.panoptic.png contains the ids as COCO does: red + 256 green +
256^2 blue.

With --resume, the command leaves out images whose results are complete, if the same model and options made them.
Results lie in the subfolders that the images lie in. A file that this command has not written is never deleted, and
replaced only with --force. An image that cannot be read or predicted is named, and the others are predicted (exit
status 1). For large images in tiles, see examples/predict_large.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import traceback
from pathlib import Path
from typing import Any

import swin_dense
from swin_dense.commands._mm import add_allow_partial, checkpoint_file, print_notes, published_checkpoint, read_config
from swin_dense.commands._options import add_device, add_force, add_settings, check_file, is_exported_file
from swin_dense.images.listing import is_image, left_out, real_path, walk
from swin_dense.utils import checks
from swin_dense.utils.addresses import is_address
from swin_dense.utils.atomic import check_folder
from swin_dense.utils.choices import EXPORTED, PRECISIONS, RUNTIMES
from swin_dense.utils.digest import file_digest
from swin_dense.utils.errors import is_out_of_memory
from swin_dense.utils.signals import stop_signals

GROUP = 'models'
EXTRA = 'mm'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'files',
        nargs='+',
        metavar='FILE',
        help='RECIPE IMAGE..., with the published weights of a recipe; CONFIG CHECKPOINT IMAGE...: config file or name '
        'of a recipe, and file or address of the weights of the whole model; or MODEL.onnx or MODEL.xml and IMAGE.... '
        'IMAGE is a file or a folder',
    )
    parser.add_argument(
        '--out', type=Path, default=Path('predictions'), help='folder for the results (default: %(default)s)'
    )
    add_force(parser)
    parser.add_argument('--resume', action='store_true', help='leave out images whose results are complete')
    add_settings(parser)
    add_allow_partial(parser)
    parser.add_argument('--score', type=float, default=0.3, help='omit instances with a lower score (default: 0.3)')
    add_device(parser)
    parser.add_argument(
        '--runtime',
        choices=RUNTIMES,
        help='library that runs an exported file (default: openvino for .xml, else onnxruntime)',
    )
    parser.add_argument(
        '--precision',
        choices=PRECISIONS,
        help='precision in which --runtime openvino computes; not all processors have bfloat16 (default: float32)',
    )
    parser.add_argument(
        '--threads',
        type=int,
        default=0,
        help='CPU threads that run an exported file (default: 0, which lets the library choose)',
    )
    parser.add_argument(
        '--no-pictures',
        action='store_true',
        help='write no annotated images, PHOTO.painted.jpg; drawing can take longer than predicting',
    )
    parser.add_argument(
        '--time', action='store_true', help='print the time of each step, in milliseconds: the median of all images'
    )


def run(args: argparse.Namespace) -> int:
    checks.rate('--score', args.score)
    checks.integer('--threads', args.threads, minimum=0)
    if args.resume and args.force:
        raise ValueError('--resume keeps results and --force replaces them; leave one of them out')
    model, places = _model_and_images(args)
    images, unread, notes = _found_images(places, args.out)
    from swin_dense.workbench.runtime.folder import ResultFolder
    from swin_dense.workbench.runtime.stopwatch import Stopwatch  # imports numpy, which --help does not need

    check_folder(args.out)
    folder = ResultFolder(args.out, args.resume, args.force)
    names = folder.named(images)
    folder.left(names)  # an error before the model is read
    laps: list[dict[str, float]] = []
    failed = 0
    predictor, settings = _predictor(model, args)
    with folder.locked(), stop_signals() as received:
        for message in unread:
            print(f'swin-dense predict: {message}', file=sys.stderr)
        print_notes('predict', notes + predictor.notes_on(list(images)))
        for image, name in folder.left(names, settings).items():
            if received:
                return 128 + received[0]
            folder.clear(name)
            clock = Stopwatch()
            try:
                folder.write(image, name, predictor.predict(image, clock, paint=not args.no_pictures))
            except Exception as error:  # the runtimes and frameworks raise exceptions of any type
                failed += 1
                _print_failure(image, error)
            else:
                clock.lap('write')
                laps.append(clock.seconds)
    print(f'results of {len(images) - failed} of {len(images)} images are in {args.out}')
    if args.time and laps:
        print(_times(laps))
    return 1 if failed or unread else 0


def _model_and_images(args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the words of the model, one or two, and those of the images."""
    model, places = args.files[:1], args.files[1:]
    is_exported = is_exported_file(model[0])
    if is_exported and (args.device is not None or args.set or args.allow_partial):
        raise ValueError(
            '--device, --set and --allow-partial need a config and a checkpoint; an exported file runs on the CPU '
            '(--runtime)'
        )
    for name in ('runtime', 'precision', 'threads'):
        if getattr(args, name) and not is_exported:
            raise ValueError(f'--{name} needs a file that ends in {" or ".join(EXPORTED)}')
    if is_exported:
        check_file(model[0])
    elif places and not _is_place_of_images(places[0]):
        checkpoint = places.pop(0)
        if not is_address(checkpoint):
            check_file(checkpoint)
        model.append(checkpoint)
    if not places:
        raise ValueError('give a model and images: RECIPE IMAGE..., CONFIG CHECKPOINT IMAGE... or MODEL.onnx IMAGE...')
    return model, places


def _is_place_of_images(place: str) -> bool:
    return not is_address(place) and (Path(place).is_dir() or is_image(place))


def _found_images(places: list[str], out: Path) -> tuple[dict[str, Path], list[str], list[str]]:
    """Return the images, with their path in the folder of the results, places that cannot be searched, and a note."""
    images: dict[str, Path] = {}
    skipped: dict[str, str | None] = {}
    for place in map(Path, places):
        if not place.is_dir():
            check_file(place)
            images[str(place)] = Path(place.name)
            continue
        own = {os.path.realpath(out)}
        found = sorted(map(Path, walk(str(place), is_image, skipped, own)))
        if not found:
            raise ValueError('; '.join([f'the folder {place} contains no images outside of {out}', *left_out(skipped)]))
        images.update({str(path): path.relative_to(place) for path in found})
    once = {real_path(image): image for image in reversed(images)}.values()  # as it was given first
    images = {image: images[image] for image in reversed(once)}
    unread = [f'{path} {reason}' for path, reason in skipped.items() if reason is not None]
    return images, unread, left_out(skipped)


def _predictor(model: list[str], args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Return a ``runtime.Model`` or a ``workbench.predict.Predictor``, which have the same methods.

    And return the settings that determine its predictions, in the types of JSON.
    """
    if is_exported_file(model[0]):
        file = Path(model[0])
        runtime, precision = args.runtime or EXPORTED[file.suffix.lower()], args.precision or 'float32'
        loaded = swin_dense.runtime.load(
            file, runtime=runtime, score=args.score, threads=args.threads, precision=precision
        )
        digest = file_digest(file)
        if file.suffix.lower() == '.xml':
            digest += file_digest(file.with_suffix('.bin'))
        return loaded, {'model': digest, 'runtime': runtime, 'precision': precision, 'score': args.score}
    args.config = model[0]
    config = read_config(args)
    place = model[1] if len(model) > 1 else published_checkpoint(args.config, 'predict', 'before the images')
    from swin_dense.commands._backbone import device_of
    from swin_dense.workbench.checking.settings import check_prediction
    from swin_dense.workbench.configs.experiment import Experiment
    from swin_dense.workbench.predict import Predictor, settings_digest

    check_prediction(Experiment(config))
    with checkpoint_file(place) as checkpoint:
        if len(model) == 1:
            print(f'swin-dense predict: the weights of {args.config} from {place} are in {checkpoint}', file=sys.stderr)
        predictor = Predictor(config, checkpoint, str(device_of(args)), args.score, args.allow_partial)
        digest = file_digest(Path(checkpoint))
    return predictor, {'config': settings_digest(config), 'checkpoint': digest, 'score': args.score}


def _print_failure(image: str, error: Exception) -> None:
    if os.environ.get('SWIN_DENSE_TRACEBACK'):
        traceback.print_exception(error)
    lack = 'too little memory; examples/predict_large.py predicts tiles: ' if is_out_of_memory(error) else ''
    print(f'swin-dense predict: {image}: {lack}{" ".join(str(error).split())}', file=sys.stderr)


def _times(laps: list[dict[str, float]]) -> str:
    steps = {step: statistics.median(lap[step] for lap in laps) for step in laps[0]}
    whole = statistics.median(sum(lap.values()) for lap in laps)
    listed = ', '.join(f'{step} {1000 * seconds:.1f}' for step, seconds in {**steps, 'in all': whole}.items())
    return f'milliseconds per image, the median of {len(laps)}: {listed}'
