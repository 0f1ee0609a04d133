"""Compare the Triton kernels with tests/textbook.py in float64, in triton's interpreter and, if available, on a GPU."""

import functools
import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from swin_dense import SwinBackbone, ops
from swin_dense.ops.triton import attention, gpu
from swin_dense.ops.windows import WindowSpec, relative_position_bias
from tests import textbook
from tests.conftest import TINY, assert_near, assert_within, randomize
from tests.derivatives import maps_and_gradients, weighted_sum
from tests.ops.devices import compile_for, device, needs_interpreter, run_python


class Case(NamedTuple):
    """A map of (height, width), a window and a shift, all in tokens."""

    size: tuple[int, int]
    window: tuple[int, int] = (7, 7)
    shift: tuple[int, int] = (3, 3)
    batch: int = 1
    heads: int = 1
    head_dim: int = 16


def inputs(case, dtype=torch.float32, device='cpu', magnitude=1.0):
    """Return qkv, a table of position bias and pad_kv of the given magnitude, and a gradient of the output.

    The keys and values of padding tokens are pad_kv, and their queries are zero.
    """
    generator = torch.Generator().manual_seed(0)
    channels = case.heads * case.head_dim

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    qkv = magnitude * draw(case.batch, *case.size, 3 * channels)
    table = magnitude * draw(attention.offsets(case.window), case.heads)
    pad_kv = magnitude * draw(2 * channels)
    grad = draw(case.batch, *case.size, channels)
    return [x.to(device, dtype) for x in (qkv, table, pad_kv)], grad.to(device, dtype)


def attend(case, tensors, backend, scale=None, dropout=0.0):
    """Run the kernel, or tests/textbook.py as the reference."""
    qkv, table, pad_kv = tensors
    if scale is None:
        scale = case.head_dim**-0.5
    spec = WindowSpec(case.heads, case.window, case.shift, scale)
    if backend == 'reference':
        bias = None if table is None else relative_position_bias(table, case.window)
        return textbook.window_attention(qkv, bias, pad_kv, spec)
    height, width, channels = *qkv.shape[1:3], qkv.shape[3] // 3
    pads = 0, 0, 0, -width % case.window[1], 0, -height % case.window[0]
    padded = F.pad(qkv, pads)
    if pad_kv is not None:
        is_padding = F.pad(torch.zeros_like(qkv[..., :1]), pads, value=1.0)
        padded = padded + is_padding * F.pad(pad_kv, (channels, 0)).to(qkv.dtype)
    # The kernel reads the output of the layer, and no other value of the map.
    out = ops.window_attention(
        padded[..., :channels],
        lambda _: padded,
        table,
        spec,
        nn.Dropout(dropout),
        backend,
    )
    return out[:, :height, :width]


def output_and_gradients(case, tensors, grad, backend, dtype=None, **options):
    """Return the output, then the gradient of each tensor that is not None, computed in ``dtype``."""
    leaves = []
    for x in tensors:
        if x is not None:
            x = x.detach().to(dtype or x.dtype).requires_grad_()
        leaves.append(x)
    out = attend(case, leaves, backend, **options)
    wanted = [x for x in leaves if x is not None]
    return out, *torch.autograd.grad(out, wanted, grad.to(out.dtype))


def assert_like_reference(case, tensors, grad, tolerance=2e-5, **options):
    expected = output_and_gradients(case, tensors, grad, 'reference', torch.float64, **options)
    actual = output_and_gradients(case, tensors, grad, 'triton', **options)
    for a, e in zip(actual, expected, strict=True):
        assert_near(a.double(), e, tolerance)


