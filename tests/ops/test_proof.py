"""The trial before a Triton kernel becomes the default: good kernels pass, sabotaged ones do not, and say why once."""

import logging

import pytest
import torch

from swin_dense import SwinBackbone, ops
from swin_dense.ops import gpu, norm, proof
from swin_dense.ops import triton as attention
from tests.conftest import TINY, randomize
from tests.ops.devices import device, needs_interpreter

ATTENTION = (16, (7, 7), torch.float32, torch.float32)
NORM = ('tokens', 32, torch.float32, torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(proof, '_verdicts', {})


@device
@pytest.mark.parametrize(
    ('head_dim', 'window', 'dtype', 'bias_dtype'),
    [
        ATTENTION,
        (32, (7, 7), torch.bfloat16, torch.float32),  # under autocast
        (32, (7, 7), torch.float16, torch.float16),
        (16, (9, 8), torch.bfloat16, torch.float32),  # several tiles
        (16, (1, 1), torch.float32, torch.float32),
        (16, (3, 8), torch.float32, torch.float32),
    ],
)
def test_the_kernel_of_attention_passes(head_dim, window, dtype, bias_dtype, device, caplog):
    with caplog.at_level(logging.INFO, logger='swin_dense.ops.proof'):
        for _ in range(2):
            reason = proof.reason_against_attention(head_dim, window, dtype, bias_dtype, torch.device(device))
            assert reason is None
    assert [record.levelname for record in caplog.records] == ['INFO']
    assert f'head dimension {head_dim}, window {window[0]} x {window[1]}' in caplog.text


@device
@pytest.mark.parametrize('layout', norm.LAYOUTS)
@pytest.mark.parametrize(
    'dtypes',
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.float32),
        (torch.float16, torch.float16, torch.float16),
    ],
)
def test_the_kernels_of_layer_norm_pass(layout, dtypes, device):
    assert proof.reason_against_norm(layout, 24, *dtypes, torch.device(device)) is None


@device
def test_the_kernels_of_the_bias_pass(device):
    assert proof.reason_against_bias((7, 7), torch.float32, torch.device(device)) is None


def wrong_scale(self, kernel, *tensors, bias, launch=attention._Launch.__call__):
    self._arguments = {**self._arguments, 'scale': 1.01 * self._arguments['scale']}
    launch(self, kernel, *tensors, bias=bias)


def wrong_regions(self, kernel, *tensors, bias, launch=attention._Launch.__call__):
    self._arguments = {**self._arguments, 'PENALTY': 0.0}
    launch(self, kernel, *tensors, bias=bias)


def does_not_compile(self, kernel, *tensors, bias):
    raise RuntimeError('out of registers\nand a long dump')


def not_a_number(self, kernel, *tensors, bias):
    for tensor in tensors:
        if tensor.dtype == torch.float32:
            tensor.fill_(float('nan'))


def no_gradients(partials, out, other_partials, other_out):
    out.zero_()
    other_out.zero_()


@needs_interpreter
@pytest.mark.parametrize(
    ('target', 'sabotage', 'said'),
    [
        ('swin_dense.ops.triton._Launch.__call__', wrong_scale, 'the output is off by'),
        ('swin_dense.ops.triton._Launch.__call__', wrong_regions, 'the output is off by'),
        ('swin_dense.ops.triton._Launch.__call__', does_not_compile, 'RuntimeError: out of registers'),
        ('swin_dense.ops.triton._Launch.__call__', not_a_number, 'the output is off by nan'),
        ('swin_dense.ops.partial_sums.add_up', no_gradients, 'the gradient of the first parameter is off by'),
    ],
)
def test_a_sabotaged_kernel_is_refused_with_one_warning(target, sabotage, said, monkeypatch, caplog):
    attention._launch.cache_clear()
    monkeypatch.setattr(target, sabotage)
    for _ in range(2):
        assert said in proof.reason_against_attention(*ATTENTION, torch.device('cpu'))
    attention._launch.cache_clear()
    assert [record.levelname for record in caplog.records] == ['WARNING']
    assert said in caplog.text
    assert 'long dump' not in caplog.text


@needs_interpreter
def test_a_sabotaged_norm_is_refused(monkeypatch, caplog):
    launch = norm._Launch.__call__

    def wrong_eps(self, kernel, grid, *tensors_and_eps, **arguments):
        launch(self, kernel, grid, *tensors_and_eps[:-1], 0.5, **arguments)

    monkeypatch.setattr(norm._Launch, '__call__', wrong_eps)
    assert 'the output is off by' in proof.reason_against_norm(*NORM, torch.device('cpu'))
    assert [record.levelname for record in caplog.records] == ['WARNING']


@needs_interpreter
@pytest.mark.parametrize('mode', [torch.inference_mode, torch.no_grad, lambda: torch.autocast('cpu', torch.bfloat16)])
def test_the_callers_modes_do_not_disturb_the_trial(mode):
    with mode():
        assert proof.reason_against_norm(*NORM, torch.device('cpu')) is None
        assert proof.reason_against_attention(*ATTENTION, torch.device('cpu')) is None


@needs_interpreter
def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(gpu, 'is_capturing', lambda device: True)
        assert 'CUDA graph' in proof.reason_against_norm(*NORM, torch.device('cpu'))
    assert not caplog.records
    assert proof.reason_against_norm(*NORM, torch.device('cpu')) is None
    monkeypatch.setattr(gpu, 'is_capturing', lambda device: True)
    assert proof.reason_against_norm(*NORM, torch.device('cpu')) is None


