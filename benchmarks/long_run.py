"""Run thousands of images of random sizes through one tiny model, and record resources that the process retains.

    PYTHONPATH=. python benchmarks/long_run.py --passes 10000 --json benchmarks/long_run.json

Memory is split into resident memory, allocations that were not freed (these would grow with a leak), and freed memory
that the C library caches. The number of file descriptors and threads is read from the system, that of tensors from the
garbage collector. Each setting runs in a separate process.
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
# Environment variables. In 'mapped', glibc maps each block of at least 64 KiB separately and unmaps it when freed.
SETTINGS = {
    'default': {},
    'mapped': {'MALLOC_MMAP_THRESHOLD_': '65536', 'MALLOC_TRIM_THRESHOLD_': '131072', 'MALLOC_MMAP_MAX_': '1000000'},
    'trimmed': {},
}
# Number of passes between calls of malloc_trim(3), which returns cached memory to the system.
TRIM_EVERY = {'trimmed': 100}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--passes', type=int, default=10_000, help='default: %(default)s')
    parser.add_argument('--settings', nargs='+', choices=SETTINGS, default=list(SETTINGS), help='default: all')
    parser.add_argument('--json', type=Path)
    args = parser.parse_args()
    runs = {}
    for name in args.settings:
        # Spawn a new process, because the C library reads its settings at startup.
        with mock.patch.dict(os.environ, SETTINGS[name]), single_threaded_process() as pool:
            trim_every = TRIM_EVERY.get(name)
            held = pool.submit(run, args.passes, trim_every).result()
            runs[name] = {'environment': SETTINGS[name], 'trim_every': trim_every, 'held': held}
        print(name, json.dumps(runs[name], indent=2), flush=True)
    if args.json is not None:
        report = {'torch': torch.__version__, 'passes': args.passes}
        before = json.loads(args.json.read_text()) if args.json.exists() else {}
        # Keep runs of other settings if torch and the number of passes are the same.
        report['runs'] = {**before['runs'], **runs} if {**before, **report} == before else runs
        args.json.write_text(json.dumps(report, indent=2) + '\n')


def single_threaded_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        1, multiprocessing.get_context('spawn'), initializer=torch.set_num_threads, initargs=(1,)
    )


def run(passes: int, trim_every: int | None = None) -> list[dict[str, Any]]:
    """Return the number of distinct sizes and the retained resources after each tenth of the passes.

    Sides are 1 to 200 pixels. Every tenth pass is a training step, forward and backward.
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
    """Return the memory in MiB and the numbers of file descriptors, threads and live tensors of this process.

    ``resident`` is the resident memory; ``in_use`` is allocated and not freed; ``kept`` is freed and cached by the C
    library; ``plans`` is the number of map sizes with cached index tables.
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
    """The result of mallinfo2(3), memory statistics of glibc 2.33 or later."""

    _names = 'arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost'
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]

    @classmethod
    def now(cls) -> _Mallinfo2:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = cls
        return mallinfo2()


if __name__ == '__main__':
    main()
