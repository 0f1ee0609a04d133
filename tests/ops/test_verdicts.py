"""Dispatch of 'auto' with and without a verdict on the kernels; triton's interpreter simulates a GPU."""

import json
import logging

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from swin_dense import SwinBackbone, ops
from swin_dense.ops import bmm, dispatch
from swin_dense.ops.triton import attention, bias, gpu, norm, verdicts
from swin_dense.ops.triton.verdicts import INFERENCE, TRAINING, Entry
from swin_dense.ops.windows import WindowSpec
from tests.conftest import TINY, randomize
from tests.ops.devices import needs_interpreter

KEY = {'gpu': 'Stand-In 100', 'swin_dense': '0.1.0'}
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
ATTENTION = verdicts.attention_name(16, (4, 4), FLOAT32, FLOAT32, FLOAT32)
BIAS = verdicts.bias_name((4, 4), FLOAT32)
CPU = torch.device('cpu')


def times(kernel, other=100.0):
    return {'triton': kernel, 'sdpa': other, 'plain': 2 * other}


GOOD = Entry(None, (16, 32), {INFERENCE: times(50.0), TRAINING: times(50.0)})
FAST_IN_INFERENCE = Entry(None, (), {INFERENCE: times(50.0), TRAINING: times(101.0)})


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Simulate a GPU with triton's interpreter; return a function that sets the verdict for it."""
    monkeypatch.setattr(gpu, 'is_gpu', lambda x: True)
    monkeypatch.setattr(bmm, 'is_faster', lambda *_: False)  # for maps on a CPU, as those of the tests are
    monkeypatch.setattr(gpu, 'autocast_dtype', lambda x: BFLOAT16 if torch.is_autocast_enabled('cpu') else None)
    monkeypatch.setattr(verdicts, 'key', lambda device: KEY)
    dispatch._log_once.cache_clear()

    def put(entries):
        monkeypatch.setattr(verdicts, 'read', lambda key: entries)
        verdicts.of_device.cache_clear()

    yield put
    verdicts.of_device.cache_clear()


@pytest.fixture
def launched(monkeypatch):
    """Collect the names of launched kernels."""
    names = []
    for module, name in ((attention, 'attention'), (norm, 'norm')):
        launch = module._Launch.__call__

        def record(self, *args, name=name, launch=launch, **options):
            names.append(name)
            launch(self, *args, **options)

        monkeypatch.setattr(module._Launch, '__call__', record)
    launch_bias = bias._launch

    def record_bias(*args):
        names.append('bias')
        launch_bias(*args)

    monkeypatch.setattr(bias, '_launch', record_bias)
    return names


def attend(backend='auto', dropout=0.0, window=(4, 4)):
    places = (2 * window[0] - 1) * (2 * window[1] - 1)
    qkv, table, pad_kv = torch.randn(1, 8, 9, 48), torch.randn(places, 1), torch.randn(32)
    expanded = ops.relative_position_bias(table, window, backend)
    return ops.window_attention(qkv, expanded, pad_kv, WindowSpec(1, window, (2, 2), 0.25, dropout), backend)


@needs_interpreter
def test_uses_kernels_that_are_correct_and_faster(on_a_gpu, launched, caplog):
    on_a_gpu({ATTENTION: GOOD, BIAS: GOOD})
    with caplog.at_level(logging.INFO, logger='swin_dense.ops'):
        attend()
        attend()
    assert launched == ['bias', 'attention'] * 2
    assert [record.getMessage() for record in caplog.records] == ["window attention uses backend 'triton'"]


@needs_interpreter
@pytest.mark.parametrize(
    ('entry', 'message'),
    [
        (Entry('ended with SIGSEGV'), f'`swin-dense doctor` found that {ATTENTION} failed: ended with SIGSEGV'),
        (FAST_IN_INFERENCE, f'`swin-dense doctor` measured that {ATTENTION} is no faster than sdpa in training'),
    ],
)
def test_does_not_use_failed_or_slow_kernels(on_a_gpu, launched, caplog, entry, message):
    on_a_gpu({ATTENTION: entry, BIAS: entry})
    with caplog.at_level(logging.INFO, logger='swin_dense.ops'):
        attend()
        attend()
    assert not launched
    assert [record.getMessage() for record in caplog.records] == [
        f"window attention uses backend 'sdpa' (triton: {message})"
    ]


