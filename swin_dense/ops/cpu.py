"""Detect the vendor of the processor, because the libraries in torch differ in speed between vendors."""

from __future__ import annotations

import functools
import platform
from pathlib import Path


@functools.cache
def is_amd() -> bool:
    return 'AuthenticAMD' in _processor()


def _processor() -> str:
    try:
        return Path('/proc/cpuinfo').read_text(encoding='utf-8', errors='replace')
    except OSError:
        return platform.processor()  # on Windows: family, model and vendor