def assert_same_bits(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@device
@pytest.mark.parametrize(
    'case',
    [
        Case((9, 15), batch=2, head_dim=32),  # padding below and at the right, regions
        Case((14, 14), heads=3, head_dim=32),  # no padding
        Case((14, 8), (7, 7), (0, 3), head_dim=64),  # a shift along one side only
        Case((20, 5), (7, 7), (0, 0), heads=2),
        Case((4, 5)),  # smaller than a window
        Case((1, 1), (2, 2), (1, 1), batch=3),
        Case((9, 8), (4, 8), (1, 5), heads=2, head_dim=32),
        Case((13, 7), (12, 12), (6, 6), head_dim=32),  # several tiles
        Case((5, 5), (9, 10), (4, 5), heads=2, head_dim=64),
        Case((16, 3), (16, 16), (8, 8)),
    ],
    ids=str,
)
def test_matches_the_reference(case, device):
    assert_like_reference(case, *inputs(case, device=device))


@device
@pytest.mark.parametrize(
    ('case', 'has_bias', 'has_pad', 'scale'),
    [
        (Case((7, 5), (7, 5), (0, 3)), False, False, None),  # the only window of the map has regions
        (Case((5, 7), (3, 5), (2, 0), batch=2), False, True, 0.0),
        (Case((8, 9), (8, 4), (1, 3), heads=2), True, False, -0.7),
    ],
    ids=str,
)
def test_matches_the_reference_without_bias_or_padding(device, case, has_bias, has_pad, scale):
    (qkv, table, pad_kv), grad = inputs(case, device=device)
    tensors = [qkv, table if has_bias else None, pad_kv if has_pad else None]
    assert_like_reference(case, tensors, grad, scale=scale)


@device
@pytest.mark.parametrize('window', [(7, 7), (9, 9)], ids=str)
@pytest.mark.parametrize(
    'size',
    [
        (9, 15),
        (1, 5),
        (14, 18),
    ],
    ids=str,
)
def test_only_tokens_of_the_map_are_written(size, window, device):
    """The map needs padding, and the output has neither padding nor the strides of a larger map."""
    generator = torch.Generator().manual_seed(0)
    channels = 32
    drawn = [
        torch.randn(2, *size, channels, generator=generator, dtype=torch.float64),
        torch.randn(3 * channels, channels, generator=generator, dtype=torch.float64) / channels**0.5,
        torch.randn(attention.offsets(window), 2, generator=generator, dtype=torch.float64),
    ]
    spec = WindowSpec(2, window, (window[0] // 2, window[1] // 2), 0.25)

    def run(backend, dtype):
        leaves = [tensor.to(device, dtype).requires_grad_() for tensor in drawn]
        x, weight, table = leaves
        project = functools.partial(F.linear, weight=weight)
        out = ops.window_attention(x, project, table, spec, nn.Dropout(0.0), backend)
        assert out.shape == x.shape
        assert out.is_contiguous()
        return [out, *torch.autograd.grad(weighted_sum([out]), leaves)]

    exact = run('reference', torch.float64)
    for ours, wanted in zip(run('triton', torch.float32), exact, strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=2e-4, atol=2e-5)


def test_up_to_64_tokens_are_one_tile_and_more_are_tiles_that_pad_least():
    for tokens in range(1, attention.MAX_TOKENS + 1):
        sides = [side for side in (16, 32, 64) if side >= tokens]
        expected = sides[0] if sides else min((64, 32), key=lambda side: math.ceil(tokens / side) * side)
        assert attention.parameters(tokens, 32, torch.float16)['BLOCK'] == expected
        assert attention.tiles(tokens, 32, torch.float16) == math.ceil(tokens / expected)
    # In registers, a larger one would not fit.
    assert attention.parameters(64, 64, torch.float32)['BLOCK'] == 32


@pytest.mark.parametrize(
    ('tokens', 'dtype', 'fastest'),
    [
        (49, torch.bfloat16, (64, 4, 3)),
        (144, torch.bfloat16, (32, 1, 3)),
        (49, torch.float32, (64, 4, 2)),
        (144, torch.float32, (32, 1, 1)),
    ],
)
def test_tiles_warps_and_stages_are_the_fastest_that_were_measured(tokens, dtype, fastest):
    """As in the table of docs/decisions/triton-kernel.md."""
    assert tuple(attention.parameters(tokens, 32, dtype).values()) == fastest


@pytest.mark.skipif(gpu._unusable is not None, reason=str(gpu._unusable))
def test_programs_are_about_eight_per_multiprocessor(monkeypatch):
    """Two maps have 2 x 13 x 84 windows of 3 heads: 312 strips of 7 are the most that 1056 programs allow."""
    monkeypatch.setattr(gpu, 'multiprocessors', lambda device: 132)
    shape, size = (2, 208, 336, 288), (200, 336)
    device = torch.device('cuda')
    launches = attention._Launches(shape, torch.float16, device, (3, 1), 3, (16, 4), (8, 2), 1.0, size)
    assert (launches.strips, launches.tiles) == (312, 1)
    assert launches.forward._grid == (312 * 3, 1, 1)


@device
def test_regions_are_penalised_instead_of_masked(device):
    """If scores exceed the penalty, tokens of other regions are attended to, as in the official code."""
    case = Case((7, 7))
    tensors, _ = inputs(case, torch.float32, device, magnitude=8.0)
    expected = attend(case, [x.double() for x in tensors], 'reference')
    actual = attend(case, tensors, 'triton')
    assert_near(actual.double(), expected, 1e-3)
    # Check that the comparison is sensitive: one region instead of four gives a different result.
    one_region = attend(case._replace(shift=(0, 0)), tensors, 'triton')
    assert (one_region - actual).abs().max() > 1


@device
def test_scores_of_hundreds_do_not_overflow(device):
    """Weights for the queries of padding tokens are computed and discarded, and must not overflow either."""
    case = Case((9, 5))
    (qkv, table, pad_kv), grad = inputs(case, device=device)
    assert_like_reference(case, [qkv, 300 * table, pad_kv], grad, tolerance=1e-3)


@device
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    'case',
    [
        Case((9, 13), heads=2, head_dim=32),
        Case((14, 8), (9, 9), (4, 4)),
    ],
    ids=str,
)
def test_low_precision_errs_at_most_twice_as_much_as_pytorch(case, dtype, device):
    tensors, grad = inputs(case, dtype, device)
    exact = output_and_gradients(case, tensors, grad, 'reference', torch.float32)
    plain = output_and_gradients(case, tensors, grad, 'reference')
    fused = output_and_gradients(case, tensors, grad, 'triton')
    for e, p, f in zip(exact, plain, fused, strict=True):
        assert f.dtype == dtype
        assert (f - e).norm() <= 2 * (p - e).norm()
        assert (f - e).abs().max() <= 2 * (p - e).abs().max()


@device
def test_parameters_keep_float32_under_autocast(device):
    """If autocast computes qkv in bfloat16, the bias, the padding and their gradients stay in float32."""
    case = Case((9, 9))
    (qkv, table, pad_kv), grad = inputs(case, device=device)
    tensors = [qkv.bfloat16(), table, pad_kv]
    found = output_and_gradients(case, tensors, grad, 'triton')
    assert {x.dtype for x in found[:2]} == {torch.bfloat16}  # the output and the gradient of qkv
    assert {x.dtype for x in found[2:]} == {torch.float32}
    exact = output_and_gradients(case, tensors, grad, 'reference', torch.float64)
    for actual, expected in zip(found, exact, strict=True):
        assert (actual.double() - expected).norm() < 0.01 * expected.norm()


def transposed(x):
    return x.mT.contiguous().mT


def part_of_a_larger(table):
    return torch.cat([table, table], 1)[:, : table.shape[1]]


@device
@pytest.mark.parametrize('restride', [transposed, part_of_a_larger])
@pytest.mark.parametrize('window', [(7, 7), (9, 9)])
def test_strided_inputs(window, restride, device):
    case = Case((9, 8), window, heads=3)
    (qkv, table, pad_kv), grad = inputs(case, device=device)
    strided = [
        qkv.transpose(1, 2).contiguous().transpose(1, 2),
        restride(table),
        pad_kv.repeat_interleave(2)[::2],
    ]
    assert not any(x.is_contiguous() for x in strided)
    assert_like_reference(case, strided, transposed(grad))


@device
def test_empty_batch(device):
    case = Case((9, 8), batch=0)
    tensors, grad = inputs(case, device=device)
    out, grad_qkv, grad_bias, grad_pad = output_and_gradients(case, tensors, grad, 'triton')
    assert out.shape == (0, 9, 8, 16)
    assert grad_qkv.shape == (0, 9, 8, 48)
    assert not grad_bias.any()
    assert not grad_pad.any()


@device
def test_the_same_input_gives_the_same_bits(device):
    batch, repetitions = (2, 1) if device == 'cpu' else (1000, 10)
    case = Case(
        (9, 12),
        (7, 7),
        (3, 3),
        batch,
        heads=2,
        head_dim=32,
    )
    tensors, grad = inputs(case, torch.float16, device)
    first = output_and_gradients(case, tensors, grad, 'triton')
    for _ in range(repetitions):
        assert_same_bits(output_and_gradients(case, tensors, grad, 'triton'), first)


@device
@pytest.mark.parametrize('window', [(7, 7), pytest.param((9, 9), marks=pytest.mark.long)])
def test_operators_pass_opcheck(window, device):
    case = Case((window[0], 2 * window[1]), window)
    qkv, table, _ = inputs(case, device=device)[0]
    size = window[0] - 2, 2 * window[1] - 1
    settings = (case.heads, window, case.shift, 0.25, size)
    leaves = qkv.requires_grad_(), table.requires_grad_()
    torch.library.opcheck(attention._forward_operator, (*leaves, *settings))
    with torch.no_grad():
        out, lse = attention.forward(*leaves, *settings)
        saved = torch.ones_like(out), *leaves, out, lse
        for trains_table in (True, False):
            torch.library.opcheck(attention._backward_operator, (*saved, *settings, trains_table))


@device
def test_compiles_without_graph_breaks_and_once_for_all_sizes(device):
    case = Case((7, 14))

    def function(qkv, table):
        return 2 * attend(case, (qkv + 1, table, None), 'triton')

    def run(function, leaves, grad):
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    torch._dynamo.reset()
    counter = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for size in ((7, 14), (14, 21), (21, 7), (28, 35)):
        (qkv, table, _), grad = inputs(case._replace(size=size), device=device)
        leaves = [qkv.requires_grad_(), table.requires_grad_()]
        assert_same_bits(run(compiled, leaves, grad), run(function, leaves, grad))
    assert counter.frame_count <= 2  # the first size, then dynamic sizes


@device
@pytest.mark.parametrize('with_cp', [False, True])
def test_backbone_gives_the_same_maps_and_gradients(with_cp, device):
    img = torch.randn(1, 3, 24, 20, device=device)
    options = {
        **TINY,
        'depths': (2, 1, 1, 1),
        'window_size': 4,
        'with_cp': with_cp,
        'drop_path_rate': 0.0,
    }
    results = []
    for backend in ('triton', 'reference'):
        model = randomize(SwinBackbone(**options, attn_backend=backend)).to(device)
        results.append(maps_and_gradients(model.train(), img))
    actual, expected = results
    assert_near(actual[:4], expected[:4], 1e-4)
    for ours, wanted in zip(actual[4:], expected[4:], strict=True):
        assert_within(ours, wanted, 1e-3 * wanted.abs().max().item())


@needs_interpreter
@pytest.mark.parametrize(
    ('case', 'dtype', 'dropout', 'message'),
    [
        (Case((8, 8)), torch.float64, 0.0, 'torch.float64'),
        (Case((8, 8), head_dim=24), torch.float32, 0.0, 'head dimension is 24'),
        (Case((8, 8), (17, 16)), torch.float32, 0.0, '17 x 16 tokens, more than 256'),
        (Case((8, 8)), torch.float32, 0.1, 'dropout'),
    ],
)
def test_unsupported_inputs_are_named(case, dtype, dropout, message):
    tensors, _ = inputs(case, dtype)
    with pytest.raises(RuntimeError, match=f'cannot run here: .*{message}'):
        attend(case, tensors, 'triton', dropout=dropout)


@needs_interpreter
def test_a_table_of_a_wrong_shape_is_refused():
    case = Case((8, 8))
    (qkv, table, pad_kv), _ = inputs(case)
    with pytest.raises(ValueError, match=r'\(169, 1\) on cpu, got \(168, 1\) on cpu'):
        attend(case, (qkv, table[:-1], pad_kv), 'triton')


def test_the_package_works_without_triton():
    run_python("""
        import sys
        sys.modules['triton'] = None
        import torch
        from torch import nn
        from swin_dense import ops
        from swin_dense.ops.windows import WindowSpec, relative_position_bias
        spec = WindowSpec(1, (7, 7), (0, 0), 1.0)
        inputs = torch.zeros(1, 7, 7, 16), nn.Linear(16, 48), None, spec, nn.Dropout(0.0)
        ops.window_attention(*inputs)
        try:
            ops.window_attention(*inputs, backend='triton')
        except RuntimeError as error:
            assert 'triton cannot be imported' in str(error), error
        else:
            raise AssertionError('ran without triton')
    """)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(gpu._unusable is not None, reason=str(gpu._unusable))
@pytest.mark.parametrize(
    ('capability', 'shared'),
    [(80, 164), (90, 228)],
    ids=['A100', 'H200'],
)
def test_kernels_compile_to_machine_code(capability, shared):
    """Compile without a GPU, because the compiler may reject code that the interpreter runs."""
    code = """
        import itertools
        from swin_dense.ops.triton import attention, gpu
        for window, dtype in itertools.product(((7, 7), (12, 12)), gpu.DTYPES):
            qkv = torch.zeros(1, *window, 192, dtype=dtype, requires_grad=True)
            table = torch.zeros(attention.offsets(window), 2, requires_grad=True)
            attention._Attention.apply(qkv, table, 2, window, (3, 3), 1.0, window)[0].sum().backward()
    """
    rows = compile_for(capability, code)
    assert [name for name, _ in rows] == [
        *['forward', 'backward_keys', 'table_gradient'] * 3,
        *['forward', 'backward_queries', 'backward_keys', 'table_gradient'] * 3,
    ]
    # Two programs should fit into the shared memory of a multiprocessor, of which each takes one KiB more.
    assert max(size for _, size in rows) <= (shared / 2 - 1) * 1024


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('window', [(7, 7), (12, 12)])
def test_attention_scores_are_not_stored(window):
    case = Case(
        (168, 336),
        window,
        (3, 3),
        batch=8,
        heads=3,
        head_dim=32,
    )
    (qkv, table, _), grad = inputs(case, torch.bfloat16, 'cuda')
    leaves = [qkv.requires_grad_(), table.requires_grad_()]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, _ = attention._Attention.apply(
        *leaves,
        case.heads,
        window,
        case.shift,
        0.25,
        case.size,
    )
    out.backward(grad)
    peak = torch.cuda.max_memory_allocated() - before
    # The output has a third of the bytes of qkv, and the gradient as many as qkv; the rest is for float32 sums.
    assert peak < 1.7 * qkv.nbytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_maps_of_more_than_two_to_the_31_elements():
    case = Case(
        (96, 96),
        (7, 7),
        (3, 3),
        batch=820,
        heads=3,
        head_dim=32,
    )
    one = case._replace(batch=1)
    (qkv, table, pad_kv), grad = inputs(one, torch.bfloat16, 'cuda')
    many = qkv.expand(case.batch, -1, -1, -1).contiguous()
    assert many.numel() > 2**31
    expected = output_and_gradients(one, [qkv, table, pad_kv], grad, 'triton')
    grads = grad.expand(case.batch, -1, -1, -1)
    actual = output_and_gradients(case, [many, table, pad_kv], grads, 'triton')
    for a, e in zip(actual[:2], expected[:2], strict=True):
        assert torch.equal(a[-1:], e)
