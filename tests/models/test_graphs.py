"""Which passes of a backbone are replayed, and that each gives what an eager pass gives.

The rules are tested with a stand-in for a GPU: its graphs are fixed memory, which each replay overwrites, and launches
fixed at the capture, which read the memory that the weights had then. Tests marked gpu capture CUDA graphs.
"""

import contextlib
import copy
import gc
import itertools
import pickle
import threading
import warnings

import pytest
import torch
import torch.distributed
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import swin_dense
from swin_dense import SwinBackbone, SwinV2Backbone, use_graphs
from swin_dense.models import graphs
from swin_dense.models.layers import DropPath
from tests.conftest import randomize

OPTIONS = {
    'embed_dims': 16,
    'depths': (2, 1),
    'num_heads': (1, 2),
    'strides': (4, 2),
    'drop_path_rate': 0.0,
}
EAGER = 3  # passes of a size before its capture

HAS_GRAPHS = all(hasattr(torch._C._autograd, name) for name in graphs._NEEDED)
pytestmark = [
    pytest.mark.filterwarnings('error:use_graphs'),  # in tests that do not expect one
    pytest.mark.skipif(not HAS_GRAPHS, reason='this torch is too old for use_graphs'),
]


class StandIn:
    """Captures passes on a CPU, as a GPU does."""

    device_type = 'cpu'

    def __init__(self, mib=1.0):
        self.mib = mib
        self.captures = 0
        self.replays = 0
        self.current_stream = 0
        self.error = None

    def is_capturing(self):
        return False

    def stream(self, device):
        return self.current_stream

    def capture(self, backbone, img):
        self.captures += 1
        if self.error is not None:
            raise self.error
        assert not torch.is_autocast_cache_enabled()
        has_gradients = torch.is_grad_enabled()
        autocast = torch.is_autocast_enabled('cpu'), torch.get_autocast_dtype('cpu')
        same_memory = {}
        for parameter in backbone.parameters():
            same_memory[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
        for buffer in backbone.buffers():
            same_memory[id(buffer)] = buffer.detach()
        twin = copy.deepcopy(backbone, same_memory)
        parameters = [parameter for parameter in twin.parameters() if parameter.requires_grad]
        static = img.clone()
        live = []

        def run():
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(has_gradients),
                torch.autocast('cpu', autocast[1], enabled=autocast[0], cache_enabled=False),
            ):
                live[:] = graphs.launch(twin, static)
            return live

        outs = [out.detach().clone() for out in run()]
        out_grads = [torch.zeros_like(out) if now.requires_grad else None for out, now in zip(outs, live, strict=True)]
        dependencies = graphs.dependencies_of(live, parameters)
        grads = graphs.gradients_of(live, parameters, out_grads) if any(dependencies) else ()

        def forward():
            self.replays += 1
            write(outs, run())

        def backward():
            with torch.enable_grad():
                write(grads, graphs.gradients_of(live, parameters, out_grads))

        return graphs.Captured(static, outs, out_grads, grads, dependencies, forward, backward, self.mib)


def write(statics, values):
    for static, value in zip(statics, values, strict=True):
        if static is not None:
            static.data.copy_(value.detach())


@pytest.fixture
def gpu():
    return StandIn()


def graphed(backbone, gpu, limit_mib=100):
    backbone.forward = graphs.Graphs(backbone, limit_mib, gpu)
    return backbone


def build(kind=SwinBackbone, **options):
    return randomize(kind(**{**OPTIONS, **options})).train()


def image(seed=0, side=32, batch=1):
    return torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(seed))


def told(reason):
    return pytest.warns(UserWarning, match=reason)


def warm(backbone, count=EAGER, is_training=True, **options):
    """Run the passes before a capture."""
    for seed in range(count):
        outs = backbone(image(seed, **options))
        if is_training:
            loss_of(outs).backward()
            backbone.zero_grad()


