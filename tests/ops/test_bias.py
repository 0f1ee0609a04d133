"""Compare the kernels that expand the relative position bias with the sliding view of ``ops.windows``."""

import pytest
import torch

from swin_dense.ops import windows
from swin_dense.ops.triton import bias, norm
from tests.ops.devices import compile_for_h200, device, needs_interpreter


def with_gradient(function, table, window, strided=False):
    out = function(table, window)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return out, torch.autograd.grad(out, table, grad.mT.contiguous().mT if strided else grad)[0]


@device
@pytest.mark.parametrize('strided', [False, True])
@pytest.mark.parametrize('window', [(7, 7), (3, 5), (1, 4), (1, 1)], ids=str)
def test_equals_the_sliding_view(window, strided, device):
    table = torch.randn((2 * window[0] - 1) * (2 * window[1] - 1), 3, device=device, requires_grad=True)
    if strided:
        table = table.mT.contiguous().mT
    expected = with_gradient(windows.relative_position_bias, table, window)
    actual = with_gradient(bias.relative_position_bias, table, window, strided)
    assert torch.equal(actual[0], expected[0])
    assert actual[0].is_contiguous()
    torch.testing.assert_close(actual[1], expected[1])


@device
def test_operators_pass_opcheck(device):
    torch.library.opcheck(bias._forward, (torch.randn(15, 2, device=device, requires_grad=True), (2, 3)))
    torch.library.opcheck(bias._backward, (torch.randn(2, 6, 6, device=device), (2, 3)))


@needs_interpreter
def test_a_table_of_a_different_window_is_refused():
    with pytest.raises(ValueError, match=r'window of 3 x 3 must have the shape \(25, heads\), got \(24, 2\)'):
        bias.relative_position_bias(torch.zeros(24, 2), (3, 3))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(norm.gpu._unusable is not None, reason=str(norm.gpu._unusable))
def test_kernels_compile_for_an_h200():
    rows = compile_for_h200("""
        from swin_dense.ops.triton import bias
        table = torch.zeros(529, 4, requires_grad=True)
        bias.relative_position_bias(table, (12, 12)).sum().backward()
    """)
    assert [name for name, _ in rows] == ['forward', 'backward']
