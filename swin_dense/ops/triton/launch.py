"""Launch kernels that Triton has compiled, without the search of Triton at every launch.

``kernel[grid](...)`` binds its arguments to a signature and looks at the type, value and alignment of each, which takes
five times as long as the launch of the kernel that it finds. A kernel that is compiled ahead, as in Triton's tutorials,
is launched with its values only. If a Triton version behaves differently, the trial fails and the kernel is not used.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from swin_dense.ops.triton import gpu
from swin_dense.utils import private

_dtype_of = operator.attrgetter('dtype')


class Launch:
    """A kernel with all of its arguments but the tensors; for one size and on one device.

    Args:
        kernel: a function of tensors and then of numbers and constants. It must not be specialised for the numbers.
        programs: number of programs, the grid.
        arguments: numbers and constants by name.
        options: those of Triton, such as ``num_warps``.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        arguments: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self._kernel = kernel
        self._grid = (programs, 1, 1)
        self._arguments = arguments
        self._options = options
        # In the order of the kernel, which takes them without names once it is compiled
        self._values = [arguments[name] for name in kernel.arg_names[-len(arguments) :]]
        self._compiled: dict[tuple[torch.dtype, ...], Callable[..., None]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Launch the kernel for contiguous tensors that are aligned (:func:`swin_dense.ops.triton.gpu.aligned`)."""
        if self._grid[0] == 0:
            return
        if gpu.IS_INTERPRETED:
            self._kernel[self._grid](*tensors, **self._arguments, **self._options)
            return
        if tensors[0].get_device() != private.current_cuda_device():
            with torch.cuda.device_of(tensors[0]):
                self(*tensors)
            return
        dtypes = tuple(map(_dtype_of, tensors))
        run = self._compiled.get(dtypes)
        if run is None:
            compiled = self._kernel.warmup(*tensors, **self._arguments, **self._options, grid=self._grid)
            run = self._compiled[dtypes] = compiled[self._grid]
        run(*tensors, *self._values)
