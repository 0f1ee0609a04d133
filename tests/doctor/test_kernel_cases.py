"""The verification of kernels passes correct ones, fails sabotaged ones, and covers the published models."""

import sys
from unittest import mock

import pytest
import torch

from swin_dense.doctor import kernel_cases
from swin_dense.doctor.kernel_cases import AttentionCase, BiasCase, Map, NormCase
from swin_dense.ops.triton import attention, norm, verdicts
from tests.conftest import ROOT, some
from tests.ops.devices import device, needs_interpreter

sys.path.insert(0, str(ROOT / 'benchmarks'))

import gpu_estimate

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
CPU = torch.device('cpu')
ATTENTION = AttentionCase((3, 3), FLOAT32, FLOAT32, (Map(5, 4, 32, 2),))
NORM = NormCase(FLOAT32, BFLOAT16, FLOAT32, (Map(3, 3, 16, 1),))


@device
@pytest.mark.parametrize(
    'case',
    [
        AttentionCase((7, 7), BFLOAT16, FLOAT32, (Map(13, 12, 64, 2),)),  # under autocast
        AttentionCase((7, 7), FLOAT16, FLOAT16, (Map(13, 12, 32, 1),)),
        AttentionCase((7, 7), FLOAT32, FLOAT32, (Map(13, 12, 32, 2),)),
        AttentionCase((9, 8), BFLOAT16, FLOAT32, (Map(17, 14, 16, 1),)),  # several tiles
        AttentionCase((1, 1), FLOAT32, FLOAT32, (Map(2, 3, 16, 1),)),
        BiasCase((3, 4), FLOAT32, (Map(1, 1, 32, 2),)),
        BiasCase((3, 4), BFLOAT16, (Map(1, 1, 32, 2),)),
        *(
            NormCase(*dtypes, (Map(7, 5, 24, 1), Map(3, 4, 40, 1)))
            for dtypes in ((FLOAT32, BFLOAT16, FLOAT32), (BFLOAT16, FLOAT32, FLOAT32), (FLOAT16,) * 3, (FLOAT32,) * 3)
        ),
    ],
    ids=lambda case: case.name,
)
def test_correct_kernels_pass(case, device):
    assert kernel_cases.disagreement(case, torch.device(device)) is None


def wrong_scale(self, kernel, *tensors, bias, launch=attention._Launch.__call__):
    self._arguments = {**self._arguments, 'scale': 1.01 * self._arguments['scale']}
    launch(self, kernel, *tensors, bias=bias)


def wrong_regions(self, kernel, *tensors, bias, launch=attention._Launch.__call__):
    self._arguments = {**self._arguments, 'PENALTY': 0.0}
    launch(self, kernel, *tensors, bias=bias)


def not_a_number(self, kernel, *tensors, bias):
    for tensor in tensors:
        if tensor.dtype == FLOAT32:
            tensor.fill_(float('nan'))


def no_partial_sums(self, kernel, *tensors, bias, launch=attention._Launch.__call__):
    launch(self, kernel, *tensors, bias=bias)
    if kernel.fn.__name__ == 'backward_keys':
        tensors[-1].zero_()


@needs_interpreter
@pytest.mark.parametrize(
    ('sabotage', 'message'),
    [
        (wrong_scale, 'the output is off by'),
        (wrong_regions, 'the output is off by'),
        (not_a_number, 'the output is off by nan'),
        (no_partial_sums, 'the gradient of the first parameter is off by'),
    ],
)
def test_a_sabotaged_kernel_fails(sabotage, message, monkeypatch):
    attention._launch.cache_clear()
    monkeypatch.setattr(attention._Launch, '__call__', sabotage)
    assert message in kernel_cases.disagreement(ATTENTION, CPU)
    attention._launch.cache_clear()


@needs_interpreter
def test_a_sabotaged_norm_fails(monkeypatch):
    launch = norm._Launch.__call__

    def wrong_eps(self, kernel, grid, *tensors_and_eps, **arguments):
        launch(self, kernel, grid, *tensors_and_eps[:-1], 0.5, **arguments)

    monkeypatch.setattr(norm._Launch, '__call__', wrong_eps)
    assert 'the output is off by' in kernel_cases.disagreement(NORM, CPU)


@needs_interpreter
@pytest.mark.parametrize('case', [ATTENTION, NORM], ids=lambda case: case.name)
def test_times_every_implementation_in_both_modes(case, monkeypatch):
    monkeypatch.setattr(kernel_cases, 'microseconds', lambda function, device: function() is None or 1.0)
    found = kernel_cases.timings(case, CPU)
    names = {'triton', 'sdpa', 'plain'} if case is ATTENTION else {'triton', 'plain'}
    assert {mode: set(times) for mode, times in found.items()} == {'inference': names, 'training': names}


@pytest.mark.parametrize('dtypes', [(FLOAT32, FLOAT32), (FLOAT32, BFLOAT16), (BFLOAT16, BFLOAT16)], ids=str)
@pytest.mark.parametrize('arch', some('tsbl', every=4))
def test_all_kernels_that_the_published_models_use_are_verified(arch, dtypes):
    """Run on the meta device with weights of the first dtype, under autocast to the second one if they differ."""
    weights, low = dtypes
    cases = {case.name: {at.channels for at in case.maps} for case in kernel_cases.all_cases()}
    requested = {}

    def record(name, device, is_training, channels=None):
        requested.setdefault(name, set()).add(channels)

    for window in kernel_cases.WINDOWS:
        model = gpu_estimate.build('ours:auto', arch, (800, 1344), window_size=window).to(weights)
        img = torch.empty(1, 3, 224, 224, device='meta', dtype=weights)
        is_asked = mock.patch.object(verdicts, '_reason_against', record)
        pretended = gpu_estimate.pretend_gpu(FLOAT32 if weights == low else low)
        with pretended, is_asked, torch.no_grad(), gpu_estimate.Autocast(low):
            model(img)
    assert len(requested) >= 5
    for name, channels in requested.items():
        assert name in cases
        assert channels <= {None} | cases[name], name
