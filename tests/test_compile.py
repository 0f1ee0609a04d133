"""torch.compile: no graph break, and sizes after the first cost one compilation in all."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from swin_dense import SwinBackbone

TINY = {'embed_dims': 16, 'depths': (2, 2), 'num_heads': (1, 2), 'strides': (4, 2), 'drop_path_rate': 0.0}
# Odd and even, landscape and portrait, multiples of the window and not.
SIZES = ((64, 96), (120, 70), (224, 224), (199, 301))


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize('is_training', [False, True])
def test_sizes_after_the_first_cost_one_recompilation(is_training):
    model = SwinBackbone(**TINY).train(is_training)
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    graphs = []
    for size in SIZES:
        img = torch.randn(1, 3, *size)
        with torch.set_grad_enabled(is_training):
            for ours, expected in zip(compiled(img), model(img), strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        graphs.append(counter.frame_count)
    assert graphs[0] == 1
    assert graphs[-1] <= 2, graphs


@pytest.mark.slow
def test_the_compiled_backward_pass_is_the_eager_one():
    gradients = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        model = SwinBackbone(**TINY, window_size=4)
        run = torch.compile(model, backend='aot_eager', fullgraph=True, dynamic=True) if compile_it else model
        img = torch.randn(2, 3, 50, 70, requires_grad=True)
        sum(out.square().mean() for out in run(img)).backward()
        gradients.append([img.grad, *(parameter.grad for parameter in model.parameters())])
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_an_exported_program_takes_another_batch_and_needs_no_operator_of_ours():
    model = SwinBackbone(**TINY, window_size=4).eval()
    batch = torch.export.Dim('batch', min=1, max=64)
    program = torch.export.export(model, (torch.randn(2, 3, 50, 70),), dynamic_shapes={'img': {0: batch}})
    assert 'swin_dense' not in program.graph_module.code
    img = torch.randn(3, 3, 50, 70)
    for ours, expected in zip(program.module()(img), model(img), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