def loss_of(outs):
    return sum((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum() for out in outs)


def assert_equal_passes(backbone, oracle, seeds=(7, 8), **options):
    """Compare maps and gradients of some passes with those of an eager twin."""
    for seed in seeds:
        found, wanted = backbone(image(seed, **options)), oracle(image(seed, **options))
        torch.testing.assert_close(found, wanted)
        loss_of(found).backward()
        loss_of(wanted).backward()
        assert_equal_gradients(backbone, oracle)
        backbone.zero_grad()
        oracle.zero_grad()


def assert_equal_gradients(backbone, oracle):
    for (name, ours), theirs in zip(backbone.named_parameters(), oracle.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


@pytest.mark.parametrize(
    ('kind', 'options'),
    [
        (SwinBackbone, {}),
        (SwinBackbone, {'frozen_stages': 1, 'out_indices': (0, 1)}),
        (SwinV2Backbone, {'window_size': 8}),
    ],
    ids=str,
)
def test_replays_equal_eager_passes(kind, options, gpu):
    oracle = build(kind, **options)
    backbone = graphed(copy.deepcopy(oracle), gpu)
    warm(backbone)
    assert gpu.captures == 0
    assert_equal_passes(backbone, oracle)
    assert (gpu.captures, gpu.replays) == (1, 2)


def test_training_evaluation_and_inference_mode_have_their_graphs(gpu):
    oracle = build(drop_path_rate=0.5)
    backbone = graphed(copy.deepcopy(oracle), gpu)
    for _ in range(2):  # epochs
        backbone.train()
        oracle.train()
        warm(backbone, 5)
        backbone.eval()
        oracle.eval()
        for seed, context in enumerate([torch.no_grad, torch.inference_mode] * 3):
            with context():
                torch.testing.assert_close(backbone(image(seed)), oracle(image(seed)))
    assert gpu.captures == 2
    assert gpu.replays == 2 + 3 + 5 + 6


def test_stochastic_depth_draws_anew_in_each_replay(gpu):
    oracle = build(drop_path_rate=0.7)
    backbone = graphed(copy.deepcopy(oracle), gpu)
    warm(backbone)
    backbone(image())  # captures
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        drawn.append(backbone(image())[-1].detach())
        torch.manual_seed(seed)
        torch.testing.assert_close(drawn[-1], oracle(image())[-1])
    assert not torch.equal(*drawn)


# Each of the following states differs from that of the capture: a graph that is replayed would give old results.


def test_autocast_casts_weights_that_change(gpu):
    """Autocast's cache holds casts of weights, which a graph must not read."""
    oracle = build()
    backbone = graphed(copy.deepcopy(oracle), gpu)
    for seed in range(EAGER + 3):
        with torch.autocast('cpu', torch.bfloat16):
            found, wanted = backbone(image(seed)), oracle(image(seed))
        torch.testing.assert_close(found, wanted)
        for model, outs in ((backbone, found), (oracle, wanted)):
            loss_of(outs).backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad.sign()
            model.zero_grad()
    assert gpu.replays == 3
    backbone(image())
    assert gpu.replays == 3  # without autocast


def test_a_capture_that_fails_leaves_its_size_eager_with_one_warning(gpu):
    oracle = build()
    backbone = graphed(copy.deepcopy(oracle), gpu)
    warm(backbone)
    gpu.error = RuntimeError('out of memory')
    with told('capture failed .*out of memory'):
        assert_equal_passes(backbone, oracle)
    gpu.error = None
    assert_equal_passes(backbone, oracle)
    assert gpu.captures == 1
    warm(backbone, side=40)
    assert_equal_passes(backbone, oracle, side=40)
    assert (gpu.captures, gpu.replays) == (2, 2)


def new_weights(backbone):
    return {name: torch.full_like(value, 0.01) for name, value in backbone.state_dict().items()}


def assign(backbone):
    backbone.load_state_dict(new_weights(backbone), assign=True)


def swap_data(backbone):
    """As hooks for moving averages do before and after an evaluation."""
    for parameter in backbone.parameters():
        parameter.data = torch.full_like(parameter.data, 0.01)


def copy_weights(backbone):
    backbone.load_state_dict(new_weights(backbone))


class NegativeGELU(nn.GELU):
    """Has the attributes of nn.GELU."""

    def forward(self, x):
        return -super().forward(x)


def change_a_class(backbone):
    for module in backbone.modules():
        if isinstance(module, nn.GELU):
            module.__class__ = NegativeGELU


def transpose_weights(backbone):
    """The addresses stay."""
    weight = backbone.stages[0].blocks[0].attn.w_msa.proj.weight
    weight.data = weight.data.t()


class ScaledNorm(nn.LayerNorm):
    """Has a tensor that is neither a parameter nor a buffer, and a function."""

    def __init__(self, channels):
        super().__init__(channels)
        self.scale = torch.ones(())
        self.function = torch.sin

    def forward(self, x):
        return self.scale * self.function(super().forward(x))


def replace_a_tensor(backbone):
    backbone.norm0.scale = torch.full((), 2.0)


def replace_a_function(backbone):
    backbone.norm0.function = torch.cos


def replace_attributes(backbone):
    backbone.norm0.__dict__ = {**vars(backbone.norm0), 'eps': 0.5}


def replace_a_module(backbone):
    for module in backbone.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, nn.GELU):
                setattr(module, name, NegativeGELU())


def freeze(backbone):
    backbone.patch_embed.requires_grad_(False)


def change_window(backbone):
    backbone.stages[0].blocks[1].attn.shift = (0, 0)


def hook_inside(backbone):
    backbone.norm0.register_forward_hook(lambda module, args, out: 2 * out)


def wrap_inside(backbone):
    *_, last = backbone.modules()
    last.forward = lambda x: 2 * type(last).forward(last, x)


@pytest.mark.parametrize(
    ('change', 'replays', 'reason'),
    [
        (assign, 0, None),
        (swap_data, 0, None),
        (copy_weights, 2, None),
        (replace_a_module, 0, None),
        (change_a_class, 0, None),
        (transpose_weights, 0, None),
        (replace_a_tensor, 0, None),
        (replace_a_function, 0, None),
        (replace_attributes, 0, None),
        (freeze, 0, None),
        (change_window, 0, None),
        (hook_inside, 0, 'have hooks'),
        (wrap_inside, 0, 'have hooks'),
    ],
)
def test_what_changes_after_the_capture_is_seen(change, replays, reason, gpu):
    oracle = build(norm_cfg=ScaledNorm)
    copy_weights(oracle)  # sets the attributes that loading sets
    randomize(oracle)
    backbone = graphed(copy.deepcopy(oracle), gpu)
    warm(backbone, EAGER + 1)
    assert gpu.replays == 1
    change(backbone)
    change(oracle)
    with told(reason) if reason else contextlib.nullcontext():
        assert_equal_passes(backbone, oracle)
    assert gpu.replays == 1 + replays


def test_settings_that_choose_results_are_seen(gpu, monkeypatch):
    oracle = build(drop_path_rate=0.5)
    backbone = graphed(copy.deepcopy(oracle), gpu)
    warm(backbone, EAGER + 1)
    for module in itertools.chain(backbone.modules(), oracle.modules()):
        if isinstance(module, DropPath):
            module.drop_prob = 0.0
    assert_equal_passes(backbone, oracle)
    assert gpu.replays == 1
    warm(backbone, EAGER)
    assert gpu.captures == 2
    replays = gpu.replays
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', not torch.backends.cudnn.benchmark)
    backbone(image())
    assert gpu.replays == replays


def test_tf32_is_seen():
    matmul = torch.backends.cuda.matmul
    before, precision = graphs._precision(), matmul.allow_tf32
    try:
        matmul.allow_tf32 = not precision
        assert graphs._precision() != before
    finally:
        matmul.allow_tf32 = precision
    assert graphs._precision() is not None


def test_functional_call_uses_its_weights(gpu):
    backbone = graphed(build(), gpu)
    warm(backbone, EAGER + 1)
    weights = {name: 0 * parameter for name, parameter in backbone.named_parameters()}
    with told('not all weights are plain parameters'):
        for _ in range(EAGER + 2):
            assert all(not out.any() for out in functional_call(backbone, weights, image()))
    assert gpu.replays == 1
    aliases = {name: parameter.detach() for name, parameter in backbone.named_parameters()}
    assert not functional_call(backbone, aliases, image())[0].requires_grad


@pytest.mark.parametrize('frozen', [True, False])
def test_maps_of_a_pass_are_not_those_of_the_next(frozen, gpu):
    backbone = graphed(build(), gpu).requires_grad_(not frozen)
    warm(backbone, EAGER + 1, is_training=not frozen)
    first = backbone(image(1))
    kept = [out.detach().clone() for out in first]
    if not frozen:
        loss_of(first).backward()
    backbone(image(2))
    assert gpu.replays == 3
    torch.testing.assert_close([out.detach() for out in first], kept, rtol=0, atol=0)


# Backward passes


def test_gradients_accumulate(gpu):
    oracle = build()
    backbone = graphed(copy.deepcopy(oracle), gpu)
    warm(backbone)
    for seed in range(3):
        for model in (backbone, oracle):
            loss_of(model(image(seed))).backward()
    assert gpu.replays == 3
    assert_equal_gradients(backbone, oracle)


def test_gradients_of_autograd_grad_are_kept(gpu):
    oracle = build()
    backbone = graphed(copy.deepcopy(oracle), gpu)
    warm(backbone)
    found, wanted = [], []
    for model, grads in ((backbone, found), (oracle, wanted)):
        for seed in range(2):
            grads += torch.autograd.grad(loss_of(model(image(seed))), list(model.parameters()))
    assert gpu.replays == 2
    torch.testing.assert_close(found, wanted)


def test_retained_graphs_give_the_same_gradients_again(gpu):
    oracle = build()
    backbone = graphed(copy.deepcopy(oracle), gpu)
    warm(backbone)
    for model in (backbone, oracle):
        loss = loss_of(model(image(1)))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        if model is backbone:
            with told('second forward pass'):
                loss_of(model(image(2))).backward()  # eager: the first may come again
        else:
            loss_of(model(image(2))).backward()
        loss.backward()
        with pytest.raises(RuntimeError, match='second time'):
            loss.backward()
    assert gpu.replays == 1
    assert_equal_gradients(backbone, oracle)
    assert_equal_passes(*(model.zero_grad() or model for model in (backbone, oracle)))
    assert gpu.replays == 3


def test_separate_losses_of_maps(gpu):
    oracle = build()
    backbone = graphed(copy.deepcopy(oracle), gpu)
    warm(backbone)
    for model in (backbone, oracle):
        outs = model(image(1))
        loss_of(outs[:1]).backward(retain_graph=True)
        loss_of(outs[1:]).backward()
    assert gpu.replays == 1
    assert_equal_gradients(backbone, oracle)


def test_parameters_of_unused_maps_have_no_gradient(gpu):
    oracle = build()
    backbone = graphed(copy.deepcopy(oracle), gpu)
    warm(backbone)
    for model in (backbone, oracle):
        loss_of(model(image(1))[:1]).backward()
    assert gpu.replays == 1
    assert backbone.norm1.weight.grad is None
    assert_equal_gradients(backbone, oracle)


def test_a_second_forward_pass_before_the_backward_pass_is_eager(gpu):
    oracle = build()
    backbone = graphed(copy.deepcopy(oracle), gpu)
    warm(backbone)
    with told('second forward pass'):
        for model in (backbone, oracle):
            (loss_of(model(image(1))) + loss_of(model(image(2)))).backward()
    assert gpu.replays == 1
    assert_equal_gradients(backbone, oracle)


def test_a_backward_pass_that_never_comes_ends_nothing(gpu):
    backbone = graphed(build(), gpu)
    warm(backbone)
    outs = backbone(image())
    del outs
    gc.collect()
    backbone(image())
    assert gpu.replays == 2


def test_the_loss_of_the_last_step_may_still_live(gpu):
    backbone = graphed(build(), gpu)
    for seed in range(EAGER + 4):
        loss = loss_of(backbone(image(seed)))
        loss.backward()
    assert gpu.replays == 4


def test_weights_that_change_before_the_backward_pass_raise(gpu):
    backbone = graphed(build(), gpu)
    warm(backbone)
    loss = loss_of(backbone(image()))
    with torch.no_grad():
        backbone.norm0.weight += 1
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        loss.backward()
    del loss
    loss = loss_of(backbone(image()))
    backbone.norm0.weight.data = backbone.norm0.weight.data.clone()
    with pytest.raises(RuntimeError, match='weights moved'):
        loss.backward()


# States that are eager


def trace(backbone):
    return torch.jit.trace(backbone, image(), check_trace=False)(image())


def export_it(backbone):
    return torch.export.export(backbone, (image(),)).module()(image())


def compile_it(backbone):
    torch._dynamo.reset()
    return torch.compile(backbone, backend='eager', fullgraph=True)(image())


def vmap(backbone):
    return [out[0] for out in torch.func.vmap(backbone)(image()[None])]


def forward_ad(backbone):
    with torch.autograd.forward_ad.dual_level():
        return backbone(image())


def count_flops(backbone):
    with FlopCounterMode(display=False) as counter:
        outs = backbone(image())
    assert counter.get_total_flops() > 0
    return outs


def find_anomalies(backbone):
    with torch.autograd.detect_anomaly(check_nan=False):
        return backbone(image())


def differentiate_the_image(backbone):
    img = image().requires_grad_()
    outs = backbone(img)
    assert torch.autograd.grad(loss_of(outs), img, retain_graph=True)[0].any()
    return outs


@pytest.mark.filterwarnings('ignore:Anomaly', 'ignore::torch.jit.TracerWarning', 'ignore:.*torch.jit')
@pytest.mark.parametrize(
    'run',
    [
        trace,
        export_it,
        pytest.param(compile_it, marks=pytest.mark.slow),
        vmap,
        forward_ad,
        count_flops,
        find_anomalies,
        differentiate_the_image,
    ],
)
def test_what_records_transforms_or_counts_is_eager(run, gpu):
    backbone = graphed(build(), gpu).eval()
    warm(backbone, EAGER + 1)
    for _ in range(EAGER + 1):
        torch.testing.assert_close(list(run(backbone)), list(graphs.launch(backbone, image())))
    assert (gpu.captures, gpu.replays) == (1, 1)


@pytest.mark.parametrize(
    ('options', 'reason'),
    [
        ({'with_cp': True}, 'with_cp'),
        ({'with_cp': 'mlp'}, 'with_cp'),
        ({'norm_cfg': lambda channels: ChannelsLastBatchNorm(channels)}, 'batch norm'),
    ],
)
def test_modules_that_cannot_be_captured_are_eager_with_one_warning(options, reason, gpu):
    oracle = build(**options)
    backbone = graphed(copy.deepcopy(oracle), gpu)
    with told(reason) as warned:
        assert_equal_passes(backbone, oracle, range(EAGER + 2))
    assert len(warned) == 1
    assert gpu.captures == 0
    with torch.no_grad():  # in evaluation they can
        for seed in range(EAGER + 1):
            torch.testing.assert_close(backbone.eval()(image(seed)), oracle.eval()(image(seed)))
    assert gpu.replays == 1


class ChannelsLastBatchNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.flatten(0, -2)).view_as(x)


