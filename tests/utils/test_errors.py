"""Errors that mean too little memory are recognised by their messages."""

import pytest

from swin_dense.utils.errors import is_out_of_memory


@pytest.mark.parametrize(
    ('error', 'expected'),
    [
        (MemoryError(), True),
        (RuntimeError('CUDA out of memory. Tried to allocate 2 GiB'), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError('could not create a primitive'), True),
        (RuntimeError('Failed to allocate memory for requested buffer of size 4'), True),
        (RuntimeError('bad allocation'), True),
        (RuntimeError('shape mismatch'), False),
    ],
)
def test_out_of_memory_is_recognised(error, expected):
    assert is_out_of_memory(error) is expected