@needs_interpreter
def test_a_kernel_may_be_used_for_inference_only(on_a_gpu, launched):
    on_a_gpu({ATTENTION: FAST_IN_INFERENCE})
    with torch.no_grad():
        attend()
    assert launched == ['attention']


@needs_interpreter
def test_does_not_use_unchecked_kernels(on_a_gpu, launched, caplog):
    on_a_gpu({ATTENTION: GOOD, BIAS: GOOD})
    with caplog.at_level(logging.INFO, logger='swin_dense.ops'):
        attend(window=(4, 5))
    assert not launched
    kernel = 'attention, window 4x5, head dimension 16, float32 with float32 parameters'
    assert f'`swin-dense doctor` did not check {kernel}' in caplog.text
    assert 'attn_backend="triton"' in caplog.text


@needs_interpreter
def test_without_a_verdict_no_kernel_runs_and_one_warning_is_logged(on_a_gpu, launched, caplog):
    on_a_gpu(None)
    model = SwinBackbone(**TINY, window_size=4)
    for _ in range(2):
        model(torch.randn(1, 3, 32, 32))
    assert not launched
    (record,) = caplog.records
    assert record.levelname == 'WARNING'
    assert 'no verdict on the Triton kernels for this GPU (Stand-In 100)' in record.getMessage()
    assert 'Run `swin-dense doctor` once' in record.getMessage()


@needs_interpreter
@pytest.mark.parametrize('backend', ['sdpa', 'reference', 'triton'])
def test_an_explicit_backend_needs_no_verdict(on_a_gpu, launched, caplog, backend):
    on_a_gpu(None)
    model = SwinBackbone(**TINY, window_size=4, attn_backend=backend)
    with torch.no_grad():
        model(torch.randn(1, 3, 32, 32))
    assert set(launched) == ({'attention', 'norm', 'bias'} if backend == 'triton' else set())
    assert not caplog.records


@needs_interpreter
def test_the_norm_kernel_is_used_only_for_checked_channels(on_a_gpu, launched):
    name = verdicts.norm_name(FLOAT32, FLOAT32, FLOAT32)
    on_a_gpu({name: Entry(None, (16,), GOOD.microseconds)})
    model = SwinBackbone(**TINY, window_size=4)
    with torch.no_grad():
        model(torch.randn(1, 3, 16, 16))
    assert launched == ['norm'] * 6  # one of the embedding, two of each of two blocks, one of the output


@needs_interpreter
def test_the_verdict_is_a_constant_of_compiled_graphs(on_a_gpu, launched):
    on_a_gpu({ATTENTION: FAST_IN_INFERENCE})
    torch._dynamo.reset()
    expanded, pad_kv = torch.randn(1, 16, 16), torch.randn(32)

    def function(qkv):
        return ops.window_attention(qkv, expanded, pad_kv, WindowSpec(1, (4, 4), (2, 2), 0.25))

    counter = CompileCounterWithBackend('aot_eager')
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    qkv = torch.randn(1, 8, 9, 48)
    with torch.no_grad():
        assert torch.equal(compiled(qkv), function(qkv))
    assert launched == ['attention'] * 2
    torch.testing.assert_close(compiled(qkv.requires_grad_()), function(qkv))
    assert launched == ['attention'] * 2
    assert counter.frame_count == 2


@needs_interpreter
def test_without_a_verdict_compilation_has_no_graph_break_and_logs_once(on_a_gpu, launched, caplog):
    on_a_gpu(None)
    torch._dynamo.reset()
    qkv, expanded, pad_kv = torch.randn(1, 8, 9, 48), torch.randn(1, 16, 16), torch.randn(32)

    def function(qkv):
        return ops.window_attention(qkv, expanded, pad_kv, WindowSpec(1, (4, 4), (2, 2), 0.25))

    torch.compile(function, backend='aot_eager', fullgraph=True)(qkv)
    assert not launched
    assert [record.getMessage()[:10] for record in caplog.records if record.name == 'swin_dense.ops'] == ['no verdict']