@needs_interpreter
def test_the_trial_is_no_part_of_a_compiled_graph():
    def function(x):
        return x + 1 if proof.reason_against_attention(*ATTENTION, x.device) is None else x - 1

    compiled = torch.compile(function, backend='aot_eager', fullgraph=True)
    assert torch.equal(compiled(torch.zeros(3)), torch.ones(3))


@pytest.fixture
def on_a_gpu(monkeypatch):
    """Let triton's interpreter pass for a GPU, with autocast in bfloat16 on it."""
    monkeypatch.setattr(gpu, 'is_gpu', lambda x: True)
    monkeypatch.setattr(gpu, 'autocast_dtype', lambda x: torch.bfloat16 if torch.is_autocast_enabled('cpu') else None)
    ops._log_once.cache_clear()


def attend(backend='auto', dropout_p=0.0):
    qkv, table, pad_kv = torch.randn(1, 8, 9, 48), torch.randn(49, 1), torch.randn(32)
    bias = ops.relative_position_bias(table, (4, 4), backend)
    return ops.window_attention(qkv, bias, pad_kv, 1, (4, 4), (2, 2), dropout_p=dropout_p, backend=backend)


@needs_interpreter
def test_automatic_choice_takes_a_kernel_that_passed(on_a_gpu, caplog):
    with caplog.at_level(logging.INFO, logger='swin_dense.ops'):
        attend()
        attend()
    assert len(proof._verdicts) == 2
    assert caplog.text.count('agrees with torch') == 2
    assert caplog.text.count("uses backend 'triton'") == 1


@needs_interpreter
def test_automatic_choice_leaves_a_kernel_that_failed(on_a_gpu, monkeypatch, caplog):
    attention._launch.cache_clear()
    monkeypatch.setattr('swin_dense.ops.triton._Launch.__call__', does_not_compile)
    with caplog.at_level(logging.INFO, logger='swin_dense.ops'):
        attend()
        attend()
    assert [r.levelname for r in caplog.records].count('WARNING') == 1
    assert "uses backend 'sdpa' (triton: it failed with RuntimeError: out of registers)" in caplog.text


@needs_interpreter
@pytest.mark.parametrize('backend', ['sdpa', 'triton'])
def test_who_asks_for_a_backend_gets_it_without_a_trial(on_a_gpu, backend):
    attend(backend)
    assert not proof._verdicts


@needs_interpreter
def test_dropout_of_weights_needs_no_trial(on_a_gpu):
    attend(dropout_p=0.5)
    assert len(proof._verdicts) == 1  # of the bias


@needs_interpreter
def test_automatic_choice_compiles_without_a_break(on_a_gpu):
    torch._dynamo.reset()
    qkv, bias, pad_kv = torch.randn(1, 8, 9, 48), torch.randn(1, 16, 16), torch.randn(32)

    def function(qkv):
        return ops.window_attention(qkv, bias, pad_kv, 1, (4, 4), (2, 2))

    compiled = torch.compile(function, backend='aot_eager', fullgraph=True)
    assert torch.equal(compiled(qkv), function(qkv))
    assert len(proof._verdicts) == 1


@needs_interpreter
@pytest.mark.parametrize('with_cp', [False, True])
def test_a_backbone_by_kernels_is_the_backbone(on_a_gpu, monkeypatch, with_cp):
    """Under autocast, forward and backward, with norms, merging, bias and maps by kernels, and an odd size."""
    options = {**TINY, 'window_size': 4, 'drop_path_rate': 0.0, 'with_cp': with_cp}
    model = randomize(SwinBackbone(**options))
    img = torch.randn(1, 3, 36, 28)
    results = []
    for is_gpu in (True, False):
        monkeypatch.setattr(gpu, 'is_gpu', lambda x, is_gpu=is_gpu: is_gpu)
        model.zero_grad()
        with torch.autocast('cpu', torch.bfloat16):
            outs = model(img)
        sum(out.float().square().mean() for out in outs).backward()
        results.append([*outs, *(p.grad.clone() for p in model.parameters())])
    assert any('LayerNorm, 64 channels into merged' in what for what, _ in proof._verdicts)
    assert any('LayerNorm, 16 channels into maps' in what for what, _ in proof._verdicts)
    assert any('of window attention' in what for what, _ in proof._verdicts)
    for kernels, modules in zip(*results, strict=True):
        assert kernels.shape == modules.shape
        assert kernels.is_contiguous()
        assert (kernels.float() - modules.float()).norm() <= 0.05 * modules.float().norm() + 1e-4


@needs_interpreter
def test_whoever_listens_to_a_norm_hears_it(on_a_gpu):
    model = SwinBackbone(**TINY, window_size=4)
    calls = []
    norms = [model.norm0, model.layers[0].downsample.norm, model.layers[0].blocks[0].norm1]
    for norm_ in norms:
        norm_.register_forward_hook(lambda module, args, out: calls.append((module, tuple(out.shape))))
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        model(torch.randn(1, 3, 32, 32))
    assert dict(calls) == {norms[0]: (1, 8, 8, 16), norms[1]: (1, 4, 4, 64), norms[2]: (1, 8, 8, 16)}