@pytest.mark.parametrize('use_reentrant', [True, False])
def test_a_checkpoint_around_the_backbone_gives_the_same_gradients(use_reentrant, gpu):
    oracle = build(drop_path_rate=0.5)
    backbone = graphed(copy.deepcopy(oracle), gpu)
    start = torch.ones((), requires_grad=True)  # reentrant checkpoints need an input with a gradient

    def loss_by(model, seed):
        torch.manual_seed(seed)
        outs = checkpoint(lambda img, _: model(img), image(seed), start, use_reentrant=use_reentrant)
        loss_of(outs).backward()

    with contextlib.nullcontext() if use_reentrant else told('a checkpoint'):
        for seed in range(EAGER + 3):
            loss_by(backbone, seed)
            loss_by(oracle, seed)
            assert_equal_gradients(backbone, oracle)
    assert gpu.captures == 0


def test_another_thread_is_eager(gpu):
    backbone = graphed(build(), gpu).eval()
    with torch.no_grad():
        warm(backbone, EAGER + 1, is_training=False)
    found = []

    @torch.no_grad()
    def serve():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            found.extend(backbone(image(9)))
        found.append(caught)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert 'another thread' in str(found.pop()[0].message)
    torch.testing.assert_close(tuple(found), graphs.launch(backbone, image(9)))
    assert gpu.replays == 1