def write(content):
    path = verdicts.path(KEY)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


@pytest.mark.parametrize(
    'content',
    [
        '',
        '[]',
        '{"key": {"gpu": "Stand-In 100"',  # a truncated file
        json.dumps({'key': {**KEY, 'swin_dense': '0.0.9'}, 'kernels': {}}),
        json.dumps({'key': KEY, 'kernels': {'x': {'error': None, 'speed': 3}}}),
        json.dumps({'key': KEY, 'kernels': {'x': {'error': None, 'microseconds': {INFERENCE: {'triton': 1.0}}}}}),
        json.dumps({'key': KEY, 'kernels': {'x': 'good'}}),
        b'\xff\xfe'.decode('latin1'),
    ],
)
def test_an_unreadable_verdict_is_ignored(tmp_path, monkeypatch, content):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    assert verdicts.read(KEY) is None
    write(content)
    assert verdicts.read(KEY) is None
    times_by_mode = {INFERENCE: times(1.0), TRAINING: times(2.0)}
    write(json.dumps({'key': KEY, 'kernels': {'x': {'error': None, 'microseconds': times_by_mode}}}))
    assert verdicts.read(KEY)['x'].speed(TRAINING) == ('sdpa', 50.0)


def test_the_driver_version_is_read_from_linux(tmp_path, monkeypatch):
    file = tmp_path / 'version'
    monkeypatch.setattr(verdicts, '_DRIVER', file)
    monkeypatch.setattr(torch._C, '_cuda_getDriverVersion', lambda: 13000, raising=False)
    assert verdicts._driver() == 'for CUDA 13000'
    file.write_text(
        'NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:14:21 UTC 2025\nGCC version:\n'
    )
    assert verdicts._driver() == '580.65.06'


def test_amd_gpus_are_unsupported_with_a_reason(monkeypatch):
    monkeypatch.setattr(torch.version, 'hip', '6.4')
    assert 'AMD GPUs (ROCm)' in gpu.unsupported_device_reason(torch.device('cuda:0'))


@needs_interpreter
@pytest.mark.parametrize('with_cp', [pytest.param(False, marks=pytest.mark.long), True])
def test_kernels_give_the_same_backbone_outputs_and_gradients(on_a_gpu, launched, monkeypatch, with_cp):
    """Compare forward and backward passes under autocast, with kernels for norms, merging, bias and maps."""
    monkeypatch.setattr(verdicts, '_reason_against', lambda *args: None)
    options = {**TINY, 'depths': (2, 1, 1, 1), 'window_size': 3, 'drop_path_rate': 0.0, 'with_cp': with_cp}
    model = randomize(SwinBackbone(**options))
    img = torch.randn(1, 3, 20, 28)
    results = []
    for is_gpu in (True, False):
        monkeypatch.setattr(gpu, 'is_gpu', lambda x, is_gpu=is_gpu: is_gpu)
        model.zero_grad()
        with torch.autocast('cpu', BFLOAT16):
            outs = model(img)
        sum(out.float().square().mean() for out in outs).backward()
        results.append([*outs, *(p.grad.clone() for p in model.parameters())])
    assert set(launched) == {'attention', 'norm', 'bias'}
    for kernels, modules in zip(*results, strict=True):
        assert kernels.shape == modules.shape
        assert kernels.is_contiguous()
        assert (kernels.float() - modules.float()).norm() <= 0.05 * modules.float().norm() + 1e-4


@needs_interpreter
def test_hooks_on_norms_are_called(on_a_gpu, monkeypatch):
    monkeypatch.setattr(verdicts, '_reason_against', lambda *args: None)
    model = SwinBackbone(**TINY, window_size=4)
    calls = []
    norms = [model.norm0, model.stages[0].downsample.norm, model.stages[0].blocks[0].norm1]
    for module in norms:
        module.register_forward_hook(lambda module, args, out: calls.append((module, tuple(out.shape))))
    with torch.no_grad(), torch.autocast('cpu', BFLOAT16):
        model(torch.randn(1, 3, 32, 32))
    assert dict(calls) == {norms[0]: (1, 8, 8, 16), norms[1]: (1, 4, 4, 64), norms[2]: (1, 8, 8, 16)}
