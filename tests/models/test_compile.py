"""torch.compile: no graph breaks, torch's attention, one recompilation for all further sizes, and eager gradients."""

import pytest
import torch
from torch._dynamo import testing
from torch._dynamo.testing import CompileCounterWithBackend

from swin_dense import SwinBackbone, SwinV2Backbone
from tests.derivatives import doubles, maps_and_gradients

if not hasattr(testing, 'AotEagerAndRecordGraphs'):
    pytest.skip('torch 2.1 cannot record the graphs', allow_module_level=True)

TINY = {
    'embed_dims': 16,
    'depths': (1, 2),
    'num_heads': (1, 2),
    'strides': (4, 2),
}
# Odd and even, landscape and portrait, multiples of the window and not, two windows along one axis and many.
SIZES = (
    (64, 96),
    (120, 70),
    (224, 224),
    (199, 301),
    (60, 300),
)

EXAMPLE = (torch.randn(2, 3, 50, 70),)

needs_whole_graphs = pytest.mark.skipif(
    torch.__version__ < '2.6', reason=f'torch {torch.__version__} compiles several graphs'
)


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.long
@needs_whole_graphs
@pytest.mark.parametrize('is_training', [False, True])
def test_further_sizes_need_one_recompilation(is_training):
    """Cover evaluation, and training with stochastic depth and activation checkpointing."""
    model = SwinBackbone(**TINY, drop_path_rate=0.5, with_cp=is_training).train(is_training)
    counter = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(model, backend=counter, fullgraph=True)

    def run(network, img):
        torch.manual_seed(0)
        if is_training:
            return maps_and_gradients(network, img)
        with torch.no_grad():
            return network(img)

    for size in SIZES:
        img = torch.randn(2, 3, *size)
        assert_close(run(compiled, img), run(model, img))
        assert counter.frame_count <= 1 + (size != SIZES[0]), size
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < '2.8', reason='older versions cannot tell a compilation from an export')
@pytest.mark.parametrize(
    'size',
    [(28, 28), (120, 70)],
    ids=['one window', 'many windows'],
)
@pytest.mark.parametrize('trains_bias', [True, False])
def test_attention_is_exact_and_torchs_unless_the_bias_trains(size, trains_bias):
    """Compare with plain operations in float64, on maps of one window, which are one group, and of many."""
    model = SwinBackbone(**TINY, drop_path_rate=0.0).double()
    expected = SwinBackbone(**TINY, drop_path_rate=0.0, attn_backend='reference').double()
    expected.load_state_dict(model.state_dict())
    for network in (model, expected):
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(trains_bias or 'relative_position' not in name)
    backend = testing.AotEagerAndRecordGraphs()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    img = doubles(2, 3, *size)
    found = maps_and_gradients(compiled, img)
    torch.testing.assert_close(found, maps_and_gradients(expected, img), rtol=1e-9, atol=1e-11)
    (graph,) = backend.graphs
    assert ('scaled_dot_product_attention' in graph.code) is not trains_bias
    # Without the copy, Inductor looks up the bias anew for each pair of tokens.
    assert ('swin_dense.stored' in graph.code) is trains_bias


@pytest.mark.slow
@needs_whole_graphs
@pytest.mark.parametrize('kind', [SwinBackbone, SwinV2Backbone])
def test_sizes_may_be_dynamic_from_the_start_with_activation_checkpointing(kind):
    """A global float inside a checkpoint would be a symbol then, which torch cannot hand in."""
    model = kind(embed_dims=8, depths=(1,), num_heads=(1,), window_size=4, drop_path_rate=0.0, with_cp=True)
    compiled = torch.compile(model, backend='aot_eager', dynamic=True)
    img = torch.randn(2, 3, 40, 56)
    assert_close(maps_and_gradients(compiled, img), maps_and_gradients(model, img))


@needs_whole_graphs
def test_on_other_devices_it_is_torchs_attention_with_one_recompilation():
    """As on a GPU without the kernel: a mask may have a gradient there, and plans are traced."""
    model = SwinBackbone(embed_dims=16, depths=(2,), num_heads=(1,), strides=(4,)).to('meta')
    backend = testing.AotEagerAndRecordGraphs()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for size in SIZES[:3]:
        compiled(torch.empty(2, 3, *size, device='meta'))
    assert len(backend.graphs) == 2
    for graph in backend.graphs:
        assert 'scaled_dot_product_attention' in graph.code
        assert 'swin_dense' not in graph.code


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(' ' in torch.__file__, reason='inductor does not quote the path of torch')
def test_inductor_trains_with_activation_checkpointing():
    model = SwinBackbone(
        embed_dims=16,
        depths=(2,),
        num_heads=(1,),
        strides=(4,),
        with_cp=True,
    )
    img = torch.randn(2, 3, 30, 50)
    found = []
    for network in (torch.compile(model), model):
        torch.manual_seed(0)
        loss = network(img)[0].square().mean()
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < '2.10', reason='torch 2.9 refuses sizes for which a graph of 2.10 is valid')
def test_torchs_own_export_with_dynamic_sizes():
    """Without this setting, torch makes an error of sizes with one window where the example has several."""
    from torch.fx.experimental import _config

    model = SwinBackbone(**TINY, window_size=4).eval()
    sides = {
        0: torch.export.Dim('batch', min=1),
        2: torch.export.Dim('height', min=1),
        3: torch.export.Dim('width', min=1),
    }
    with _config.patch(backed_size_oblivious=True):
        program = torch.export.export(model, EXAMPLE, dynamic_shapes={'img': sides})
    assert 'swin_dense' not in program.graph_module.code
    module = program.module(check_guards=False)
    for batch, height, width in ((1, 5, 7), (3, 64, 96), (2, 16, 300)):
        img = torch.randn(batch, 3, height, width)
        assert_close(module(img), model(img))


@pytest.mark.slow
@needs_whole_graphs
def test_one_graph_serves_maps_with_and_without_padding():
    backbone = SwinBackbone({'embed_dims': 8, 'depths': (2,), 'num_heads': (1,)}, window_size=3).eval()
    counter = CompileCounterWithBackend('eager')
    compiled = torch.compile(backbone, backend=counter, dynamic=True)
    with torch.no_grad():
        for size in ((28, 32), (36, 36), (28, 36), (36, 28)):  # windows of 12 pixels
            compiled(torch.rand(1, 3, *size))
    assert counter.frame_count == 1
