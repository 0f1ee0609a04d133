"""Kill two shards of `swin-dense features` at random times, restart them, and count lost and duplicate rows.

    python benchmarks/killed_features.py --images 5000 --kills 20 --out benchmarks/killed_features.json

The shards run concurrently with a tiny model on small generated images, some of them broken. Repeatedly, a random shard
is killed by SIGKILL after a random time and restarted. Finally both run to completion, and every vector is compared
with that of an uninterrupted run.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import torch
from PIL import Image

from swin_dense import SwinBackbone
from swin_dense.checkpoint.export import write_file

MODEL: dict[str, Any] = {'embed_dims': 8, 'depths': (2, 2, 2, 2), 'num_heads': (1, 2, 4, 8)}
BROKEN_EVERY = 100


def write_images(folder: Path, count: int, side: int = 64) -> None:
    """Write small noise images, 1000 per folder. Some files are not valid images."""
    generator = np.random.default_rng(0)
    for index in range(count):
        path = folder / f'{index // 1000:04}' / f'{index:07}.jpg'
        path.parent.mkdir(parents=True, exist_ok=True)
        if index % BROKEN_EVERY == 7:
            path.write_bytes(b'no image')
        else:
            Image.fromarray(generator.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(path, quality=80)


def write_model(path: Path) -> None:
    torch.manual_seed(0)
    write_file(path, SwinBackbone(**MODEL).state_dict())


def command(folder: Path, out: Path, *options: str) -> list[str]:
    names = [str(folder / 'images'), '--checkpoint', str(folder / 'model.pth'), '--out', str(out)]
    return [sys.executable, '-m', 'swin_dense', 'features', *names, '--pool', 'avg', '--levels', '32', *options]


def read(out: Path) -> list[dict[str, Any]]:
    return [row for path in sorted(out.glob('part-*')) for row in pyarrow.parquet.read_table(path).to_pylist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--images', type=int, default=5000)
    parser.add_argument('--kills', type=int, default=20)
    parser.add_argument('--part-rows', type=int, default=50)
    parser.add_argument(
        '--seconds', type=float, default=10, help='longest time from the first output of a shard to its kill'
    )
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--out', type=Path)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder / 'images', args.images)
        write_model(folder / 'model.pth')
        quiet = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
        subprocess.run(command(folder, folder / 'undisturbed'), **quiet)
        expected = {row['path']: row['level_32'] for row in read(folder / 'undisturbed')}

        out = folder / 'out'
        shards = [command(folder, out, '--shard', f'{i}/2', '--part-rows', str(args.part_rows)) for i in range(2)]
        running = [subprocess.Popen(shard, **quiet) for shard in shards]
        kills = []
        while len(kills) < args.kills:
            victim = chance.randrange(2)
            # Imports are slow and a kill during them tests nothing, so wait until the shard begins to write.
            began = out / f'.partial-{victim:05}-of-00002'
            while running[victim].poll() is None and not began.exists():
                time.sleep(0.01)
            time.sleep(chance.random() * args.seconds)
            was_running = running[victim].poll() is None
            running[victim].kill()
            running[victim].wait()
            shutil.rmtree(began, ignore_errors=True)
            rows = read(out)
            doubled = len(rows) - len({row['path'] for row in rows})
            kills.append({'shard': victim, 'was_running': was_running, 'rows': len(rows), 'doubled': doubled})
            running[victim] = subprocess.Popen(shards[victim], **quiet)
        statuses = [process.wait() for process in running]
        rows = read(out)
        found = {row['path']: row['level_32'] for row in rows}
        differences = [
            float(np.abs(np.subtract(found[path], vector)).max())
            for path, vector in expected.items()
            if vector is not None and found.get(path) is not None
        ]
        report = {
            'images': args.images,
            'part_rows': args.part_rows,
            'kills': kills,
            'kills_of_a_running_shard': sum(kill['was_running'] for kill in kills),
            'statuses': statuses,
            'rows': len(rows),
            'lost': len(expected.keys() - found.keys()),
            'doubled': len(rows) - len(found),
            'errors': sum(row['error'] is not None for row in rows),
            'errors_expected': sum(index % BROKEN_EVERY == 7 for index in range(args.images)),
            'compared': len(differences),
            'largest_difference': max(differences),
        }
    text = json.dumps(report, indent=2) + '\n'
    if args.out is not None:
        args.out.write_text(text)
    print(text)


if __name__ == '__main__':
    main()
