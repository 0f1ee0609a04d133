"""Test which attention 'auto' is on a GPU: the trial of the kernel with planted faults, its cache and its warning.

No test needs a GPU: the questions for the device are replaced, and plain operations stand in for the kernel.
"""

import subprocess
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from swin_dense import SwinBackbone, SwinV2Backbone, ops
from swin_dense.models import attention as module_of_attention
from swin_dense.ops import context, sdpa
from swin_dense.ops.triton import attention, choice, gpu, trials
from swin_dense.ops.windows import WindowSpec
from swin_dense.utils import compat
from tests.conftest import FLOAT16, needs_half
from tests.ops.devices import needs_interpreter, run_python

CPU = torch.device('cpu')
TRIAL = trials.AttentionTrial(
    CPU,
    torch.bfloat16,
    torch.float32,
    16,
    (7, 7),
    True,
    True,
)
SPEC = WindowSpec(
    num_heads=2,
    window=(7, 7),
    shift=(3, 3),
    scale=0.25,
)
MAP = torch.zeros(1, 9, 8, 32)
TABLE = nn.Parameter(torch.zeros(169, 2))


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(choice, 'reasons', choice.Reasons())
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)


@pytest.fixture
def _supported(monkeypatch):
    monkeypatch.setattr(gpu, 'unsupported_device_reason', lambda device: None)


@pytest.fixture
def stand_in(monkeypatch, _supported):
    """Let plain operations be the kernel, without its fault."""
    monkeypatch.setattr(attention, 'forward', kernel_forward)
    monkeypatch.setattr(attention, 'backward', kernel_backward)


def kernel_forward(qkv, table, heads, window, shift, scale, size):
    spec = WindowSpec(heads, window, shift, scale)
    out = ops.window_attention(
        qkv.float(),
        lambda x: x,
        table.float(),
        spec,
        nn.Identity(),
        'reference',
    )
    return out[:, : size[0], : size[1]].to(qkv.dtype), None


def kernel_backward(grad, qkv, table, out, lse, *settings):
    leaves = [qkv.float().requires_grad_(), table.float().requires_grad_()]
    out, _ = kernel_forward(*leaves, *settings[:-1])
    grad_qkv, grad_table = torch.autograd.grad(out, leaves, grad.float())
    return grad_qkv.to(qkv.dtype), grad_table.to(table.dtype)


def without_regions(qkv, table, heads, window, shift, *others):
    return kernel_forward(qkv, table, heads, window, (0, 0), *others)


def without_bias(qkv, table, *settings):
    return kernel_forward(qkv, 0 * table, *settings)


def with_a_nan(qkv, table, *settings):
    out, lse = kernel_forward(qkv, table, *settings)
    out[0, 0, 0, 0] = torch.nan
    return out, lse


def with_a_wrong_gradient_of_the_table(*inputs):
    grad_qkv, grad_table = kernel_backward(*inputs)
    return grad_qkv, grad_table.flip(0)


def without_the_last_window(*inputs):
    grad_qkv, grad_table = kernel_backward(*inputs)
    grad_qkv[:, 7:, 7:] = 0.0
    return grad_qkv, grad_table


def fails(error):
    def forward(*inputs):
        raise error

    return forward


NO_COMPILER = RuntimeError('Failed to find C compiler. Please specify via CC environment variable.\nmore')
NO_HEADERS = subprocess.CalledProcessError(1, ['/usr/bin/gcc', 'main.c'])
FAULTS = [
    ('forward', fails(NO_COMPILER), 'RuntimeError: Failed to find C compiler.*install a C compiler.*TRITON_CACHE_DIR'),
    ('forward', fails(NO_HEADERS), 'CalledProcessError.*the headers of Python'),
    ('forward', fails(PermissionError(13, 'Permission denied', '/.triton')), '/.triton.*TRITON_CACHE_DIR to a folder'),
    ('forward', fails(ValueError('new GPU')), 'ValueError: new GPU.*swin-dense doctor'),
    ('forward', without_regions, 'differ from those of plain operations'),
    ('forward', without_bias, 'differ from those of plain operations'),
    ('forward', with_a_nan, 'differ from those of plain operations by nan'),
    ('backward', with_a_wrong_gradient_of_the_table, 'differ from those of plain operations'),
    ('backward', without_the_last_window, 'differ from those of plain operations'),
]


@pytest.mark.usefixtures('stand_in')
@pytest.mark.parametrize(('function', 'fault', 'message'), FAULTS)
def test_a_kernel_with_a_fault_is_not_used_and_one_warning_says_why(monkeypatch, function, fault, message):
    monkeypatch.setattr(attention, function, fault)
    with pytest.warns(UserWarning, match=message) as caught:
        assert not choice.is_kernel(MAP, TABLE, SPEC, 0.0)
    assert not choice.is_kernel(MAP, TABLE, SPEC, 0.0)
    (warning,) = caught
    assert "attn_backend='auto' is torch's attention on cpu" in str(warning.message)
    assert "attn_backend='sdpa' silences this" in str(warning.message)


