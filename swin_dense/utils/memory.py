"""Whether an error says that memory does not suffice, on any device."""

from __future__ import annotations

from swin_dense.utils.compat import OutOfMemoryError


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the memory of the device, or of the machine, does not suffice."""
    # On a CPU there is no type of error for it. The second is said of more bytes than can be counted, the third by
    # oneDNN when it gets none.
    said = ("can't allocate memory", 'Storage size calculation overflowed', 'could not create a primitive')
    return isinstance(error, (OutOfMemoryError, MemoryError)) or any(text in str(error) for text in said)
