"""Information on the machine and on this process, read from Linux's /proc."""

from __future__ import annotations

import os
import re
from pathlib import Path

# The kinds of processors that were measured, by the first word of the files of their results.
PROCESSORS = {'zen5': 'AMD EPYC, Zen 5', 'amd': 'AMD EPYC, Zen 4', 'intel': 'Intel Xeon, AMX', 'arm': 'ARM'}
FEATURES = ('avx2', 'avx512f', 'avx512_bf16', 'amx_tile')  # those on which the speed of matrix products depends


def kind_of_processor() -> str:
    """Return the key of this processor in PROCESSORS.

    Raises:
        SystemExit: it is of no kind that was measured.
    """
    fields = _cpuinfo()
    if 'CPU implementer' in fields:
        return 'arm'
    vendor, family, flags = fields.get('vendor_id'), fields.get('cpu family'), fields.get('flags', '').split()
    if vendor == 'AuthenticAMD' and family == '26':
        return 'zen5'
    if vendor == 'AuthenticAMD' and family == '25' and 'avx512f' in flags:  # Zen 3, of the same family, has none
        return 'amd'
    if vendor == 'GenuineIntel' and 'amx_tile' in flags:
        return 'intel'
    raise SystemExit(f'{processor()}: add this kind to PROCESSORS and kind_of_processor in benchmarks/bench_host.py')


def _cpuinfo() -> dict[str, str]:
    return dict(re.findall(r'(.*?)\s*: (.*)', Path('/proc/cpuinfo').read_text()))


def processor() -> str:
    """Return the processor and the number of cores, such as 'AMD EPYC (family 25, model 17), avx512f, 2 cores'."""
    fields = _cpuinfo()
    name = f'{fields.get("model name", "unknown")} (family {fields.get("cpu family")}, model {fields.get("model")})'
    features = [feature for feature in FEATURES if feature in fields.get('flags', '').split()]
    return ', '.join([name, *features, f'{len(os.sched_getaffinity(0))} cores'])


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