@pytest.mark.usefixtures('stand_in')
@pytest.mark.parametrize('dtype', [torch.float32, FLOAT16, torch.bfloat16], ids=str)
def test_a_right_kernel_is_used_without_a_word(dtype):
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert choice.is_kernel(MAP.to(dtype), TABLE, SPEC, 0.0)
        with torch.no_grad():
            assert choice.is_kernel(MAP.to(dtype), TABLE, SPEC, 0.0)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures('stand_in')
def test_a_fault_for_one_dtype_of_the_table_is_no_fault_for_another(monkeypatch):
    """A model in low precision has a table in low precision, and one under autocast in float32."""

    def forward(qkv, table, *settings):
        if table.dtype != torch.float32:
            raise TypeError('no such instruction')
        return kernel_forward(qkv, table, *settings)

    monkeypatch.setattr(attention, 'forward', forward)
    assert choice.is_kernel(MAP.bfloat16(), TABLE, SPEC, 0.0)
    with pytest.warns(UserWarning, match='no such instruction'):
        assert not choice.is_kernel(MAP.bfloat16(), TABLE.bfloat16(), SPEC, 0.0)
    assert choice.is_kernel(MAP.bfloat16(), TABLE, SPEC, 0.0)


def sides():
    """Return the windows of published models and those between; larger ones take the interpreter up to a minute."""
    return [pytest.param((side, side), marks=() if side == 7 else pytest.mark.long) for side in range(7, 17)]


@needs_interpreter
@pytest.mark.usefixtures('_supported')
@pytest.mark.parametrize('window', sides(), ids=str)
@pytest.mark.parametrize('dtype', gpu.DTYPES, ids=str)
def test_the_kernel_passes_its_trial(window, dtype):
    """Also with a table in the dtype of the map, and a frozen one."""
    trial = TRIAL._replace(dtype=dtype, window=window)
    assert choice._reason_against(trial) is None
    if window == (7, 7):
        assert choice._reason_against(trial._replace(table_dtype=dtype)) is None
        assert choice._reason_against(trial._replace(trains_table=False)) is None


@pytest.mark.usefixtures('_supported')
@pytest.mark.parametrize('trains_table', [True, False])
def test_the_gradient_of_a_frozen_table_is_not_computed(monkeypatch, trains_table):
    """It takes a kernel of its own, and memory for the bias of each strip of windows."""
    asked = []

    def forward(*inputs):
        out, _ = kernel_forward(*inputs)
        return out, torch.zeros(1)

    def backward(*inputs):
        asked.append(inputs[-1])
        return torch.zeros_like(inputs[1]), torch.zeros_like(inputs[2])

    monkeypatch.setattr(attention, 'forward', forward)
    monkeypatch.setattr(attention, 'backward', backward)
    table = torch.zeros(169, 2, requires_grad=trains_table)
    x = torch.ones(1, 14, 7, 32, requires_grad=True)
    out = attention.attend_by_kernel(x, lambda windows: windows.repeat(1, 1, 1, 3), table, SPEC, is_tracing=False)
    out.sum().backward()
    assert asked == [trains_table]
    assert (table.grad is not None) == trains_table


@pytest.mark.usefixtures('_supported')
def test_the_same_fault_of_many_kernels_is_one_warning(monkeypatch):
    monkeypatch.setattr(attention, 'forward', fails(NO_COMPILER))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for dtype in gpu.DTYPES:
            assert not choice.is_kernel(MAP.to(dtype), TABLE, SPEC, 0.0)
    assert len(caught) == 1


@pytest.fixture
def tried(monkeypatch, _supported):
    """Return a list of the trials that are made; all pass."""
    made = []
    monkeypatch.setattr(choice, '_outcome', lambda trial: made.append(trial) or (None, ''))
    return made


def test_each_kernel_is_tried_once(tried):
    for _ in range(3):
        assert choice.is_kernel(MAP, TABLE, SPEC, 0.0)
        with torch.no_grad():
            assert choice.is_kernel(MAP, TABLE, SPEC, 0.0)
        assert choice.is_kernel(MAP, TABLE, SPEC._replace(window=(8, 8)), 0.0)
    assert [(trial.dtype, trial.window, trial.has_gradients) for trial in tried] == [
        (torch.float32, (7, 7), True),
        (torch.float32, (7, 7), False),
        (torch.float32, (8, 8), True),
    ]


LOW = torch.bfloat16


