"""Measure the peak memory of prefetching images, and of a whole extraction.

    python benchmarks/loader_memory.py --out benchmarks/loader_memory.json

*reading*: for each image size, a separate process reads one JPEG many times with the threads of an extraction. The
threads prefetch images for a consumer that holds each for 50 ms, as a model would.

*run*: `swin-dense features` with its default options and a small model on photographs of 12 megapixels. The memory is
the total resident memory of the command and all its child processes.

A part that is not selected by `--part` keeps its values in the file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from swin_dense import SwinBackbone
from swin_dense.checkpoint.export import write_file
from swin_dense.features.inference import read_ahead
from swin_dense.features.listing import Item
from swin_dense.features.normalization import Inference

SIZES = ((224, 224), (3000, 4000), (6000, 8000), (9000, 12000), (13000, 13700))
PHOTOGRAPH = (3000, 4000)
DISTINCT = 4
# A narrow model, because even its maps of 160 photographs need 7 GB of disk space.
MODEL: dict[str, Any] = {'embed_dims': 8, 'depths': (2, 2, 2, 2), 'num_heads': (1, 2, 4, 8)}


def measure(path: Path, count: int, workers: int, queue: multiprocessing.Queue) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    inference = Inference()
    items = iter([Item(str(path), None, str(path))] * count)
    for _, image in read_ahead(items, lambda item: inference.read(item.source, 3), workers):
        assert isinstance(image, torch.Tensor), image
        time.sleep(0.05)
    queue.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)


def measure_sizes(count: int, workers: int) -> dict[str, Any]:
    """Return the peak memory in GiB of reading images of each size, above the memory before reading."""
    context = multiprocessing.get_context('fork')
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for height, width in SIZES:
            path = Path(folder, f'{height}x{width}.jpg')
            write_noise(path, (width, height))
            queue = context.Queue()
            process = context.Process(target=measure, args=(path, count, workers, queue))
            process.start()
            rows.append({'size': [height, width], 'gib': round(queue.get(), 3)})
            process.join()
    return {'workers': workers, 'images': count, 'peak': rows}


def measure_run(count: int, parent: Path | None) -> dict[str, Any]:
    """Extract the maps of photographs on the command line, and return the peak memory in GiB."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        photographs, out, checkpoint = (Path(folder, name) for name in ('photographs', 'out', 'model.pth'))
        photographs.mkdir()
        for index in range(count):
            path = photographs / f'{index:04}.jpg'
            if index < DISTINCT:
                write_noise(path, (PHOTOGRAPH[1], PHOTOGRAPH[0]))
            else:
                path.hardlink_to(photographs / f'{index % DISTINCT:04}.jpg')
        torch.manual_seed(0)
        write_file(checkpoint, SwinBackbone(**MODEL).state_dict())
        options = ['features', photographs, '--checkpoint', checkpoint, '--out', out]
        run = subprocess.Popen([sys.executable, '-m', 'swin_dense', *map(str, options)])
        most = processes = 0
        while run.poll() is None:
            held = [resident_bytes(pid) for pid in [run.pid, *descendants(run.pid)]]
            most, processes = max(most, sum(held)), max(processes, len(held))
            time.sleep(0.05)
        # The sampling may miss a short peak; ru_maxrss records it, but only for the largest process.
        most = max(most, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10)
        finished = sum(1 for _ in out.glob('features/*/*'))
        return {
            'command': 'swin-dense features photographs --checkpoint model.pth --out out',
            'model': MODEL,
            'size': list(PHOTOGRAPH),
            'images': count,
            'finished': finished,
            'status': run.returncode,
            'processes': processes,
            'gib': round(most / 2**30, 3),
        }


def descendants(pid: int) -> list[int]:
    """Return the ids of all descendants of a process."""
    parents: dict[int, list[int]] = {}
    for path in Path('/proc').glob('[0-9]*/stat'):
        try:
            parent = int(path.read_text().rpartition(')')[2].split()[1])
        except OSError:  # the process has ended
            continue
        parents.setdefault(parent, []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f'/proc/{pid}/statm').read_text().split()[1]) * os.sysconf('SC_PAGESIZE')
    except OSError:  # the process has ended
        return 0


def write_noise(path: Path, size: tuple[int, int]) -> None:
    """Write a JPEG in a separate process, so that its memory is not counted."""

    def write() -> None:
        Image.effect_noise(size, 50).convert('RGB').save(path, quality=30)

    process = multiprocessing.get_context('fork').Process(target=write)
    process.start()
    process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--part', choices=('reading', 'run', 'both'), default='both')
    parser.add_argument('--count', type=int, default=24, help='images of each size (default: %(default)s)')
    parser.add_argument('--workers', type=int, default=2, help='reading threads (default: %(default)s)')
    parser.add_argument('--photographs', type=int, default=160, help='images of the run (default: %(default)s)')
    parser.add_argument('--folder', type=Path, help='folder for temporary files of the run')
    parser.add_argument('--out', type=Path)
    args = parser.parse_args()
    report = json.loads(args.out.read_text()) if args.out is not None and args.out.exists() else {}
    if args.part != 'reading':
        report['whole_run'] = measure_run(args.photographs, args.folder)
    if args.part != 'run':
        report.update(measure_sizes(args.count, args.workers))
    text = json.dumps(report, indent=2) + '\n'
    if args.out is not None:
        args.out.write_text(text)
    print(text)


if __name__ == '__main__':
    main()
