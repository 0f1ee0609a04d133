"""Run a detector or segmentor on pictures: each painted, and as JSON.

    swin-dense predict mine.py work_dirs/mine/epoch_12.pth photo.jpg other.png --out predictions

For every picture PHOTO.jpg there are PHOTO.painted.jpg and PHOTO.json in the folder: of a detector class, score, box
(x1, y1, x2, y2 in pixels) and mask (COCO's run lengths) of every instance; of a segmentor the share of every class, and
in PHOTO.labels.png the class of every pixel.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from swin_dense import checks
from swin_dense.atomic import written_whole
from swin_dense.recipes.files import load_recipe

if TYPE_CHECKING:
    from swin_dense.mm.predict import Prediction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('config', help='config file, or the name of a recipe')
    parser.add_argument('checkpoint', help='file or address of the weights of the whole model')
    parser.add_argument('images', nargs='+', metavar='IMAGE', help='picture to look at')
    parser.add_argument('--out', type=Path, default=Path('predictions'), help='folder (default: %(default)s)')
    parser.add_argument('--score', type=float, default=0.3, help='leave out instances below (default: %(default)s)')
    parser.add_argument('--device', help='(default: cuda where there is one, else cpu)')


def run(args: argparse.Namespace) -> int:
    checks.rate('--score', args.score)
    files = [*args.images] if '://' in args.checkpoint else [args.checkpoint, *args.images]
    for path in files:
        if not Path(path).is_file():
            raise FileNotFoundError(f'there is no file {path}')
    counts = Counter(Path(path).stem for path in args.images)
    twice = [stem for stem, count in counts.items() if count > 1]
    if twice:
        raise ValueError(f'several pictures are called {", ".join(twice)}; run them into folders of their own (--out)')
    from swin_dense.mm.predict import Predictor  # help does without the frameworks

    predictor = Predictor(load_recipe(args.config), args.checkpoint, args.device, args.score)
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for path in args.images:
        try:
            with Image.open(path) as image:
                image.load()
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            print(f'swin-dense predict: {path} cannot be read: {error}', file=sys.stderr)
            failed += 1
            continue
        write(args.out / Path(path).stem, predictor(path))
    print(f'{len(args.images) - failed} of {len(args.images)} pictures are in {args.out}')
    return 1 if failed else 0


def write(stem: Path, prediction: Prediction) -> None:
    """Write the files of one picture; its JSON comes last, so that whoever finds it finds the others."""
    pictures = {'painted.jpg': prediction.painted}
    if prediction.labels is not None:
        pictures['labels.png'] = prediction.labels
    for ending, pixels in pictures.items():
        with written_whole(stem.with_name(f'{stem.name}.{ending}')) as unfinished:
            Image.fromarray(pixels).save(unfinished.path, quality=95)
    with written_whole(stem.with_name(f'{stem.name}.json')) as unfinished:
        unfinished.path.write_text(json.dumps(prediction.record, indent=2) + '\n')