def test_another_stream_and_other_devices_have_their_graphs(gpu):
    backbone = graphed(build(), gpu)
    warm(backbone, EAGER + 1)
    gpu.current_stream = 1
    backbone(image())
    assert gpu.replays == 1
    with pytest.raises(RuntimeError, match='DataParallel'):
        graphed(build().to('meta'), gpu)(image())


def test_an_old_torch_is_eager(gpu, monkeypatch):
    monkeypatch.setattr(graphs, '_NEEDED', ('a_name_of_later_versions',))
    backbone = graphed(build(), gpu)
    with told('torch .* is too old'):
        for _ in range(EAGER + 2):
            backbone(image())
    assert gpu.captures == 0


# Memory


@torch.no_grad()
def test_many_sizes_at_a_limit_are_not_captured_again_and_again(gpu):
    oracle = build().eval()
    backbone = graphed(copy.deepcopy(oracle), gpu, limit_mib=4)
    sides = [8, 12, 16, 20, 24]
    with told('limit_mib=4') as warned:
        for seed in range(20):
            for side in sides:
                torch.testing.assert_close(backbone(image(seed, side=side)), oracle(image(seed, side=side)))
    assert len(warned) == 1
    assert gpu.captures == len(sides)
    assert gpu.replays == 4 * (20 - EAGER)


