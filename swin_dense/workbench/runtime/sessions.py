"""The libraries that can execute an ONNX file."""

from __future__ import annotations

import contextlib
import os
import threading
from os import PathLike, fspath
from typing import Any

import numpy as np

from swin_dense.utils import packages

KEY = 'swin_dense'  # key of the JSON metadata in the file
FORMAT = 1  # version of the metadata and outputs; raised when an earlier version of this package would misread a file
OPTIONAL = ('size',)  # inputs with a default value
_HINTS = {'float32': 'f32', 'bfloat16': 'bf16'}  # OpenVINO's names of precisions
# OpenVINO keeps its preparations for each size of each layer, 5000 entries by default, so that memory rises over
# hundreds of image sizes. With this many, two sizes that alternate are still as fast.
_OPENVINO_CACHE = {'CPU_RUNTIME_CACHE_CAPACITY': 250}


class ForkedProcessError(RuntimeError):
    """OpenVINO was used before this process was forked, in which its threads do not exist."""


class OnnxRuntime:
    """A session of ONNX Runtime on the CPU, in the precision of the file; 0 threads means its default.

    ``facts`` are the metadata of the file as JSON, if it has some, ``inputs`` the names of its inputs, and ``size`` the
    (height, width) that it takes, None for any.
    """

    def __init__(self, path: str | PathLike[str], threads: int, precision: str = 'float32') -> None:
        onnxruntime = packages.optional('the runtime', 'onnxruntime')
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # hides warnings about optional inputs
        # On x86 processors without VNNI, sums of 8-bit products overflow by default, and quantised files are wrong.
        options.add_session_config_entry('session.x64quantprecision', '1')
        self._session = onnxruntime.InferenceSession(fspath(path), options, providers=['CPUExecutionProvider'])
        self.facts: str | None = self._session.get_modelmeta().custom_metadata_map.get(KEY)
        inputs = [*self._session.get_inputs(), *self._session.get_overridable_initializers()]
        self.inputs = [node.name for node in inputs]
        self.size = tuple(side if isinstance(side, int) else None for side in inputs[0].shape[-2:])

    def run(self, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Return the outputs for the inputs, in the order of the file."""
        return self._session.run(None, feed)


class OpenVino:
    """A session of OpenVINO on the CPU, with the same methods."""

    def __init__(self, path: str | PathLike[str], threads: int, precision: str = 'float32') -> None:
        openvino = packages.optional('the runtime', 'openvino')
        core = _openvino_core()
        model = core.read_model(fspath(path))
        key = ['framework', KEY]
        self.facts: str | None = None
        if model.has_rt_info(key):
            self.facts = model.get_rt_info(key).value
        sides = list(model.input(0).partial_shape)[-2:]
        self.size = tuple(side.get_length() if side.is_static else None for side in sides)
        self._defaults = _restore_optional_inputs(openvino, model)
        self.inputs = [name for node in model.inputs for name in node.names]
        # By default OpenVINO chooses the precision by the processor.
        options: dict[str, Any] = {'INFERENCE_PRECISION_HINT': _HINTS[precision]}
        if threads:
            options['INFERENCE_NUM_THREADS'] = threads
        self._compiled = core.compile_model(model, 'CPU', options)
        # Calling the compiled model would use one request for all threads, and write into the inputs of other calls.
        self._idle_requests: list[Any] = []

    def run(self, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Return the outputs for the inputs, in the order of the file."""
        _check_not_forked()
        try:
            request = self._idle_requests.pop()  # atomic, as append is
        except IndexError:
            request = self._compiled.create_infer_request()
        outputs = request.infer({**self._defaults, **feed}, share_inputs=False, share_outputs=False)
        self._idle_requests.append(request)
        return list(outputs.values())


_cores: dict[int, Any] = {}  # the only core of OpenVINO, by the id of its process
_cores_lock = threading.Lock()


def _check_not_forked() -> None:
    """Raise ForkedProcessError in a process without the threads of its core, which would wait for them for ever."""
    if _cores and os.getpid() not in _cores:
        raise ForkedProcessError(
            'OpenVINO was used before this process was forked, and its threads exist only in the parent process; load '
            "models only in the child process, or start it with multiprocessing.get_context('spawn')"
        )


def _openvino_core() -> Any:
    """Return the core of this process, which has only one.

    Each core gives its thread a stack for signals, and frees it at its end. Where two cores end in the order in which
    they began, the stack of the first remains in use, and the next signal, such as Ctrl-C, ends the process.
    """
    _check_not_forked()
    with _cores_lock:
        if not _cores:
            core = packages.optional('the runtime', 'openvino').Core()
            core.get_property('CPU', 'FULL_DEVICE_NAME')  # loads the plugin, without which any property is accepted
            with contextlib.suppress(RuntimeError):  # the property is not documented, and a version may lack it
                core.set_property('CPU', _OPENVINO_CACHE)
            _cores[os.getpid()] = core
    return _cores[os.getpid()]


def _restore_optional_inputs(openvino: Any, model: Any) -> dict[str, np.ndarray]:
    """Turn optional inputs, which OpenVINO reads as constants, back into inputs; return their default values."""
    defaults = {}
    for constant in model.get_ops():
        name = constant.get_friendly_name()
        if constant.get_type_name() == 'Constant' and name in OPTIONAL:
            output = constant.output(0)
            defaults[name] = constant.data.copy()
            parameter = openvino.opset13.parameter(output.get_shape(), output.get_element_type(), name)
            for target in output.get_target_inputs():
                target.replace_source_output(parameter.output(0))
            parameter.output(0).set_names({name})
            model.add_parameters([parameter])
    model.validate_nodes_and_infer_types()
    return defaults


def check_precision(runtime: str, precision: str) -> None:
    """Raise ValueError unless a library computes in a precision on this processor."""
    if precision == 'float32':
        return
    if runtime != 'openvino':
        raise ValueError(
            f"precision={precision!r} needs runtime='openvino', got {runtime!r}, which computes in the precision "
            'that the file is written in'
        )
    if not has_bfloat16():
        raise ValueError(
            f'precision={precision!r} is not possible here: OpenVINO does not compute in bfloat16 on this processor; '
            'leave it out for float32'
        )


def has_bfloat16() -> bool:
    """Return whether this processor computes in bfloat16, according to OpenVINO; on others, it ignores the request."""
    return 'BF16' in _openvino_core().get_property('CPU', 'OPTIMIZATION_CAPABILITIES')


SESSIONS: dict[str, type[OnnxRuntime | OpenVino]] = {'onnxruntime': OnnxRuntime, 'openvino': OpenVino}
