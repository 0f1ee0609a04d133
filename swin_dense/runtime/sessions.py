"""The libraries that execute a file."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from os import PathLike, fspath
from typing import Any, Protocol

import numpy as np

KEY = 'swin_dense'  # of what the file says of itself, as JSON
OPTIONAL = ('size',)  # inputs that may be left out


class Session(Protocol):
    """A file in a library.

    Attributes:
        facts: what the file says of itself, None if it has nothing to say.
    """

    facts: str | None

    def run(self, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Return the outputs for the inputs, in the order of the file."""


class OnnxRuntime:
    """A file in ONNX Runtime, on a CPU; 0 threads are as many as it likes."""

    def __init__(self, path: str | PathLike[str], threads: int) -> None:
        onnxruntime = _library('onnxruntime')
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # it warns of inputs that may be left out
        self._session = onnxruntime.InferenceSession(fspath(path), options, providers=['CPUExecutionProvider'])
        self.facts = self._session.get_modelmeta().custom_metadata_map.get(KEY)

    def run(self, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Return the outputs for the inputs, in the order of the file."""
        return self._session.run(None, feed)


class OpenVino:
    """A file in OpenVINO, on a CPU, in float32; 0 threads are as many as it likes."""

    def __init__(self, path: str | PathLike[str], threads: int) -> None:
        openvino = _library('openvino')
        core = openvino.Core()
        model = core.read_model(fspath(path))
        where = ['framework', KEY]
        self.facts = model.get_rt_info(where).value if model.has_rt_info(where) else None
        self._defaults = _open_inputs(openvino, model)
        # OpenVINO may compute in half precision where it likes to.
        options: dict[str, Any] = {'INFERENCE_PRECISION_HINT': 'f32'}
        if threads:
            options['INFERENCE_NUM_THREADS'] = threads
        self._compiled = core.compile_model(model, 'CPU', options)

    def run(self, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Return the outputs for the inputs, in the order of the file."""
        return [out.copy() for out in self._compiled({**self._defaults, **feed}).values()]


def _open_inputs(openvino: Any, model: Any) -> dict[str, np.ndarray]:
    """Make inputs of those that may be left out, which OpenVINO takes for constants; return their values."""
    defaults = {}
    for constant in model.get_ops():
        if constant.get_type_name() == 'Constant' and constant.get_friendly_name() in OPTIONAL:
            name, output = constant.get_friendly_name(), constant.output(0)
            defaults[name] = constant.data.copy()
            parameter = openvino.opset13.parameter(output.get_shape(), output.get_element_type(), name)
            for target in output.get_target_inputs():
                target.replace_source_output(parameter.output(0))
            parameter.output(0).set_names({name})
            model.add_parameters([parameter])
    model.validate_nodes_and_infer_types()
    return defaults


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f'{name} is not installed: pip install {name}', name=name) from error


SESSIONS: dict[str, Callable[[str | PathLike[str], int], Session]] = {'onnxruntime': OnnxRuntime, 'openvino': OpenVino}
