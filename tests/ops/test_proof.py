"""The trial before a Triton kernel becomes the default: good kernels pass, sabotaged ones do not, and say why once."""

import logging

import pytest
import torch

from swin_dense.ops import gpu, norm, proof
from swin_dense.ops import triton as attention
from tests.ops.devices import device, needs_interpreter

partial_sums = pytest.importorskip('swin_dense.ops.partial_sums', reason='needs triton')

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
        (16, (12, 12), torch.bfloat16, torch.float32),
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


def no_gradient_of_padding(partials, out, other_partials, other_out, add_up=partial_sums.add_up):
    add_up(partials, out, torch.zeros_like(other_partials), other_out)


@needs_interpreter
@pytest.mark.parametrize(
    ('target', 'name', 'sabotage', 'said'),
    [
        (attention._Launch, '__call__', wrong_scale, 'the output is off by'),
        (attention._Launch, '__call__', wrong_regions, 'the output is off by'),
        (attention._Launch, '__call__', does_not_compile, 'RuntimeError: out of registers'),
        (attention._Launch, '__call__', not_a_number, 'the output is off by nan'),
        (partial_sums, 'add_up', no_gradient_of_padding, 'the gradient of the second parameter is off by'),
    ],
)
def test_a_sabotaged_kernel_is_refused_with_one_warning(target, name, sabotage, said, monkeypatch, caplog):
    attention._launch.cache_clear()
    monkeypatch.setattr(target, name, sabotage)
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
