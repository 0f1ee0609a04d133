"""Serve a file as a program without torch does: `python serving.py FILE RUNTIME IMAGES.npz`.

The program checks its processes and its memory, and ends with the exit status 1 where a check fails.
"""

import os
import sys
import traceback

import numpy as np

from swin_dense import runtime

WARM, SIZES = 60, 100  # numbers of image sizes
GROWTH = 60  # MiB; without a bound, OpenVINO adds more than one for each size


def main(path, name, images):
    inputs = [*np.load(images).values()]

    def loaded():
        return runtime.load(path, runtime=name, threads=1)

    # Each process loads the model itself.
    child = in_child(lambda: save(loaded().run(inputs[0]), f'{images}.child.npz'))
    assert child == 0
    in_other_process = np.load(f'{images}.child.npz').values()
    model = loaded()
    expected = model.run(inputs[0])
    assert_equal(in_other_process, expected)
    # A model from before the fork.
    if name == 'openvino':
        assert in_child(lambda: must_refuse(lambda: model.run(inputs[0]))) == 0
        assert in_child(lambda: must_refuse(loaded)) == 0
    else:
        assert in_child(lambda: assert_equal(model.run(inputs[0]), expected)) == 0
    assert_equal(model.run(inputs[0]), expected)
    assert 'torch' not in sys.modules
    check_memory(model, inputs[-1])


def in_child(function):
    """Return the exit status of a forked process that calls a function."""
    child = os.fork()
    if not child:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def save(outputs, path):
    np.savez(path, *outputs)


def assert_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def must_refuse(function):
    message = ''
    try:
        function()
    except RuntimeError as error:
        message = str(error)
    assert 'before this process was forked' in message
    assert "get_context('spawn')" in message


def check_memory(model, largest):
    """Check that images of ever other sizes, none larger than the first, do not add memory for ever."""
    random = np.random.default_rng(0)
    height, width = largest.shape[2:]
    divisor = model.facts.get('limits', {}).get('divisor', 1)
    model.run(largest)
    used = []
    for count in (WARM, SIZES):
        for _ in range(count):
            sides = (random.integers(32 // divisor, side // divisor + 1) * divisor for side in (height, width))
            rows, columns = sides
            model.run(np.ascontiguousarray(largest[:, :, :rows, :columns]))
        used.append(resident())
    assert used[1] - used[0] < GROWTH, f'{used[0]:.0f} MiB after {WARM} sizes, {used[1]:.0f} after {SIZES} more'


def resident():
    """Return the memory of this process in MiB."""
    with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / 2**20


if __name__ == '__main__':
    main(*sys.argv[1:])
