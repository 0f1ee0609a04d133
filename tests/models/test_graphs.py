"""Which passes of a backbone are replayed, and that each equals an eager pass.

Torch's own ``make_graphed_callables`` runs on a CPU here, with a stand-in for CUDA graphs: it records the operations of
a capture, and a replay repeats them on the same memory. Tests marked gpu capture CUDA graphs.
"""

import contextlib
import copy
import io

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import FlopCounterMode

from swin_dense import SwinBackbone, SwinV2Backbone, use_graphs
from swin_dense.models import graphs
from tests.conftest import randomize

TINY = {'embed_dims': 16, 'depths': (2, 1), 'num_heads': (1, 2), 'strides': (4, 2), 'drop_path_rate': 0.0}
of_today = pytest.mark.skipif(not hasattr(torch.library, 'custom_op'), reason='torch 2.1 cannot record this')
pytestmark = pytest.mark.filterwarnings('error:use_graphs')  # in tests that do not expect a warning


class StandIn:
    """A CUDA graph on a CPU."""

    replays = 0

    def __init__(self):
        self.operations = []

    def replay(self):
        StandIn.replays += 1
        with torch.no_grad(), torch.autocast('cpu', enabled=False):
            for function, args, kwargs, outs in self.operations:
                results, _ = tree_flatten(function(*args, **kwargs))
                for static, new in zip(tree_flatten(outs)[0], results, strict=True):
                    if isinstance(static, torch.Tensor):
                        static.data.copy_(new)


class Capture(TorchDispatchMode):
    def __init__(self, graph, **_options):  # which depend on the version of torch
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outs = function(*args, **(kwargs or {}))
        self.graph.operations.append((function, args, kwargs or {}, outs))
        return outs


@pytest.fixture
def gpu(monkeypatch):
    """Capture and replay on a CPU; yield the number of replays as a function."""
    monkeypatch.setattr(graphs, '_DEVICE', 'cpu')
    monkeypatch.setattr(torch.cuda, 'CUDAGraph', StandIn)
    monkeypatch.setattr(torch.cuda, 'graph', Capture)
    monkeypatch.setattr(torch.cuda.graphs, 'graph_pool_handle', lambda: None)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: None)
    monkeypatch.setattr(torch.cuda, 'Stream', lambda: None)
    monkeypatch.setattr(torch.cuda, 'stream', contextlib.nullcontext)
    before = StandIn.replays
    return lambda: StandIn.replays - before


def build(kind=SwinBackbone, **options):
    return randomize(kind(**{**TINY, **options}))


def image(seed, size=(1, 3, 40, 52)):
    return torch.rand(size, generator=torch.Generator().manual_seed(seed))


def loss_of(outs):
    return sum((out.float() * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in outs)


def step(backbone, img):
    """Return the maps of a training step, and its gradients."""
    backbone.zero_grad()
    outs = backbone(img)
    loss_of(outs).backward()
    return outs, {name: x.grad.clone() for name, x in backbone.named_parameters() if x.requires_grad}


def assert_equal_steps(backbone, oracle, *images):
    for img in images:
        torch.testing.assert_close(step(backbone, img), step(oracle, img))


@pytest.mark.parametrize('autocast', [False, True])
@pytest.mark.parametrize(
    ('kind', 'options'),
    [(SwinBackbone, {}), (SwinBackbone, {'frozen_stages': 1}), (SwinV2Backbone, {'window_size': 8})],
    ids=str,
)
def test_replays_equal_eager_steps(kind, options, autocast, gpu):
    tolerance = 0.05 if autocast else 1e-4
    oracle = build(kind, **options)
    backbone = use_graphs(copy.deepcopy(oracle))
    for seed in range(3):
        found = []
        for model in (backbone, oracle):
            with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
                found.append(step(model, image(seed)))
        torch.testing.assert_close(*found, atol=tolerance, rtol=tolerance)
        with torch.no_grad():  # as an optimizer changes weights
            for model in (backbone, oracle):
                for parameter in model.parameters():
                    parameter *= 0.9
    assert gpu() == 6  # forward and backward


@of_today  # a mode that keeps outputs fails in inference mode
def test_inference_is_replayed(gpu):
    oracle = build().eval()
    backbone = use_graphs(copy.deepcopy(oracle))
    first = image(0)
    with torch.inference_mode():
        found = [backbone(first), backbone(image(1)), backbone(image(2))]  # the maps of a pass are not the next one's
        torch.testing.assert_close(found, [oracle(image(seed)) for seed in range(3)])
    assert gpu() == 3
    assert torch.equal(first, image(0))


def move_weights(backbone):
    backbone.load_state_dict({name: x.clone() for name, x in backbone.state_dict().items()}, assign=True)


CHANGES = {
    'size': (lambda backbone: None, image(5, (1, 3, 40, 60))),
    'batch': (lambda backbone: None, image(5, (2, 3, 40, 52))),
    'dtype': (lambda backbone: backbone.double(), image(5).double()),
    'mode': (lambda backbone: backbone.eval(), image(5)),
    'weights that moved': (move_weights, image(5)),
    'frozen weights': (lambda backbone: backbone.patch_embed.requires_grad_(False), image(5)),
    'gradient of the image': (lambda backbone: None, image(5).requires_grad_()),
}


@pytest.mark.parametrize('name', CHANGES)
def test_what_differs_from_the_captured_pass_is_eager(name, gpu):
    change, img = CHANGES[name]
    oracle = build()
    backbone = use_graphs(copy.deepcopy(oracle))
    assert_equal_steps(backbone, oracle, image(0), image(1))
    replays = gpu()
    for model in (backbone, oracle):
        change(model)
    assert_equal_steps(backbone, oracle, img)
    assert gpu() == replays > 0


@pytest.mark.parametrize(
    'context',
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast('cpu', torch.bfloat16),
        lambda: FlopCounterMode(display=False),
    ],
    ids=['no_grad', 'inference_mode', 'autocast', 'flops'],
)
def test_another_context_is_eager(context, gpu):
    oracle = build()
    backbone = use_graphs(copy.deepcopy(oracle))
    step(backbone, image(0))
    backbone.zero_grad()
    replays = gpu()
    with context():
        torch.testing.assert_close(backbone(image(1)), oracle(image(1)))
    assert gpu() == replays > 0


