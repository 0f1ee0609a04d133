"""The error of checkpoints, and how to recognise out-of-memory errors of any device."""

from __future__ import annotations


class CheckpointError(ValueError, RuntimeError):
    """A checkpoint cannot be read or does not fit; the model keeps its weights.

    It is also a RuntimeError because ``load_state_dict`` raises that type.
    """


# Torch raises a RuntimeError: the first message is of accelerators, the second of a CPU, the third for sizes that
# overflow an integer, and the fourth one of oneDNN. The last two are of ONNX Runtime.
_MESSAGES = (
    'out of memory',
    "can't allocate memory",
    'Storage size calculation overflowed',
    'could not create a primitive',
    'Failed to allocate memory',
    'bad allocation',
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the device or the host is out of memory."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _MESSAGES)
