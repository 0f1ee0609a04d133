"""Measure the memory that reading images ahead takes, for one image size after the other.

    python benchmarks/loader_memory.py --out benchmarks/loader_memory.json

Each size is read in a process of its own, by the threads of an extraction, from one JPEG under many names. The reader
keeps ahead of a caller who takes 50 ms for an image and holds it for that time, as a model does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

from PIL import Image

from swin_dense.features.dataset import read_ahead
from swin_dense.features.inference import Inference

SIZES = ((224, 224), (3000, 4000), (6000, 8000), (9000, 12000), (13000, 13700))


def measure(path: Path, count: int, workers: int, queue: multiprocessing.Queue) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    inference = Inference()
    for sample in read_ahead([str(path)] * count, range(count), lambda name: inference.read(name, 3), workers):
        assert sample.image is not None, sample.error
        time.sleep(0.05)
    queue.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--count', type=int, default=24, help='images of each size (default: %(default)s)')
    parser.add_argument('--workers', type=int, default=2)
    parser.add_argument('--out', type=Path)
    args = parser.parse_args()
    context = multiprocessing.get_context('fork')
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for height, width in SIZES:
            path = Path(folder, f'{height}x{width}.jpg')
            make = context.Process(target=lambda path=path, size=(width, height): write_noise(path, size))
            make.start()
            make.join()
            queue = context.Queue()
            process = context.Process(target=measure, args=(path, args.count, args.workers, queue))
            process.start()
            rows.append({'size': [height, width], 'gib': round(queue.get(), 3)})
            process.join()
    text = json.dumps({'workers': args.workers, 'images': args.count, 'peak': rows}, indent=2) + '\n'
    if args.out is not None:
        args.out.write_text(text)
    print(text)


def write_noise(path: Path, size: tuple[int, int]) -> None:
    """Write a JPEG in a process of its own, so that its memory is not counted."""
    Image.effect_noise(size, 50).convert('RGB').save(path, quality=30)


if __name__ == '__main__':
    main()