@torch.no_grad()
def test_a_graph_that_was_not_used_for_long_gives_way(gpu, monkeypatch):
    monkeypatch.setattr(graphs, '_IDLE_PASSES', 20)
    backbone = graphed(build().eval(), gpu, limit_mib=1)
    warm(backbone, EAGER + 1, is_training=False, side=8)
    with told('limit_mib=1'):
        warm(backbone, 30, is_training=False, side=12)
    assert gpu.captures == 3  # the second one did not fit
    replays = gpu.replays
    warm(backbone, 5, is_training=False, side=12)
    assert gpu.replays == replays + 5


# Copies, wrappers, and the public name


def test_copies_have_graphs_of_their_own(gpu):
    backbone = graphed(build(), gpu)
    warm(backbone, EAGER + 1)
    twin = copy.deepcopy(backbone)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        assert all(not out.any() for out in twin(image()))
    assert gpu.replays == 1
    del backbone.forward
    backbone(image())
    assert gpu.replays == 1
    use_graphs(backbone)
    again = pickle.loads(pickle.dumps(backbone))
    torch.testing.assert_close(again(image()), graphs.launch(backbone, image()))
    assert again.forward._backbone is again


def test_distributed_data_parallel(gpu, tmp_path):
    oracle = build()
    backbone = graphed(copy.deepcopy(oracle), gpu)
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(backbone)
        for seed in range(EAGER + 3):
            for model in (parallel, oracle):
                loss_of(model(image(seed))).backward()
            assert_equal_gradients(backbone, oracle)
        with pytest.raises(TypeError, match='would not exchange gradients'):
            use_graphs(parallel)
    finally:
        torch.distributed.destroy_process_group()
    assert gpu.replays == 3


