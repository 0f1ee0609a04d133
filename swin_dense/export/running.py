"""Running exported files: an image in, the list of outputs out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swin_dense.export.formats import outputs_of, require

Run = Callable[[Tensor], list[Tensor]]


def load(path: Path, device: torch.device | None = None) -> Run:
    """Return what runs a file, by its suffix: ONNX in ONNX Runtime, on a CPU; the others in torch, on their device."""
    if path.suffix == '.onnx':
        return onnx_runtime(path)
    module: Any = torch.jit.load(path, device) if path.suffix == '.ts' else torch.export.load(path).module()

    def run(img: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return outputs_of(module(img))

    return run


def onnx_runtime(path: Path, threads: int = 0) -> Run:
    """Return what runs an ONNX file in ONNX Runtime on a CPU; 0 threads are as many as it likes."""
    require('onnxruntime')
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
    name = session.get_inputs()[0].name
    return lambda img: [torch.from_numpy(out) for out in session.run(None, {name: img.cpu().numpy()})]


def openvino(path: Path, threads: int = 0) -> Run:
    """Return what runs an ONNX file in OpenVINO on a CPU; 0 threads are as many as it likes."""
    require('openvino')
    import openvino

    # OpenVINO may compute in half precision where it likes to.
    options: dict[str, Any] = {'INFERENCE_PRECISION_HINT': 'f32'}
    if threads:
        options['INFERENCE_NUM_THREADS'] = threads
    compiled = openvino.Core().compile_model(path, 'CPU', options)
    return lambda img: [torch.from_numpy(out.copy()) for out in compiled([img.numpy()]).values()]
