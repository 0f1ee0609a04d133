"""Information on the machine and on this process, read from Linux's /proc."""

from __future__ import annotations

import os
import re
from pathlib import Path


def processor() -> str:
    """Return the name of the processor and the number of cores available to this process."""
    name = re.search(r'model name\s*: (.*)', Path('/proc/cpuinfo').read_text())
    return f'{name[1] if name else "unknown"}, {len(os.sched_getaffinity(0))} cores'


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
