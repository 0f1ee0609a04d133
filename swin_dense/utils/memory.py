"""Recognise out-of-memory errors of any device."""

from __future__ import annotations

from swin_dense.utils.compat import OutOfMemoryError


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host is out of memory."""
    # On a CPU, torch raises a plain RuntimeError. The second message is raised for sizes that overflow an integer, the
    # third by oneDNN if it cannot allocate.
    messages = ("can't allocate memory", 'Storage size calculation overflowed', 'could not create a primitive')
    return isinstance(error, (OutOfMemoryError, MemoryError)) or any(text in str(error) for text in messages)
