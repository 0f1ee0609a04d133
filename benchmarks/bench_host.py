"""Information on the machine and on this process, mostly read from Linux's /proc."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The kinds of processors that were measured, by the first word of the files of their results.
PROCESSORS = {
    'zen5': 'AMD EPYC, Zen 5',
    'amd': 'AMD EPYC, Zen 4',
    'zen3': 'AMD EPYC, Zen 3',
    'intel': 'Intel Xeon, AMX',
    'arm': 'ARM',
}
# What tells the kind in a description by processor(); Zen 3 and Zen 4 are of one family.
MARKS = {'family 26': 'zen5', 'family 25.*avx512f': 'amd', 'family 25': 'zen3', 'amx': 'intel', '^ARM': 'arm'}
FEATURES = ('avx2', 'avx512f', 'avx512_bf16', 'amx_tile')  # those on which the speed of matrix products depends


def kind_of(description: str) -> str | None:
    """Return the key in PROCESSORS of a processor described by :func:`processor`, or None if it is of another kind."""
    for mark, kind in MARKS.items():
        if re.search(mark, description, re.I):
            return kind
    return None


def kind_of_processor() -> str:
    """Return the key of this processor in PROCESSORS.

    Raises:
        SystemExit: it is of no kind that was measured.
    """
    kind = kind_of(processor())
    if kind is None:
        raise SystemExit(f'{processor()}: add this kind to PROCESSORS and MARKS in benchmarks/bench_host.py')
    return kind


def processor() -> str:
    """Return the processor and the number of cores, such as 'AMD EPYC (family 25, model 17), avx512f, 2 cores'."""
    fields = dict(re.findall(r'(.*?)\s*: (.*)', Path('/proc/cpuinfo').read_text()))
    architecture = 'ARM' if 'CPU implementer' in fields else 'unknown'
    name = fields.get('model name', architecture)
    features = [feature for feature in FEATURES if feature in fields.get('flags', '').split()]
    model = f'(family {fields.get("cpu family")}, model {fields.get("model")})'
    return ', '.join([f'{name} {model}', *features, f'{len(os.sched_getaffinity(0))} cores'])


def describe(device: str, packages: Sequence[str]) -> dict[str, Any]:
    """Return what a run records of the machine, as the tables of the pages name it, and of the installed packages."""
    import torch

    import swin_dense
    from swin_dense.utils.packages import versions_of

    versions = {'python': platform.python_version()}
    for package in packages:
        versions |= versions_of(package)
    kind = kind_of(processor())
    on_gpu = device == 'cuda' and torch.cuda.is_available()
    return {
        'machine': torch.cuda.get_device_name() if on_gpu else PROCESSORS.get(kind or '', processor()),
        'processor': processor(),
        'release': swin_dense.__version__,
        'date': time.strftime('%Y-%m-%d'),
        'versions': versions,
        'load_average': os.getloadavg(),
    }


def held_mib(field: str = 'VmRSS') -> float:
    """Return the current ('VmRSS') or peak ('VmHWM') resident memory of this process in MiB.

    The peak of ``getrusage`` is not usable here, because it may be that of the parent process.

    Raises:
        ValueError: /proc/self/status has no such field.
    """
    found = re.search(rf'^{field}:\s+(\d+) kB', Path('/proc/self/status').read_text(), re.M)
    if found is None:
        raise ValueError(f'/proc/self/status has no {field}')
    return int(found[1]) / 2**10


def reset_peak() -> float:
    """Return the resident memory in MiB without what was freed, and let its peak begin anew.

    A process that has built and freed a model keeps its memory, in which the next temporaries would not be seen.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path('/proc/self/clear_refs').write_text('5')
    return held_mib()
