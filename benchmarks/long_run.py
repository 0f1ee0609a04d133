"""Pass images of random sizes through one tiny model, thousands of times, and see what stays behind in the process.

    PYTHONPATH=. python benchmarks/long_run.py --passes 10000 --json benchmarks/long_run.json

Memory is told apart: what the process holds in RAM, what of that was asked for and not given back (a leak would be
here), and what the C library keeps of that which was given back. Handles and threads are counted by the system, tensors
by the garbage collector. Each of the settings is run in a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from swin_dense import SwinBackbone
from swin_dense.ops import plan

TINY = {'embed_dims': 16, 'depths': (2, 2, 2, 2), 'num_heads': (1, 2, 4, 8)}
# Environment variables. With glibc, blocks from 64 KiB on are mapped one by one, so that each goes back to the system.
SETTINGS = {
    'default': {},
    'mapped': {'MALLOC_MMAP_THRESHOLD_': '65536', 'MALLOC_TRIM_THRESHOLD_': '131072', 'MALLOC_MMAP_MAX_': '1000000'},
    'trimmed': {},
}
# Passes after which glibc is told to give back what it keeps: malloc_trim(3).
TRIM_EVERY = {'trimmed': 100}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--passes', type=int, default=10_000, help='default: %(default)s')
    parser.add_argument('--settings', nargs='+', choices=SETTINGS, default=list(SETTINGS), help='default: all')
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    runs = {}
    for name in args.settings:
        # Spawned, as the C library reads its settings when a process starts.
        with mock.patch.dict(os.environ, SETTINGS[name]), one_thread_elsewhere() as pool:
            trim_every = TRIM_EVERY.get(name)
            held = pool.submit(run, args.passes, trim_every).result()
            runs[name] = {'environment': SETTINGS[name], 'trim_every': trim_every, 'held': held}
        print(name, json.dumps(runs[name], indent=2), flush=True)
    if args.json is not None:
        report = {'torch': torch.__version__, 'passes': args.passes}
        before = json.loads(args.json.read_text()) if args.json.exists() else {}
        # Runs of other settings stay where all else is the same.
        report['runs'] = {**before['runs'], **runs} if {**before, **report} == before else runs
        args.json.write_text(json.dumps(report, indent=2) + '\n')


def one_thread_elsewhere() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        1, multiprocessing.get_context('spawn'), initializer=torch.set_num_threads, initargs=(1,)
    )


def run(passes: int, trim_every: int | None = None) -> list[dict[str, Any]]:
    """Return how many sizes there were, and what the process held after each tenth of the passes.

    Sizes are from 1 to 200 pixels a side. Every tenth pass is one of training, forward and backward.
    """
    draw = random.Random(0)
    model = SwinBackbone(**TINY).eval()
    sizes = set()
    held = []
    for index in range(1, passes + 1):
        size = draw.randint(1, 200), draw.randint(1, 200)
        sizes.add(size)
        images = torch.rand(1, 3, *size)
        if index % 10:
            with torch.no_grad():
                model(images)
        else:
            model.train()
            sum(out.mean() for out in model(images)).backward()
            model.zero_grad()
            model.eval()
        if trim_every is not None and index % trim_every == 0:
            ctypes.CDLL(None).malloc_trim(0)
        if index % (passes // 10) == 0:
            held.append({'passes': index, 'sizes': len(sizes), **what_is_held()})
    return held


def what_is_held() -> dict[str, float]:
    """Return the memory in MiB, open handles, threads and living tensors of this process.

    ``resident`` is in RAM; ``in_use`` is asked for and not given back, ``kept`` is given back and kept by the C library
    for later; ``plans`` is how many sizes of maps the model keeps its tables for.
    """
    gc.collect()
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    asked = _Mallinfo2.now()
    mib = {
        'resident': pages * os.sysconf('SC_PAGE_SIZE'),
        'in_use': asked.uordblks + asked.hblkhd,
        'kept': asked.fordblks,
    }
    return {
        **{name: round(size / 2**20, 1) for name, size in mib.items()},
        'plans': plan._cached.cache_info().currsize,
        'handles': len(os.listdir('/proc/self/fd')),
        'threads': len(os.listdir('/proc/self/task')),
        'tensors': sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()),
    }


class _Mallinfo2(ctypes.Structure):
    """What glibc tells of its memory, from 2.33 on: mallinfo2(3)."""

    _names = 'arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost'
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]

    @classmethod
    def now(cls) -> _Mallinfo2:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = cls
        return mallinfo2()


if __name__ == '__main__':
    main()
