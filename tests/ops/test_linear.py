"""Linear layers by oneDNN against torch's own in float64, and when they are used."""

import io
import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import testing as dynamo_testing
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import FlopCounterMode

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.models import layers
from swin_dense.models.layers import FFN, Linear
from swin_dense.ops import context
from swin_dense.ops import linear as linear_module
from swin_dense.ops.linear import BLOCKS, LEAST_WORK, REST, is_supported, linear
from tests.conftest import TINY, assert_near, randomize
from tests.derivatives import maps_and_gradients
from tests.ops.devices import run_python

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, '_linear_pointwise'), reason='this build of torch has no oneDNN'
)
INPUTS = {
    'map': lambda: torch.randn(2, 3, 4, 7),
    'empty batch': lambda: torch.randn(0, 3, 4, 7),
    'empty map': lambda: torch.randn(2, 0, 7),
    'one token': lambda: torch.randn(7),
    'transposed': lambda: torch.randn(7, 6).t(),
    'strided': lambda: torch.randn(6, 14)[:, ::2],
    'expanded': lambda: torch.randn(1, 7).expand(6, 7),
    'one value per token': lambda: torch.randn(6, 1).expand(6, 7),
    'channels last': lambda: torch.randn(2, 7, 3, 4).permute(0, 2, 3, 1),
}
WEIGHTS = {
    'contiguous': lambda: torch.randn(5, 7),
    'transposed': lambda: torch.randn(7, 5).t(),
    'strided': lambda: torch.randn(10, 14)[::2, ::2],
    'expanded': lambda: torch.randn(5, 1).expand(5, 7),
}


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Use oneDNN on any processor and for products of any size, and return a list with one entry per product."""
    made = []

    def count(*args):
        made.append(args)
        return original(*args)

    original = linear_module.by_onednn
    monkeypatch.setattr(linear_module, 'by_onednn', count)
    monkeypatch.setattr(linear_module, 'IS_FASTER_BY_ONEDNN', True)
    monkeypatch.setattr(Linear, 'forward', layers._forward_by_onednn, raising=False)
    monkeypatch.setattr(linear_module, 'LEAST_WORK', 0)
    monkeypatch.setattr(linear_module, 'BLOCKS', (4, 2))  # so that small maps have several
    monkeypatch.setattr(linear_module, 'REST', 3)
    torch.manual_seed(0)
    return made


def tensors(has_bias=True, **options):
    """Return a map of 6 tokens, and the parameters of a layer from 7 to 5 channels."""
    x = torch.randn(2, 3, 7, **options)
    weight = torch.randn(5, 7, **options)
    bias = torch.randn(5, **options) if has_bias else None
    return x, weight, bias


def derivatives(function, *tensors):
    """Return the output, the gradients, and the gradients of a function of the gradients."""
    out = function(*tensors)
    leaves = [tensor for tensor in tensors if tensor is not None]
    first = torch.autograd.grad(out.pow(3).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(grad.pow(2).sum() for grad in first), leaves)
    return out, *first, *second


def exact(*tensors):
    """Return the derivatives of torch's layer in float64."""
    leaves = []
    for tensor in tensors:
        if tensor is not None:
            tensor = tensor.double().detach().requires_grad_()
        leaves.append(tensor)
    return derivatives(F.linear, *leaves)


def assert_close(found, expected):
    for ours, wanted in zip(found, expected, strict=True):
        scale = wanted.abs().max().item() if wanted.numel() else 1.0
        torch.testing.assert_close(
            ours.double(),
            wanted,
            rtol=1e-4,
            atol=1e-5 * scale,
        )


@pytest.mark.parametrize('has_bias', [True, False])
@pytest.mark.parametrize('weight', WEIGHTS)
@pytest.mark.parametrize('x', INPUTS)
def test_equals_the_linear_layer_of_torch(calls, x, weight, has_bias):
    bias = torch.randn(5, requires_grad=True) if has_bias else None
    leaves = INPUTS[x]().requires_grad_(), WEIGHTS[weight]().requires_grad_(), bias
    expected = exact(*leaves)
    assert_close(derivatives(linear, *leaves), expected)
    assert bool(calls) == (x != 'one token')
    with torch.inference_mode():
        assert_near(
            linear(*leaves).double(),
            expected[0].detach(),
            1e-5,
        )


def sizes_kept_by(layer, tensors):
    """Return the sizes of the tensors that autograd keeps for the backward pass of a layer."""
    sizes = []

    def keep(tensor):
        sizes.append(tensor.numel())

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda _: None):
        layer(*tensors)
    return sizes


@pytest.mark.parametrize('trained', range(3))
def test_keeps_what_torch_keeps_for_the_gradients_that_are_needed(trained):
    leaves = tensors()
    leaves[trained].requires_grad_()
    assert sizes_kept_by(linear, leaves) == sizes_kept_by(F.linear, leaves)