@pytest.mark.parametrize(
    ('kind', 'options', 'dtype', 'autocast', 'expected'),
    [
        (SwinBackbone, {}, torch.float32, None, (torch.float32, torch.float32, True)),
        (SwinBackbone, {}, torch.float32, LOW, (LOW, torch.float32, True)),
        pytest.param(SwinBackbone, {}, torch.float16, None, (torch.float16, torch.float16, True), marks=needs_half),
        (SwinBackbone, {}, LOW, None, (LOW, LOW, True)),
        (SwinBackbone, {'frozen_stages': 1}, torch.float32, LOW, (LOW, torch.float32, False)),
        (SwinBackbone, {'use_rel_pos_bias': False}, torch.float32, LOW, (LOW, LOW, False)),
        (SwinV2Backbone, {}, torch.float32, None, (torch.float32, torch.float32, True)),
        (SwinV2Backbone, {}, torch.float32, LOW, (LOW, LOW, True)),
        (SwinV2Backbone, {}, LOW, None, (LOW, LOW, True)),
    ],
)
def test_what_is_tried_is_what_the_kernel_is_called_with(monkeypatch, tried, kind, options, dtype, autocast, expected):
    """Autocast of a CPU stands in for that of a GPU: the dtypes of qkv and table are those that the model computes."""
    model = kind({'embed_dims': 16, 'depths': (2, 2), 'num_heads': (1, 1)}, **options).to(dtype)
    w_msa = model.stages[0].blocks[0].attn.w_msa
    called = []

    def record(x, project, table, spec, attn_drop, backend):
        assert choice.is_kernel(x, table, spec, 0.0)
        table_dtype = project(x).dtype if table is None else table.dtype
        called.append((project(x).dtype, table_dtype, table is not None and table.requires_grad))
        return x

    monkeypatch.setattr(module_of_attention, 'window_attention', record)
    monkeypatch.setattr(compat, 'is_autocast_enabled', lambda device: autocast is not None)
    monkeypatch.setattr(compat, 'get_autocast_dtype', lambda device: autocast)
    with torch.autocast('cpu', autocast, enabled=autocast is not None):
        w_msa(torch.zeros(1, 7, 7, 16, dtype=dtype), (7, 7), (0, 0))
    (trial,) = tried
    assert (trial.dtype, trial.table_dtype, trial.trains_table) == called[0] == expected


def test_autocast_chooses_the_dtype(monkeypatch):
    monkeypatch.setattr(compat, 'is_autocast_enabled', lambda device_type: device_type == 'cuda')
    monkeypatch.setattr(compat, 'get_autocast_dtype', lambda device_type: torch.bfloat16)
    dtypes = []
    monkeypatch.setattr(choice, '_reason_against', lambda trial: dtypes.append(trial.dtype))
    for dtype in (torch.float32, torch.float64, torch.float16):
        choice.is_kernel(MAP.to(dtype), TABLE, SPEC, 0.0)
    assert dtypes == [torch.bfloat16, torch.float64]  # that of float16 is the first again


class Subclass(torch.Tensor):
    pass


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.usefixtures('stand_in')
@pytest.mark.parametrize(
    ('x', 'spec', 'dropout'),
    [
        (MAP, SPEC, 0.1),
        (MAP.double(), SPEC, 0.0),
        (MAP[..., :24], SPEC, 0.0),
        (MAP, SPEC._replace(window=(17, 16)), 0.0),
        (MAP.as_subclass(Subclass), SPEC, 0.0),
    ],
    ids=['dropout', 'float64', 'heads of 12', 'large windows', 'subclass'],
)
def test_what_the_kernel_cannot_do_is_neither_tried_nor_reported(monkeypatch, x, spec, dropout):
    monkeypatch.setattr(choice, '_outcome', fails(AssertionError('tried')))
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert not choice.is_kernel(x, TABLE, spec, dropout)


@pytest.mark.usefixtures('stand_in')
def test_a_compiled_model_knows_the_outcome_of_a_trial(monkeypatch):
    """torch.compile cannot trace a trial, so it is run when the graph is recorded."""

    def function(x):
        return x + 1 if choice.is_kernel(x, TABLE, SPEC, 0.0, context.is_tracing()) else x - 1

    torch._dynamo.reset()
    compiled = torch.compile(function, backend='eager', fullgraph=True)
    assert torch.equal(compiled(MAP), MAP + 1)
    monkeypatch.setattr(choice, 'reasons', choice.Reasons())
    monkeypatch.setattr(attention, 'forward', fails(ValueError('new GPU')))
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match='new GPU'):
        assert torch.equal(torch.compile(function, backend='eager', fullgraph=True)(MAP), MAP - 1)


@pytest.mark.usefixtures('stand_in')
def test_a_flop_counter_sees_the_operations_of_torch():
    assert choice.is_kernel(MAP, TABLE, SPEC, 0.0)
    with FlopCounterMode(display=False):
        assert not choice.is_kernel(MAP, TABLE, SPEC, 0.0)


