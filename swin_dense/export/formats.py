"""One function per file format: trace a model, write the file, and return the number of nodes in its graph.

The files do not contain where the traced code lies on this machine, which torch records with each operation.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from swin_dense.export.folding import fold_constants
from swin_dense.utils import packages, private

_logger = logging.getLogger(__package__)
# The first opset with GELU as one operator.
DEFAULT_OPSET = 20
OLDEST_OPSET = 18
# Above this size torch writes the weights to a second file, because protobuf is limited to 2 GiB.
LARGEST_ONNX = 3 * 2**29
PACKAGES = ('onnx', 'onnxscript')


class ExportError(RuntimeError):
    """The model cannot be traced or converted, or the outputs of the exported file differ from those of the model."""


@dataclass(frozen=True)
class Interface:
    """Inputs, outputs and metadata of a file. Names and metadata are only for ONNX."""

    # For each input, a tensor. In ONNX, all inputs but the first are optional, with this tensor as default.
    example: tuple[Tensor, ...]
    free: tuple[dict[int, str], ...]  # for each input, its dynamic axes mapped to their names
    inputs: tuple[str, ...] = ('img',)  # names
    outputs: tuple[str, ...] | None = None  # names; None gives out0, out1 and so on
    facts: dict[str, str] = field(default_factory=dict)  # metadata of the file
    # ``torch.export.Dim`` of dynamic axes with a minimum above 1 or a divisor, by their names.
    ranges: dict[str, Any] = field(default_factory=dict)
    # Returns the ONNX translations of custom operators, for ``torch.onnx.export``.
    translations: Callable[[], dict[Any, Callable[..., Any]]] = dict


def write_onnx(model: nn.Module, interface: Interface, opset: int | None, path: Path) -> int:
    """Write an ONNX file."""
    packages.require('an .onnx file', *PACKAGES)
    program = _program(model, interface)
    outputs = interface.outputs or [f'out{index}' for index in range(len(program.graph_signature.user_outputs))]
    opset = opset or DEFAULT_OPSET
    _logger.info('converting the graph to ONNX ...')
    try:
        with _quiet():
            onnx_program = torch.onnx.export(
                program,
                interface.example,
                input_names=list(interface.inputs),
                output_names=list(outputs),
                dynamic_shapes=interface.free if any(interface.free) else None,  # only sets the names
                opset_version=opset,
                custom_translation_table=interface.translations(),
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # onnxscript raises exceptions of any type
        raise ExportError(f'the graph could not be converted to ONNX: {type(error).__name__}: {error}') from error
    assert onnx_program is not None
    onnx_model = onnx_program.model
    if onnx_model.opset_imports[''] != opset:  # onnxscript only logs that it cannot convert
        raise ExportError(
            f'onnxscript cannot write opset={opset} for this model, only {onnx_model.opset_imports[""]}; omit it for '
            f'{DEFAULT_OPSET}, or choose one near that'
        )
    graph = onnx_model.graph
    for value, default in zip(graph.inputs[1:], interface.example[1:], strict=True):
        import onnx_ir  # a dependency of onnxscript

        value.const_value = onnx_ir.tensor(default.numpy(), name=value.name)
        graph.register_initializer(value)
    for node in graph.all_nodes():
        node.metadata_props.pop('pkg.torch.onnx.stack_trace', None)
    onnx_model.metadata_props.update(interface.facts)
    held = 0
    for value in graph.initializers.values():
        assert value.const_value is not None
        held += value.const_value.nbytes
        if not value.is_graph_input():
            # A tool that transposes a weight, such as `quantize_dynamic`, would leave a wrong second shape of it here.
            value.shape = value.type = None
    if held > LARGEST_ONNX:
        raise ValueError(f'weights of {held:,} bytes do not fit in one .onnx file; write a .pt2, or pass half=True')
    onnx_program.save(path)
    return len(list(graph))


def write_pt2(model: nn.Module, interface: Interface, opset: int | None, path: Path) -> int:
    """Write a file of ``torch.export``."""
    program = _program(model, interface)
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    for graph in graphs:
        for node in graph.nodes:
            node.meta.pop('stack_trace', None)
    torch.export.save(program, path)
    return len(program.graph.nodes)


def write_torchscript(model: nn.Module, interface: Interface, opset: int | None, path: Path) -> int:
    """Write a TorchScript file, which returns one tensor or a flat tuple."""
    if len(interface.free[0]) < 3:
        # A TorchScript trace always computes sizes at run time; a torch.export program has fixed sizes as constants.
        model = _program(model, interface).module(check_guards=False)
        model = torch.fx.GraphModule(model, model.graph)
    with _quiet():
        trace = torch.jit.freeze(torch.jit.trace(_Flat(model), interface.example).eval())
        _save_without_sources(trace, path)
    return sum(1 for _ in trace.inlined_graph.nodes())


def _save_without_sources(trace: torch.jit.ScriptModule, path: Path) -> None:
    """Save a trace without its records of Python files and lines, which torch would only show in error messages."""
    with zipfile.ZipFile(io.BytesIO(trace.save_to_buffer())) as records, zipfile.ZipFile(path, 'w') as archive:
        for record in records.infolist():
            if not record.filename.endswith('.debug_pkl'):
                archive.writestr(record, records.read(record))


FORMATS = {'.onnx': write_onnx, '.pt2': write_pt2, '.ts': write_torchscript}


def outputs_of(result: Any) -> list[Tensor]:
    """Flatten tensors nested in tuples, lists and dicts into a list, in the order of the outputs of exported files."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        result = list(result.values())
    if not isinstance(result, (tuple, list)):
        raise TypeError(
            f'the model must return tensors, or tuples, lists or dicts of tensors; got {type(result).__name__}'
        )
    return [out for part in result for out in outputs_of(part)]


def _program(model: nn.Module, interface: Interface) -> torch.export.ExportedProgram:
    has_free_sides = any(axes.keys() - {0} for axes in interface.free)  # the first axis is the batch
    needed = '2.10' if has_free_sides else '2.9'
    if TorchVersion(torch.__version__) < needed:
        raise ImportError(
            '.onnx and .pt2 files for any size need torch 2.10 or later, and files for one size 2.9, got '
            f'{torch.__version__}; .ts files for any size work here'
        )
    ranges = {name: torch.export.Dim(name, min=1) for axes in interface.free for name in axes.values()}
    ranges.update(interface.ranges)
    sizes = tuple({axis: ranges[name] for axis, name in axes.items()} for axes in interface.free)
    with _quiet(), private.backed_size_oblivious():
        program = torch.export.export(model, interface.example, dynamic_shapes=sizes)
        if 2 in interface.free[0]:
            return program
        folded = fold_constants(program.module(check_guards=False))
        return torch.export.export(folded, interface.example, dynamic_shapes=sizes)


class _Flat(nn.Module):
    """Wrap a module to return a tensor or a flat tuple, as TorchScript requires."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, img: Tensor) -> Tensor | tuple[Tensor, ...]:
        result = self.model(img)
        return result if isinstance(result, Tensor) else tuple(outputs_of(result))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress torch's warnings to developers of exporters. Wrong files are detected by comparing outputs."""
    loggers = [logging.getLogger(name) for name in ('torch.onnx', 'onnxscript')]
    levels = {logger: logger.level for logger in loggers}
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