def test_the_public_name():
    assert swin_dense.use_graphs is graphs.use_graphs
    backbone = build()
    assert use_graphs(use_graphs(backbone)) is backbone
    torch.testing.assert_close(backbone(image()), graphs.launch(backbone, image()))
    backbone.forward = lambda img: img
    with pytest.raises(ValueError, match='replaced before'):
        use_graphs(backbone)
    with pytest.raises(TypeError, match=r'must be a torch\.nn\.Module, got str'):
        use_graphs('swin_t')
    with pytest.raises(ValueError, match='limit_mib must be at least 1'):
        use_graphs(build(), limit_mib=0)


def test_empty_batches_are_eager(gpu):
    backbone = graphed(build(), gpu)
    for _ in range(EAGER + 2):
        assert backbone(image(batch=0))[0].shape[0] == 0
    assert gpu.captures == 0


class Recorder:
    """Stands for torch.cuda: records the calls that a capture makes, and runs what it captures."""

    def __init__(self):
        self.options = []

    def graph(self, graph, **options):
        self.options.append(options)
        return contextlib.nullcontext()

    class CUDAGraph:
        def pool(self):
            return self

        def replay(self):
            pass

    def Stream(self, device):
        return self

    def wait_stream(self, other):
        assert other is self

    def current_stream(self):
        return self

    def stream(self, stream):
        return contextlib.nullcontext()

    device = stream

    def synchronize(self):
        pass

    empty_cache = synchronize

    def memory_reserved(self):
        return len(self.options) << 20


