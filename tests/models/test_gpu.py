"""Whole backbones on a GPU against float64 on a CPU, in eager mode, compiled, in graphs and in low precision."""

import warnings

import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone, extract_pyramid
from tests.conftest import TINY, randomize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')]
# Heads of 16 channels, as the kernel needs; maps with padding, and with windows of several regions.
OPTIONS = {**TINY, 'drop_path_rate': 0.0}
SIZES = [(64, 96), (75, 50), (7, 9)]
BACKENDS = ['sdpa', 'triton', 'reference']


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    """Convolutions may use TF32 by default, whose products have 11 bits of mantissa."""
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)


def build(backend='auto', kind=SwinBackbone, **options):
    return randomize(kind(**{**OPTIONS, **options}, attn_backend=backend))


def maps_and_gradients(model, img):
    outs = model(img)
    factors = [torch.linspace(-1, 1, out.numel(), device=out.device).view_as(out).to(out.dtype) for out in outs]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [*outs, *torch.autograd.grad(outs, trained, factors)]


def largest_error(found, truth):
    """Return the largest error of any tensor, relative to its largest value, or a thousandth of the largest of all."""
    truth = [x.detach().cpu().double() for x in truth]
    largest = [x.abs().max() for x in truth]
    floor = max(largest) / 1000  # some gradients are zero but for rounding
    errors = [
        (a.detach().cpu().double() - b).abs().max() / torch.maximum(scale, floor)
        for a, b, scale in zip(found, truth, largest, strict=True)
    ]
    return max(errors).item()


@pytest.mark.parametrize('size', SIZES, ids=str)
@pytest.mark.parametrize(
    ('backend', 'options'),
    [
        *((name, {}) for name in BACKENDS),
        *((name, {'window_size': 12}) for name in BACKENDS),
        *((name, {'with_cp': True}) for name in BACKENDS),
        *((name, {'kind': SwinV2Backbone, 'window_size': 8}) for name in ('sdpa', 'triton')),
    ],
    ids=str,
)
def test_maps_and_gradients_equal_float64(backend, options, size):
    model = build(backend, **options).train()
    img = torch.randn(2, 3, *size)
    exact = build('reference', **options).double().train()
    truth = maps_and_gradients(exact, img.double())
    found = maps_and_gradients(model.cuda(), img.cuda())
    assert largest_error(found, truth) < 1e-4


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_auto_is_the_kernel_in_eager_mode(dtype):
    img = torch.randn(2, 3, 75, 50, device='cuda', dtype=dtype)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter('error')
        ours, kernel = (build(name).to('cuda', dtype)(img) for name in ('auto', 'triton'))
    for a, b in zip(ours, kernel, strict=True):
        assert torch.equal(a, b)


def test_many_sizes_after_a_capture_do_not_change_its_graph():
    """The graph reads plans, which a cache of 64 would free."""
    model = build('sdpa').cuda().eval()
    img = torch.randn(1, 3, 75, 50, device='cuda')
    with torch.no_grad():
        model(img)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = model(img)
        for side in range(32, 232, 4):
            model(torch.randn(1, 3, side, 32, device='cuda'))
        graph.replay()
        for a, b in zip(outs, model(img), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('backend', ['sdpa', 'triton'])
def test_autocast_errs_at_most_twice_as_much_as_plain_operations(backend, dtype):
    img = torch.randn(2, 3, 75, 50)
    truth = maps_and_gradients(build('reference').double(), img.double())
    errors = []
    for name in (backend, 'reference'):
        model = build(name).cuda().train()
        with torch.autocast('cuda', dtype):
            found = maps_and_gradients(model, img.cuda())
        assert all(x.isfinite().all() for x in found)
        errors.append(largest_error(found, truth))
    assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize('backend', ['auto', 'triton'])
def test_compiled_models_equal_eager_ones_at_every_size(backend):
    options = {'depths': (2, 1), 'num_heads': (1, 2), 'strides': (4, 2)}  # four stages compile for minutes
    model = build(backend, **options).cuda().train()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    for size in SIZES:
        img = torch.randn(2, 3, *size, device='cuda')
        assert largest_error(maps_and_gradients(compiled, img), maps_and_gradients(model, img)) < 1e-4


@pytest.mark.parametrize('backend', BACKENDS)
def test_a_captured_graph_gives_the_same_bits(backend):
    model = build(backend).cuda().eval()
    img = torch.randn(2, 3, 75, 50, device='cuda')
    with torch.no_grad():
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # warm up, as the documentation of graphs says
            model(img)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = model(img)
        img.copy_(torch.randn_like(img))
        graph.replay()
        for a, b in zip(outs, model(img), strict=True):
            assert torch.equal(a, b)


def test_the_kernel_trains_with_the_same_bits_every_time():
    model = build('triton').cuda().train()
    img = torch.randn(2, 3, 75, 50, device='cuda')
    first, second = (maps_and_gradients(model, img) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize('backend', BACKENDS)
def test_an_empty_batch_and_channels_last(backend):
    model = build(backend).cuda()
    assert [len(out) for out in model(torch.zeros(0, 3, 64, 64, device='cuda'))] == [0] * 4
    img = torch.randn(2, 3, 64, 80, device='cuda')
    last = img.to(memory_format=torch.channels_last)
    for a, b in zip(model(img), model(last), strict=True):
        torch.testing.assert_close(a, b)


def test_a_pyramid_is_the_same_as_on_a_cpu():
    model = build()
    img = torch.rand(3, 75, 50)
    on_cpu = extract_pyramid(model, img, device='cpu')
    on_gpu = extract_pyramid(model, img, device='cuda')
    assert largest_error(on_gpu.values(), on_cpu.values()) < 1e-4
