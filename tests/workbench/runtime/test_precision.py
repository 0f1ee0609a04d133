"""The precision in which OpenVINO computes a file, and where it is refused."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from swin_dense import runtime
from swin_dense.commands._main import main
from swin_dense.workbench.runtime import sessions
from tests.commands.files import SEGMENTOR, write_file, write_model

WEIGHT = np.random.default_rng(0).normal(size=(16, 3, 5, 5)).astype(np.float32)
# OpenVINO asks the processor, but its convolutions obey this limit.
LIMIT = os.environ.get('ONEDNN_MAX_CPU_ISA', '')
needs_bfloat16 = pytest.mark.skipif(
    LIMIT.startswith('AVX2') or not sessions.has_bfloat16(), reason='this processor does not compute in bfloat16'
)


@pytest.fixture
def file(tmp_path):
    """Return a file of one convolution, whose output tells the precision."""
    graph = """conv (float[B, 3, H, W] img) => (float[B, 16, h, w] out) {
        out = Conv (img, weight)
    }"""
    return write_model(tmp_path / 'conv.onnx', graph, {**SEGMENTOR, 'task': 'detection'}, {'weight': WEIGHT})


def error_of(loaded):
    """Return the largest error of a loaded file against float64, relative to the largest value."""
    img = torch.randn(1, 3, 40, 50)
    expected = torch.nn.functional.conv2d(img.double(), torch.from_numpy(WEIGHT).double())
    (out,) = loaded.run(img.numpy())
    return (torch.from_numpy(out) - expected).abs().max() / expected.abs().max()


@pytest.mark.parametrize('name', ['onnxruntime', 'openvino'])
@pytest.mark.parametrize('options', [{}, {'precision': 'float32'}])
def test_float32_is_the_default_of_both_libraries(file, name, options):
    assert error_of(runtime.load(file, runtime=name, **options)) < 1e-6


@needs_bfloat16
def test_bfloat16_rounds_to_eight_bits(file):
    assert 1e-4 < error_of(runtime.load(file, runtime='openvino', precision='bfloat16')) < 2e-2


def test_what_cannot_compute_in_a_precision_is_refused(file, monkeypatch):
    with pytest.raises(ValueError, match=r"precision='bfloat16' needs runtime='openvino', got 'onnxruntime'"):
        runtime.load(file, precision='bfloat16')
    with pytest.raises(ValueError, match=r"precision must be one of .*'float16'"):
        runtime.load(file, runtime='openvino', precision='float16')
    # OpenVINO itself raises no error.
    monkeypatch.setattr(sessions, 'has_bfloat16', lambda: False)
    with pytest.raises(ValueError, match='does not compute in bfloat16 on this processor; leave it out for float32'):
        runtime.load(file, runtime='openvino', precision='bfloat16')
    assert error_of(runtime.load(file, runtime='openvino')) < 1e-6


def test_the_command_passes_the_precision_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_file('model.onnx')
    Image.new('RGB', (9, 9)).save('a.png')
    given, load = {}, runtime.load

    def in_float32(path, **options):
        given.update(options)
        return load(path, **{**options, 'precision': 'float32'})

    monkeypatch.setattr(runtime, 'load', in_float32)
    command = 'predict model.onnx a.png --runtime openvino --precision bfloat16'
    assert main(command.split()) == 0
    assert (given['runtime'], given['precision']) == ('openvino', 'bfloat16')