@pytest.mark.parametrize('options', [{}, {'frozen_stages': 1}], ids=str)
def test_a_capture_calls_what_it_should(options, monkeypatch):
    """Without its GPU; hooks of the backbone and gradients of its parameters are not touched."""
    cuda = Recorder()
    monkeypatch.setattr(torch, 'cuda', cuda)
    backbone = use_graphs(build(**options))
    backbone.register_forward_hook(lambda *_: pytest.fail('a hook ran'))
    captured = graphs.Cuda().capture(backbone, image())
    monkeypatch.undo()
    backbone._forward_hooks.clear()
    eager = graphs.launch(backbone, image())
    torch.testing.assert_close(captured.outs, [out.detach() for out in eager])
    assert [grad is not None for grad in captured.out_grads] == [out.requires_grad for out in eager]
    trained = [parameter for parameter in backbone.parameters() if parameter.requires_grad]
    assert [grad.shape for grad in captured.grads] == [parameter.shape for parameter in trained]
    assert all(parameter.grad is None for parameter in trained)
    forward, backward = cuda.options
    assert forward.pop('stream') is backward.pop('stream')
    assert forward == {'capture_error_mode': 'thread_local'}
    assert isinstance(backward.pop('pool'), Recorder.CUDAGraph)
    assert backward == forward
    assert captured.mib == 2


# On a GPU

on_gpu = pytest.mark.usefixtures('cuda')


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.skip('needs a CUDA device')


def assert_near(found, wanted, autocast):
    """Compare as a whole: a graph has the kernel of LayerNorm where an eager pass may have torch's."""
    distance = (found.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-6)
    assert distance < (1e-3 if autocast is None else 0.05)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize('autocast', [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize('options', [{}, {'frozen_stages': 1}], ids=str)
def test_cuda_graphs_equal_eager_passes(options, autocast):
    oracle = build(**options).cuda()
    backbone = use_graphs(copy.deepcopy(oracle))
    for seed in range(EAGER + 3):
        for model in (backbone, oracle):
            for part in range(1 + seed % 2):  # gradients accumulate
                with torch.autocast('cuda', autocast, enabled=autocast is not None):
                    outs = model(image(seed + part).cuda())
                loss = sum((out.float() ** 2).sum() for out in outs)
                loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter -= 1e-3 * parameter.grad.sign()
        for ours, theirs in zip(backbone.parameters(), oracle.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                assert_near(ours.grad, theirs.grad, autocast)
        for model in (backbone, oracle):
            model.zero_grad()
    assert [graph for graph in backbone.forward._graphs.values() if graph]
    with torch.inference_mode():
        for seed in range(EAGER + 2):
            for ours, theirs in zip(
                backbone.eval()(image(seed).cuda()), oracle.eval()(image(seed).cuda()), strict=True
            ):
                assert_near(ours, theirs, None)
    assert len([graph for graph in backbone.forward._graphs.values() if graph]) == 2


@pytest.mark.gpu
@on_gpu
@torch.no_grad()
def test_cuda_captures_beside_a_thread_that_allocates():
    backbone = use_graphs(build().cuda().eval())
    stop = threading.Event()

    def allocate():
        while not stop.is_set():
            torch.empty(1 << 16, pin_memory=True)

    thread = threading.Thread(target=allocate)
    thread.start()
    try:
        for seed in range(EAGER + 2):
            found, wanted = backbone(image(seed).cuda()), graphs.launch(backbone, image(seed).cuda())
            for ours, theirs in zip(found, wanted, strict=True):
                assert_near(ours, theirs, None)
    finally:
        stop.set()
        thread.join()
    assert [graph for graph in backbone.forward._graphs.values() if graph]


@pytest.mark.gpu
@on_gpu
@torch.no_grad()
def test_cuda_graphs_on_the_second_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip('needs two GPUs')
    backbone = use_graphs(build().to('cuda:1').eval())
    for seed in range(EAGER + 2):
        img = image(seed).to('cuda:1')
        for ours, theirs in zip(backbone(img), graphs.launch(backbone, img), strict=True):
            assert_near(ours, theirs, None)
    assert [graph for graph in backbone.forward._graphs.values() if graph]