def test_only_the_gradients_that_are_needed_are_computed(calls):
    x, weight, bias = tensors()
    linear(x, weight, bias.requires_grad_()).sum().backward()
    assert len(calls) == 1
    assert x.grad is None
    assert weight.grad is None
    torch.testing.assert_close(bias.grad, torch.full((5,), 6.0))


@pytest.mark.parametrize(
    'x',
    [
        torch.randn(3, 6),
        torch.tensor(1.0),
        torch.randn(0, 6),
        torch.randn(3, 7).double(),
        torch.ones(3, 7).long(),
    ],
)
def test_raises_what_torch_raises(x):
    layer = nn.Linear(7, 5)
    with pytest.raises(RuntimeError) as theirs:
        layer(x)
    with pytest.raises(RuntimeError) as ours:
        linear(x, layer.weight, layer.bias)
    assert str(ours.value) == str(theirs.value)


class Scaled(torch.Tensor):
    """A subclass with its own operations, as quantised and distributed tensors have."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        return 2 * out.as_subclass(torch.Tensor) if function is F.linear else out


def test_what_oneDNN_cannot_do_is_left_to_torch(calls):
    x, weight, bias = tensors()
    torch.testing.assert_close(linear(x, weight.as_subclass(Scaled), bias), 2 * F.linear(x, weight, bias))
    for dtype in (torch.float64, torch.bfloat16):
        assert linear(x.to(dtype), weight.to(dtype), bias.to(dtype)).dtype == dtype
    with torch.autocast('cpu'):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    torch.testing.assert_close(linear(x[0], weight.to_sparse_csr()), F.linear(x[0], weight))
    assert linear(x.to('meta'), weight.to('meta')).shape == (2, 3, 5)
    with FlopCounterMode(display=False) as counter:
        linear(x, weight)
    assert counter.get_total_flops() == 2 * 6 * 5 * 7
    with mock.patch.object(nn.Linear, 'forward'):  # of a library
        linear(x, weight)
    assert not calls
    linear(x, weight, bias)
    assert calls


def test_function_transforms(calls):
    x, weight = torch.randn(3, 7), torch.randn(5, 7)

    def ours(x):
        return linear(x, weight).pow(2)

    def theirs(x):
        return F.linear(x, weight).pow(2)

    for transform in (torch.func.jacrev, torch.func.jacfwd, torch.func.vmap, torch.func.hessian):
        torch.testing.assert_close(transform(ours)(x), transform(theirs)(x))
    assert not calls
    jacobian = torch.autograd.functional.jacobian
    for options in ({}, {'vectorize': True}, {'vectorize': True, 'strategy': 'forward-mode'}):
        torch.testing.assert_close(jacobian(ours, x, **options), jacobian(theirs, x))
    assert calls  # batched gradients of a layer that oneDNN has computed


@pytest.mark.skipif(TorchVersion(torch.__version__) < '2.4', reason='older versions have no custom operators')
def test_compiled_function_transforms(calls):
    torch._dynamo.reset()
    layer, x = Linear(7, 5), torch.randn(3, 7)

    def loss(weight, x):
        return torch.func.functional_call(layer, {'weight': weight}, (x,)).pow(2).sum()

    def exact_loss(weight, x):
        return F.linear(x, weight, layer.bias.double()).pow(2).sum()

    compiled = torch.compile(torch.func.grad(loss), backend='aot_eager', fullgraph=True)
    exact = torch.func.grad(exact_loss)(layer.weight.detach().double(), x.double())
    assert_close([compiled(layer.weight.detach(), x)], [exact])
    assert not calls
    torch._dynamo.reset()


def operators(graph):
    return [str(node.target) for node in graph.nodes if node.op == 'call_function']


@pytest.mark.skipif(TorchVersion(torch.__version__) < '2.5', reason='older versions trace another name')
def test_exporters_see_a_linear_layer(calls):
    layer, x = Linear(7, 5), torch.randn(3, 7)
    program = torch.export.export(layer, (x,))
    assert operators(program.graph) == ['aten.linear.default']
    traced = torch.jit.trace(layer, x, check_trace=False)
    assert not calls
    torch.testing.assert_close(traced(x), F.linear(x, layer.weight, layer.bias))


@pytest.mark.skipif(TorchVersion(torch.__version__) < '2.4', reason='older versions have no custom operators')
@pytest.mark.parametrize('has_bias', [True, False])
def test_compilers_see_one_operator(has_bias):
    torch._dynamo.reset()
    backend = dynamo_testing.AotEagerAndRecordGraphs()
    compiled = torch.compile(linear, backend=backend, fullgraph=True)
    leaves = tensors(has_bias, requires_grad=True)
    out = compiled(*leaves)
    wanted = [x for x in leaves if x is not None]
    found = [out, *torch.autograd.grad(out.pow(3).sum(), wanted)]
    assert_close(found, exact(*leaves)[: len(found)])
    for (graph,) in (backend.fw_graphs, backend.bw_graphs):
        assert operators(graph.graph).count('swin_dense.linear.default') == 1
    with torch.no_grad():
        torch.testing.assert_close(compiled(*leaves), out.detach())
    torch._dynamo.reset()


@pytest.mark.skipif(TorchVersion(torch.__version__) < '2.4', reason='older versions have no custom operators')
@pytest.mark.parametrize('has_bias', [True, False])
def test_the_operator_passes_the_checks_of_torch(has_bias):
    torch.library.opcheck(linear_module._operator, tensors(has_bias, requires_grad=True))


def test_a_bias_with_a_stride(calls):
    """oneDNN would read the next numbers in memory, for a stride of zero beyond the end."""
    layer, x = Linear(7, 5), torch.randn(3, 7)
    strided = [
        torch.randn(10)[::2],
        torch.randn(5, 4)[:, 1],
        torch.randn(1).expand(5),
    ]
    for bias in strided:
        expected = x @ layer.weight.T + bias
        torch.testing.assert_close(torch.func.functional_call(layer, {'bias': bias}, (x,)), expected)
        layer.bias = nn.Parameter(bias)
        torch.testing.assert_close(layer(x), expected)
        layer.bias = nn.Parameter(torch.zeros(5))
    assert not calls


@pytest.mark.parametrize('act', ['ReLU', 'SiLU', 'LeakyReLU'])
def test_activations_and_dropout_in_place_after_the_layer(calls, act):
    """Autograd would forbid it for a view that a function returns."""
    in_place = FFN(7, 11, {'type': act, 'inplace': True}, drop_rate=0.4)
    in_place.layers[2].inplace = True
    out_of_place = FFN(7, 11, {'type': act}, drop_rate=0.4)
    out_of_place.load_state_dict(in_place.state_dict())
    results = []
    for model in (in_place, out_of_place):
        torch.manual_seed(1)
        results.append(maps_and_gradients(model, torch.randn(2, 3, 7, requires_grad=True)))
    torch.testing.assert_close(*results)
    assert calls


@pytest.mark.parametrize('kind', [SwinBackbone, SwinV2Backbone])
def test_all_linear_layers_of_a_backbone_are_called(calls, kind):
    """The layers of the position network of V2 have two inputs, or as many outputs as heads, which does not pay."""
    model = randomize(kind(**TINY)).eval()
    layers = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and 'cpb' not in name]
    outs = model(torch.ones(1, 3, 64, 64))
    expected = model.double()(torch.ones(1, 3, 64, 64).double())
    for out, want in zip(outs, expected, strict=True):
        assert_near(out.double(), want, 1e-4)
    blocks = sum(TINY['depths'])
    assert len(calls) == len(layers) == 4 * blocks + 3


def test_the_flag_of_torch_disables_it(calls):
    layer, x = Linear(7, 5), torch.randn(3, 7)
    with torch.backends.mkldnn.flags(enabled=False):
        expected = layer(x)
        assert not is_supported(x, layer.weight, None)
    assert not calls
    torch.testing.assert_close(layer(x), expected)
    assert calls


def test_products_of_little_work_are_left_to_torch(calls, monkeypatch):
    monkeypatch.setattr(linear_module, 'LEAST_WORK', 6 * 7 * 5)
    layer = Linear(7, 5)
    layer(torch.randn(5, 7))
    assert not calls
    layer(torch.randn(2, 3, 7)).sum().backward()
    assert calls


def test_onednn_meets_few_numbers_of_rows(monkeypatch):
    """It keeps memory for each of them."""
    met = []

    def product(rows, *arguments):
        met.append(len(rows))
        return original(rows, *arguments)

    original = linear_module._product
    monkeypatch.setattr(linear_module, '_product', product)
    monkeypatch.setattr(linear_module, 'BLOCKS', BLOCKS)
    monkeypatch.setattr(linear_module, 'REST', REST)
    layer = Linear(7, 5).requires_grad_(False)
    sizes = {
        0: [],
        1: [16],
        16: [16],
        49: [64],
        256: [256],
        784: [512, 256, 16],
        3136: [2048, 1024, 64],
        4095: [2048, 1024, 512, 256, 256],
    }
    for rows, expected in sizes.items():
        x = torch.randn(rows, 7)
        exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
        met.clear()
        assert_near(layer(x).double(), exact, 1e-5)
        assert met == expected


@pytest.mark.parametrize(('least_work', 'limit'), [(LEAST_WORK, 100), (0, 250)])
def test_memory_does_not_grow_with_every_image_size(least_work, limit):
    """With every product by oneDNN, it grows by 150 MiB here, and by 560 without blocks of rows."""
    code = f"""
        import random, torch
        from swin_dense import SwinBackbone
        from swin_dense.models import layers
        from swin_dense.ops import linear
        linear.IS_FASTER_BY_ONEDNN, linear.LEAST_WORK = True, {least_work}
        layers.Linear.forward = layers._forward_by_onednn

        def resident_mebibytes():
            with open('/proc/self/statm') as file:
                return int(file.read().split()[1]) * 4 // 1024

        model = SwinBackbone(embed_dims=16, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8), window_size=4).eval()
        model.requires_grad_(False)(torch.zeros(1, 3, 320, 320))
        before = resident_mebibytes()
        draw = random.Random(0).randrange
        for _ in range(100):
            model(torch.zeros(1, 3, draw(32, 320), draw(32, 320)))
        print(resident_mebibytes() - before)
    """
    if not Path('/proc/self/statm').exists():
        pytest.skip('the memory of a process is read from /proc')
    assert int(run_python(code)) < limit


def test_a_pass_asks_few_questions(monkeypatch):
    """Count the calls that ask about context and tensors, in a pass over four blocks on a small image."""
    monkeypatch.setattr(linear_module, 'LEAST_WORK', LEAST_WORK)
    model = (
        SwinBackbone(
            embed_dims=32,
            depths=(2, 2),
            num_heads=(1, 2),
            strides=(4, 2),
        )
        .eval()
        .requires_grad_(False)
    )
    img = torch.rand(1, 3, 90, 101)
    model(img)
    questions = []

    def count(frame, event, _):
        code = frame.f_code
        is_question = code.co_filename == context.__file__ or code.co_name == 'is_supported'
        if event == 'call' and is_question:
            questions.append(code.co_name)

    sys.setprofile(count)
    try:
        model(img)
    finally:
        sys.setprofile(None)
    assert questions.count('is_supported') == 4 * 4 + 1
    assert len(questions) <= 60


CPUINFO = 'processor\t: 0\nvendor_id\t: {}\ncpu family\t: {}\nmodel\t\t: 17\nmodel name\t: EPYC\n'
ZEN_4 = CPUINFO.format('AuthenticAMD', 25)
ZEN_5 = CPUINFO.format('AuthenticAMD', 26)
LATER = CPUINFO.format('AuthenticAMD', 260)
INTEL = CPUINFO.format('GenuineIntel', 26)
WINDOWS = 'AMD64 Family {} Model 33 Stepping 0, AuthenticAMD'


@pytest.mark.parametrize(
    ('processor', 'capability', 'faster'),
    [
        (ZEN_5, 'AVX512', True),
        (ZEN_5, 'AVX2', False),
        (ZEN_4, 'AVX512', False),
        (LATER, 'AVX512', False),
        (INTEL, 'AVX512', False),
        ('', 'AVX512', False),
    ],
)
def test_the_processors_on_which_it_is_used(monkeypatch, processor, capability, faster):
    monkeypatch.setattr(Path, 'open', lambda *_, **__: io.StringIO(processor))
    monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, 'is_available', lambda: True)
    assert linear_module._is_faster_by_onednn() is faster
    monkeypatch.setattr(torch.backends.mkl, 'is_available', lambda: False)
    assert not linear_module._is_faster_by_onednn()


@pytest.mark.parametrize(('family', 'faster'), [(25, False), (26, True)])
def test_the_processor_without_the_files_of_linux(monkeypatch, family, faster):
    monkeypatch.setattr(Path, 'open', mock.Mock(side_effect=FileNotFoundError))
    monkeypatch.setattr(platform, 'processor', lambda: WINDOWS.format(family))
    monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: 'AVX512')
    monkeypatch.setattr(torch.backends.mkl, 'is_available', lambda: True)
    assert linear_module._is_faster_by_onednn() is faster


def test_threads_and_forked_processes(calls):
    layer = Linear(7, 5)
    inputs = [torch.randn(rows, 7) for rows in range(2, 40)]
    with torch.no_grad():
        expected = [F.linear(x, layer.weight, layer.bias) for x in inputs]
        with ThreadPoolExecutor(4) as pool:
            torch.testing.assert_close(list(pool.map(layer, inputs)), expected)
    process = os.fork() if hasattr(os, 'fork') else None
    if process == 0:
        is_right = torch.allclose(
            layer(inputs[0]),
            expected[0],
            atol=1e-5,
        )
        os._exit(not is_right)
    assert process is None or os.waitpid(process, 0)[1] == 0
    assert len(calls) == len(inputs)
