"""The memory of a process: keep freed memory for the next pass."""

from __future__ import annotations

import ctypes
import functools
import os
import platform

import torch

# An environment variable; '0' leaves the allocator as it is, and '1' changes it also where passes run on a GPU.
KEEP_VARIABLE = 'SWIN_DENSE_KEEP_MEMORY'

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = (1 << 31) - 1  # of an int
_GLIBC_THRESHOLD = 128 << 10  # the default of both


@functools.cache
def keep_freed() -> bool:
    """Let glibc keep freed memory in this process, which passes on a CPU find again, and return whether it does.

    By default, glibc maps new pages for each large tensor and returns them when it is freed, so every pass pays for the
    same pages again. Afterwards, blocks of up to 1 GiB come from the heap, of which up to 2 GiB of free memory are
    kept: a process stays at its peak. Other allocators and other systems are left as they are.

    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
    """
    wanted = os.environ.get(KEEP_VARIABLE, '0' if torch.cuda.is_available() else '1')
    if platform.libc_ver()[0] != 'glibc' or wanted == '0':
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # glibc before 2.35 refuses more than 32 MiB.
    is_set = mallopt(_M_MMAP_THRESHOLD, 1 << 30) or mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    return bool(is_set and mallopt(_M_TRIM_THRESHOLD, _LARGEST))


def give_back() -> None:
    """Return freed memory to the system, and from now on as soon as it is freed, after an allocation has failed.

    What :func:`keep_freed` keeps lies in pieces between blocks in use, too small for the next large tensor.
    """
    if not keep_freed():
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _GLIBC_THRESHOLD)
    libc.mallopt(_M_TRIM_THRESHOLD, _GLIBC_THRESHOLD)
    libc.malloc_trim(0)
