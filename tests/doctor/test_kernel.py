"""The comparison of the Triton kernel with torch by ``swin-dense doctor --time``, in Triton's interpreter."""

import pytest
import torch

from swin_dense.doctor import kernel
from tests.conftest import FLOAT16, needs_half
from tests.ops.devices import needs_interpreter

CPU = torch.device('cpu')
SMALL = kernel.Case(15, 20, 96, 3, 7, torch.float32)


@needs_interpreter
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, FLOAT16], ids=str)
def test_the_kernel_is_found_right(dtype):
    kernel.check(SMALL._replace(dtype=dtype), CPU)


@needs_interpreter
def test_a_wrong_kernel_is_named(monkeypatch):
    attend = kernel.window_attention

    def wrong(*args):
        return attend(*args) * (1.01 if args[-1] == 'triton' else 1.0)

    monkeypatch.setattr(kernel, 'window_attention', wrong)
    with pytest.raises(
        RuntimeError, match=r"output of the Triton kernel errs by 1\.0e-02 .* leave attn_backend='auto'"
    ):
        kernel.check(SMALL, CPU)


@needs_half
def test_results_are_finite_in_float16_at_the_largest_size():
    case = next(case for case in kernel.CASES if case.dtype == torch.float16)
    for name, found in kernel._results(case, 'reference', case.dtype, CPU).items():
        assert found.isfinite().all(), name