@pytest.mark.parametrize(
    ('version', 'major'),
    [
        (None, 7),
        ('6.4', 9),
    ],
    ids=['old', 'AMD'],
)
def test_a_gpu_without_a_kernel_is_not_worth_a_warning(monkeypatch, version, major):
    monkeypatch.setattr(torch.version, 'hip', version)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: SimpleNamespace(major=major))
    monkeypatch.setattr(gpu, '_unusable', 'triton cannot be imported')
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert choice._reason_against(TRIAL._replace(device=torch.device('cuda', 0)))


def test_a_gpu_with_a_kernel_but_without_triton_is_worth_a_warning(monkeypatch):
    monkeypatch.setattr(torch.version, 'hip', None)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_properties', lambda device: SimpleNamespace(major=8))
    monkeypatch.setattr(gpu, '_unusable', 'triton cannot be imported')
    with pytest.warns(UserWarning, match=r'cuda:0.*triton cannot be imported.*triton 3\.6'):
        assert choice._reason_against(TRIAL._replace(device=torch.device('cuda', 0)))


@pytest.mark.usefixtures('stand_in')
def test_nothing_is_tried_while_a_cuda_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
    assert not choice.is_kernel(MAP, TABLE, SPEC, 0.0)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    assert choice.is_kernel(MAP, TABLE, SPEC, 0.0)
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: True)
    assert choice.is_kernel(MAP, TABLE, SPEC, 0.0)


@pytest.mark.usefixtures('_supported')
def test_a_trial_ignores_captures_of_other_threads(monkeypatch):
    """It allocates memory and waits for the device, which would end such a capture with an error."""
    calls = []

    class Driver:
        def __init__(self, name):
            assert name in ('libcuda.so.1', 'nvcuda.dll')

        def cuThreadExchangeStreamCaptureMode(self, mode):
            calls.append((threading.get_ident(), mode._obj.value))

    def forward(*inputs):
        calls.append(threading.get_ident())
        return kernel_forward(*inputs)

    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(gpu.ctypes, 'CDLL', Driver)
    monkeypatch.setattr(attention, 'forward', forward)
    assert choice.reasons[(trials.AttentionTrial, *TRIAL._replace(has_gradients=False))] is None
    (thread, mode), thread_of_kernel = calls
    assert thread == thread_of_kernel != threading.get_ident()
    assert mode == 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL in cuda.h


@pytest.mark.usefixtures('stand_in')
def test_a_trial_is_not_affected_by_its_surroundings():
    """A checkpoint sets hooks on saved tensors; inference mode, autocast and a default device would change results."""
    hooks = torch.autograd.graph.saved_tensors_hooks(fails(AssertionError('saved')), fails(AssertionError('read')))
    with hooks, torch.inference_mode(), torch.autocast('cpu', torch.bfloat16), torch.device('meta'):
        assert choice._reason_against(TRIAL) is None


@pytest.mark.parametrize(
    ('backend', 'is_kernel', 'expected'),
    [
        ('auto', True, 'kernel'),
        ('auto', False, 'sdpa'),
        ('sdpa', True, 'sdpa'),
        ('triton', False, 'kernel'),
    ],
)
def test_a_map_on_a_gpu_goes_where_the_trial_says(monkeypatch, backend, is_kernel, expected):
    monkeypatch.setattr(choice, 'is_kernel', lambda *inputs: is_kernel)
    monkeypatch.setattr(attention, 'unsupported_reason', lambda *inputs: None)
    monkeypatch.setattr(attention, 'attend_by_kernel', lambda *inputs: 'kernel')
    monkeypatch.setattr(sdpa, 'attend_by_torch', lambda *inputs: 'sdpa')
    monkeypatch.setattr(context, 'needs_reference', lambda x, is_tracing: False)
    x = MAP.as_subclass(OnGpu)
    assert ops.window_attention(x, nn.Identity(), None, SPEC, nn.Dropout(0.0), backend) == expected


def test_triton_is_not_imported_on_a_cpu():
    run_python("""
        import sys, torch
        from swin_dense import SwinBackbone
        backbone = SwinBackbone(dict(embed_dims=16, depths=(2, 2), num_heads=(1, 1)))
        backbone(torch.zeros(1, 3, 32, 32))[-1].sum().backward()
        assert 'triton' not in sys.modules
    """)


def test_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setattr(gpu, '_unusable', None)
    monkeypatch.setattr(gpu, 'IS_INTERPRETED', True)
    assert gpu.unsupported_reason(MAP) is None
    monkeypatch.setattr(gpu, 'IS_INTERPRETED', False)
    assert 'not on a CUDA device' in gpu.unsupported_reason(MAP)
