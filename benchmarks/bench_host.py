"""What Linux says of the machine and of this process."""

from __future__ import annotations

import os
import re
from pathlib import Path


def processor() -> str:
    """Return the name of the processor and how many of its cores may be used."""
    name = re.search(r'model name\s*: (.*)', Path('/proc/cpuinfo').read_text())
    return f'{name[1] if name else "unknown"}, {len(os.sched_getaffinity(0))} cores'


def held_mib(field: str = 'VmRSS') -> float:
    """Return the MiB that this process holds, or held at most ('VmHWM'); that of getrusage may be its parent's.

    Raises:
        ValueError: /proc/self/status has no such field.
    """
    found = re.search(rf'^{field}:\s+(\d+) kB', Path('/proc/self/status').read_text(), re.M)
    if found is None:
        raise ValueError(f'/proc/self/status has no {field}')
    return int(found[1]) / 2**10
