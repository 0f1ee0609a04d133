"""Whole backbones on a GPU against float64 on a CPU, in eager mode, compiled, in graphs and in low precision."""

import threading
import warnings

import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone, extract_pyramid
from swin_dense.ops.triton import choice, trials
from tests.conftest import TINY, randomize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device'),
]
# Heads of 16 channels, as the kernel needs; maps with padding, and with windows of several regions.
OPTIONS = {**TINY, 'drop_path_rate': 0.0}
SIZES = [
    (64, 96),
    (75, 50),
    (7, 9),
]
BACKENDS = ['sdpa', 'triton', 'reference']


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch):
    """Convolutions may use TF32 by default, whose products have 11 bits of mantissa."""
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', False)


def build(backend='auto', kind=SwinBackbone, **options):
    return randomize(kind(**{**OPTIONS, **options}, attn_backend=backend))


def image(*size, **options):
    return torch.randn(size, device='cuda', **options)


def maps_and_gradients(model, img):
    outs = model(img)
    factors = []
    for out in outs:
        values = torch.linspace(
            -1,
            1,
            out.numel(),
            device=out.device,
        )
        factors.append(values.view_as(out).to(out.dtype))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [*outs, *torch.autograd.grad(outs, trained, factors)]


def exact_on_a_cpu(tensors):
    return [tensor.detach().cpu().double() for tensor in tensors]


def largest_error(found, truth):
    """Return the largest error of any tensor, relative to its largest value, or a thousandth of the largest of all."""
    truth = exact_on_a_cpu(truth)
    scales = [exact.abs().max() for exact in truth]
    floor = max(scales) / 1000  # some gradients are zero but for rounding
    errors = []
    for ours, exact, scale in zip(exact_on_a_cpu(found), truth, scales, strict=True):
        errors.append((ours - exact).abs().max() / torch.maximum(scale, floor))
    return max(errors).item()


def assert_same_bits(found, expected):
    for ours, wanted in zip(found, expected, strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize('size', SIZES, ids=str)
@pytest.mark.parametrize(
    ('options', 'backends'),
    [
        ({}, BACKENDS),
        ({'window_size': 12}, BACKENDS),
        ({'with_cp': True}, BACKENDS),
        ({'kind': SwinV2Backbone, 'window_size': 8}, ['sdpa', 'triton']),
    ],
    ids=str,
)
def test_maps_and_gradients_equal_float64(options, backends, size):
    img = torch.randn(2, 3, *size)
    exact = build('reference', **options).double().train()
    truth = maps_and_gradients(exact, img.double())
    for backend in backends:
        model = build(backend, **options).cuda().train()
        found = maps_and_gradients(model, img.cuda())
        assert largest_error(found, truth) < 1e-4, backend


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_auto_is_the_kernel_in_eager_mode(dtype):
    img = image(2, 3, 75, 50, dtype=dtype)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter('error')
        ours = build('auto').to('cuda', dtype)(img)
        kernel = build('triton').to('cuda', dtype)(img)
    assert_same_bits(ours, kernel)


@torch.no_grad()
def test_many_sizes_after_a_capture_do_not_change_its_graph():
    """The graph reads plans, which a cache of 64 would free."""
    model = build('sdpa').cuda().eval()
    img = image(1, 3, 75, 50)
    model(img)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = model(img)
    for side in range(32, 232, 4):
        model(image(1, 3, side, 32))
    graph.replay()
    assert_same_bits(outs, model(img))


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
    options = {
        'depths': (2, 1),
        'num_heads': (1, 2),
        'strides': (4, 2),
    }  # four stages compile for minutes
    model = build(backend, **options).cuda().train()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    for size in SIZES:
        img = image(2, 3, *size)
        assert largest_error(maps_and_gradients(compiled, img), maps_and_gradients(model, img)) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize('backend', BACKENDS)
def test_a_captured_graph_gives_the_same_bits(backend):
    model = build(backend).cuda().eval()
    img = image(2, 3, 75, 50)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # warm up, as the documentation of graphs says
        model(img)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = model(img)
    img.copy_(torch.randn_like(img))
    graph.replay()
    assert_same_bits(outs, model(img))


def test_a_trial_does_not_end_the_capture_of_another_thread(monkeypatch):
    monkeypatch.setattr(choice, 'reasons', choice.Reasons())
    graph, static, found = torch.cuda.CUDAGraph(), torch.ones(4, device='cuda'), []
    begun, tried = threading.Event(), threading.Event()

    def capture():
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):  # in the default mode, 'global'
            found.append(static + 1)
            begun.set()
            tried.wait(60)
            found.append(2 * found[0])

    thread = threading.Thread(target=capture)
    thread.start()
    try:
        assert begun.wait(60)
        # Of many channels: torch has no such memory left after the start of a capture, which empties its cache.
        trial = trials.NormTrial(static.device, torch.float16, torch.float32, torch.float16, 3000, True)
        assert choice.reasons[(trials.NormTrial, *trial)] is None
    finally:
        tried.set()
        thread.join()
    graph.replay()
    assert found[1].tolist() == [4.0] * 4


def test_the_kernel_trains_with_the_same_bits_every_time():
    model = build('triton').cuda().train()
    img = image(2, 3, 75, 50)
    assert_same_bits(maps_and_gradients(model, img), maps_and_gradients(model, img))


@pytest.mark.parametrize('backend', BACKENDS)
def test_an_empty_batch_and_channels_last(backend):
    model = build(backend).cuda()
    assert [len(out) for out in model(image(0, 3, 64, 64))] == [0] * 4
    img = image(2, 3, 64, 80)
    last = img.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(img), model(last))


def test_a_pyramid_is_the_same_as_on_a_cpu():
    model = build()
    img = torch.rand(3, 75, 50)
    on_cpu = extract_pyramid(model, img, device='cpu')
    on_gpu = extract_pyramid(model, img, device='cuda')
    assert largest_error(on_gpu.values(), on_cpu.values()) < 1e-4
