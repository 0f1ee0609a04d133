"""Load exported files as functions from an image to a list of outputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swin_dense.export.formats import outputs_of, require

Run = Callable[[Tensor], list[Tensor]]


def load(path: Path, device: torch.device | None = None) -> Run:
    """Return a function that runs a file: ``.onnx`` in ONNX Runtime on the CPU, others in torch.

    Args:
        path: the file.
        device: the device for ``.ts`` files; None, and ``.pt2`` files, use the device of the export.
    """
    if path.suffix == '.onnx':
        return onnx_runtime(path)
    module: Any = torch.jit.load(path, device) if path.suffix == '.ts' else torch.export.load(path).module()

    def run(img: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return outputs_of(module(img))

    return run


def onnx_runtime(path: Path, threads: int = 0) -> Run:
    """Return a function that runs an ONNX file in ONNX Runtime on the CPU. 0 threads use the runtime's default."""
    require('onnxruntime')
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
    name = session.get_inputs()[0].name
    return lambda img: [torch.from_numpy(out) for out in session.run(None, {name: img.cpu().numpy()})]


def openvino(path: Path, threads: int = 0) -> Run:
    """Return a function that runs an ONNX file in OpenVINO on the CPU. 0 threads use the runtime's default."""
    require('openvino')
    import openvino

    # By default OpenVINO may choose half precision.
    options: dict[str, Any] = {'INFERENCE_PRECISION_HINT': 'f32'}
    if threads:
        options['INFERENCE_NUM_THREADS'] = threads
    compiled = openvino.Core().compile_model(path, 'CPU', options)
    return lambda img: [torch.from_numpy(out.copy()) for out in compiled([img.numpy()]).values()]