def test_gradients_accumulate(gpu):
    """A replay would overwrite the gradients of the step before, so the further steps are eager."""
    oracle = build()
    backbone = use_graphs(copy.deepcopy(oracle))
    for model in (backbone, oracle):
        for _ in range(2):
            model.zero_grad()
            for seed in range(3):
                loss_of(model(image(seed))).backward()
    for ours, theirs in zip(backbone.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert gpu() == 4


def test_a_second_forward_pass_before_the_backward_pass_is_eager(gpu):
    oracle = build()
    backbone = use_graphs(copy.deepcopy(oracle))
    for model in (backbone, oracle):
        first, second = model(image(0)), model(image(1))
        loss_of(second).backward()
        loss_of(first).backward()
    for ours, theirs in zip(backbone.parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert gpu() == 2


def test_a_backward_pass_that_never_comes_does_not_end_replays(gpu):
    backbone = use_graphs(build())
    for seed in range(3):
        outs = backbone(image(seed))
        del outs
    assert gpu() == 3


def test_a_second_backward_pass_is_an_error(gpu):
    backbone = use_graphs(build())
    loss = loss_of(backbone(image(0)))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='one backward pass for each forward pass'):
        loss.backward()


def test_a_backward_pass_after_the_next_forward_pass_is_an_error(gpu):
    backbone = use_graphs(build())
    loss = loss_of(backbone(image(0)))
    loss.backward(retain_graph=True)
    backbone.zero_grad()
    loss_of(backbone(image(1)))
    with pytest.raises(RuntimeError, match='one backward pass for each forward pass'):
        loss.backward()


def test_a_capture_that_fails_leaves_the_backbone_eager_with_one_warning(gpu, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError('operation not permitted when stream is capturing')

    monkeypatch.setattr(torch.cuda, 'make_graphed_callables', fail)
    oracle = build()
    backbone = use_graphs(copy.deepcopy(oracle))
    with pytest.warns(UserWarning, match='use_graphs cannot capture this backbone.*not permitted') as warned:
        assert_equal_steps(backbone, oracle, image(0), image(1))
    assert len(warned) == 1


def test_several_processes_are_eager(gpu, tmp_path):
    backbone = use_graphs(build())
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        step(backbone, image(0))
    finally:
        torch.distributed.destroy_process_group()
    assert gpu() == 0


def test_copies_have_graphs_of_their_own(gpu):
    backbone = use_graphs(build())
    step(backbone, image(0))
    file = io.BytesIO()
    torch.save(backbone, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    for copied in (copy.deepcopy(backbone), loaded):
        oracle = build()
        oracle.load_state_dict(copied.state_dict())
        for parameter in backbone.parameters():
            parameter.data.zero_()  # which the graph of the first one reads
        assert_equal_steps(copied, oracle, image(1), image(2))


def test_an_end_of_use_graphs(gpu):
    backbone = use_graphs(use_graphs(build()))  # twice is once
    del backbone.forward
    step(backbone, image(0))
    assert gpu() == 0


def test_what_is_no_unchanged_module_is_an_error():
    with pytest.raises(TypeError, match=r'must be a torch\.nn\.Module that is not wrapped, got int'):
        use_graphs(3)
    backbone = build()
    backbone.forward = lambda img: None
    with pytest.raises(ValueError, match='was replaced before; call use_graphs on an unchanged backbone'):
        use_graphs(backbone)


def test_data_parallel_models_are_an_error(tmp_path):
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match='not wrapped, got DistributedDataParallel'):
            use_graphs(nn.parallel.DistributedDataParallel(build()))
    finally:
        torch.distributed.destroy_process_group()


@of_today
def test_torch_export_records_the_backbone(gpu):
    backbone = use_graphs(build().eval())
    exported = torch.export.export(backbone, (image(0),))
    torch.testing.assert_close(exported.module()(image(1)), backbone(image(1)))


@pytest.mark.gpu
@pytest.mark.parametrize('is_training', [True, False])
def test_cuda_graphs_equal_eager_passes(is_training):
    if not torch.cuda.is_available():
        pytest.skip('needs a CUDA device')
    oracle = build().cuda().train(is_training)
    backbone = use_graphs(copy.deepcopy(oracle))
    for seed in range(4):
        with torch.autocast('cuda', torch.bfloat16), torch.set_grad_enabled(is_training):
            found, wanted = backbone(image(seed).cuda()), oracle(image(seed).cuda())
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)
        if is_training:
            for model, outs in ((backbone, found), (oracle, wanted)):
                model.zero_grad()
                torch.autograd.backward(outs, [torch.ones_like(out) for out in outs])
            for ours, theirs in zip(backbone.parameters(), oracle.parameters(), strict=True):
                assert (ours.grad - theirs.grad).norm() <= 0.05 * theirs.grad.norm()
            backbone.zero_grad()
    assert backbone.forward._graph is not None
