"""Read damaged image files of all formats, and count the outcomes.

    python benchmarks/mutated_images.py --count 12000 --out benchmarks/mutated_images.json

Each file is read as a whole and by regions. The result must be an image or an ImageError that contains the file name;
other outcomes are printed.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from swin_dense.features.images import read_image
from swin_dense.features.regions import open_large_image
from swin_dense.utils.pixels import ImageError
from tests.features.mutations import ORIGINALS, mutate


def read_both_ways(path: Path, channels: int) -> str:
    read_image(path, channels)
    with open_large_image(path) as image:
        image.read(0, 0, *image.size)
    return 'read'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--count', type=int, default=12000)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--out', type=Path)
    args = parser.parse_args()
    warnings.simplefilter('ignore')
    logging.disable()
    Image.MAX_IMAGE_PIXELS = 1 << 24
    originals = {form: make() for form, make in ORIGINALS.items()}
    chance = random.Random(args.seed)
    counts: dict[str, Counter[str]] = {form: Counter() for form in originals}
    others: list[str] = []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'image')
        for number in range(args.count):
            form = list(originals)[number % len(originals)]
            path.write_bytes(mutate(originals[form], chance))
            try:
                result = read_both_ways(path, 5 if '5' in form else 3)
            except ImageError as error:
                result = 'refused' if str(path) in str(error) else 'other'
            except Exception:
                result = 'other'
            if result == 'other':
                others.append(f'{form}: {traceback.format_exc()}')
            counts[form][result] += 1
    figures = {
        'files': args.count,
        'seed': args.seed,
        'read': sum(count['read'] for count in counts.values()),
        'refused': sum(count['refused'] for count in counts.values()),
        'other': len(others),
        'seconds': round(time.perf_counter() - start),
        'by_format': {form: dict(count) for form, count in counts.items()},
    }
    text = json.dumps(figures, indent=2) + '\n'
    if args.out is not None:
        args.out.write_text(text)
    print(text, *others[:5], sep='')
    return 1 if others else 0


if __name__ == '__main__':
    sys.exit(main())
