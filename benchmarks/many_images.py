"""Measure whether time per image and memory of `swin-dense features --pool` grow with the number of images.

    python benchmarks/many_images.py --images 100000 --out benchmarks/many_images.json

A tiny model extracts pooled features of generated images of 64 x 64 pixels. After each Parquet part, the CPU time and
the resident memory of the process are recorded; CPU time is least sensitive to other load. A linear fit through the
memory, from the second part to the last but one, gives its growth per image. Then the same command runs again, which
only retries failed images, and once on a tenth of the images, to measure the cost of the list of images.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from killed_features import MODEL, command, write_images, write_model

PART_ROWS = 4096


def watch(arguments: list[str], out: Path) -> dict[str, Any]:
    """Run an extraction, and record (parts, CPU seconds, MiB) after each new part."""
    start = time.perf_counter()
    before = os.times()
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    notes: list[tuple[int, float, float]] = []
    ticks, page = os.sysconf('SC_CLK_TCK'), os.sysconf('SC_PAGESIZE')
    while process.poll() is None:
        parts = sum(1 for _ in out.glob('part-*'))
        if parts and (not notes or parts > notes[-1][0]):
            try:
                fields = Path(f'/proc/{process.pid}/stat').read_text().rpartition(')')[2].split()
                pages = int(Path(f'/proc/{process.pid}/statm').read_text().split()[1])
            except (OSError, IndexError):  # the process has ended
                break
            notes.append((parts, (int(fields[11]) + int(fields[12])) / ticks, pages * page / 2**20))
        time.sleep(0.02)
    status = process.wait()
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return {'status': status, 'seconds': time.perf_counter() - start, 'cpu_seconds': cpu, 'notes': notes}


def slopes(notes: list[tuple[int, float, float]]) -> dict[str, float]:
    """Return time and memory per image from the recorded values."""
    images, cpu, memory = np.array(notes[1:-1]).T  # the first part includes imports, the last has fewer rows
    images = images * PART_ROWS
    half = len(images) // 2
    per_image = np.diff(cpu) / np.diff(images) * 1000
    return {
        'ms_per_image_first_half': round(float(np.mean(per_image[:half])), 4),
        'ms_per_image_second_half': round(float(np.mean(per_image[half:])), 4),
        'mib_after_first_parts': round(float(memory[0]), 1),
        'mib_at_the_end': round(float(memory[-1]), 1),
        'bytes_per_image': round(float(np.polyfit(images, memory, 1)[0]) * 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--images', type=int, default=100_000)
    parser.add_argument('--folder', type=Path, help='folder for temporary files')
    parser.add_argument('--out', type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        write_images(folder / 'images', args.images)
        write_model(folder / 'model.pth')
        options = ['--batch-size', '64', '--part-rows', str(PART_ROWS)]
        whole = watch(command(folder, folder / 'out', *options), folder / 'out')
        again = watch(command(folder, folder / 'out', *options), folder / 'none')
        sizes = {path.name: path.stat().st_size for path in (folder / 'out').glob('part-*')}
        tenth = [str(folder / 'images' / f'{index:04}') for index in range(args.images // 10000)]
        arguments = command(folder, folder / 'tenth', *options)
        at = arguments.index(str(folder / 'images'))
        part = watch([*arguments[:at], *tenth, *arguments[at + 1 :]], folder / 'tenth')
    report = {
        'model': MODEL,
        'side': 64,
        'images': args.images,
        'part_rows': PART_ROWS,
        'load_average': os.getloadavg(),
        **slopes(whole['notes']),
        'bytes_on_disk_per_image': round(sum(sizes.values()) / args.images, 1),
        'whole': whole,
        'again': again,
        'a_tenth': part,
    }
    text = json.dumps(report, indent=2) + '\n'
    if args.out is not None:
        args.out.write_text(text)
    print(text)


if __name__ == '__main__':
    main()
