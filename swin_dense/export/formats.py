"""One function per file format: trace a model, write the file, and return the number of nodes in its graph."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from swin_dense.export.folding import fold_constants
from swin_dense.export.operators import translations

# The first opset with GELU as one operator.
DEFAULT_OPSET = 20
OLDEST_OPSET = 18
# Above this size torch writes the weights to a second file, because protobuf is limited to 2 GiB.
LARGEST_ONNX = 3 * 2**29
PACKAGES = ('onnx', 'onnxscript')


def write_onnx(model: nn.Module, img: Tensor, free: dict[int, str], opset: int | None, path: Path) -> int:
    """Write an ONNX file. ``free`` maps the dynamic axes of the image (B, C, H, W) to their names."""
    return _save_onnx(_program(model, (img,), (free,)), Interface(('img',), (img,), (free,)), opset, path)


@dataclass(frozen=True)
class Interface:
    """Inputs, outputs and metadata of an ONNX file.

    Attributes:
        inputs: names of the inputs.
        example: a tensor for each input. All inputs but the first are optional, with this tensor as default.
        free: for each input, its dynamic axes mapped to their names.
        outputs: names of the outputs; None gives out0, out1 and so on.
        facts: metadata of the file.
    """

    inputs: tuple[str, ...]
    example: tuple[Tensor, ...]
    free: tuple[dict[int, str], ...]
    outputs: tuple[str, ...] | None = None
    facts: dict[str, str] = field(default_factory=dict)


def write_whole_onnx(model: nn.Module, interface: Interface, opset: int | None, path: Path) -> int:
    """Write an ONNX file of a model with several inputs or with operators of ``swin_dense.export.operators``."""
    require(*PACKAGES)
    program = _program(model, interface.example, interface.free)
    return _save_onnx(program, interface, opset, path, translations())


def _save_onnx(
    program: torch.export.ExportedProgram,
    interface: Interface,
    opset: int | None,
    path: Path,
    operators: dict[Any, Any] | None = None,
) -> int:
    require(*PACKAGES)
    outputs = interface.outputs or [f'out{index}' for index in range(len(program.graph_signature.user_outputs))]
    with _quiet():
        onnx_program = torch.onnx.export(
            program,
            interface.example,
            input_names=list(interface.inputs),
            output_names=list(outputs),
            dynamic_shapes=interface.free if any(interface.free) else None,  # only sets the names
            opset_version=opset or DEFAULT_OPSET,
            custom_translation_table=operators,
            dynamo=True,
            verbose=False,
        )
    assert onnx_program is not None
    model = onnx_program.model
    for value, default in zip(model.graph.inputs[1:], interface.example[1:], strict=True):
        import onnx_ir  # a dependency of onnxscript

        value.const_value = onnx_ir.tensor(default.numpy(), name=value.name)
        model.graph.register_initializer(value)
    model.metadata_props.update(interface.facts)
    constants = model.graph.initializers.values()
    held = sum(value.const_value.nbytes for value in constants if value.const_value is not None)
    if held > LARGEST_ONNX:
        raise ValueError(f'weights of {held:,} bytes do not fit in one .onnx file; write a .pt2, or pass half=True')
    onnx_program.save(path)
    return len(list(model.graph))


def write_pt2(model: nn.Module, img: Tensor, free: dict[int, str], opset: int | None, path: Path) -> int:
    """Write a file of ``torch.export``."""
    program = _program(model, (img,), (free,))
    torch.export.save(program, path)
    return len(program.graph.nodes)


def write_torchscript(model: nn.Module, img: Tensor, free: dict[int, str], opset: int | None, path: Path) -> int:
    """Write a TorchScript file, which returns one tensor or a flat tuple."""
    if len(free) < 3:
        # A TorchScript trace always computes sizes at run time; a torch.export program has fixed sizes as constants.
        model = _program(model, (img,), (free,)).module(check_guards=False)
        model = torch.fx.GraphModule(model, model.graph)
    with _quiet():
        trace = torch.jit.freeze(torch.jit.trace(_Flat(model), img).eval())
        trace.save(str(path))
    return sum(1 for _ in trace.inlined_graph.nodes())


FORMATS = {'.onnx': write_onnx, '.pt2': write_pt2, '.ts': write_torchscript}


def require(*packages: str) -> None:
    """Raise an ImportError that names all packages that are not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(f"the export needs {', '.join(missing)}; install with pip install 'swin-dense[export]'")


def outputs_of(result: Any) -> list[Tensor]:
    """Flatten tensors nested in tuples, lists and dicts into a list, in the order of the outputs of exported files.

    Raises:
        TypeError: the result contains other objects.
    """
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, dict):
        result = list(result.values())
    if not isinstance(result, (tuple, list)):
        raise TypeError(
            f'the model must return tensors, or tuples, lists or dicts of tensors; got {type(result).__name__}'
        )
    return [out for part in result for out in outputs_of(part)]


def _program(
    model: nn.Module, example: tuple[Tensor, ...], free: tuple[dict[int, str], ...]
) -> torch.export.ExportedProgram:
    if TorchVersion(torch.__version__) < '2.7':
        raise ImportError(
            '.onnx and .pt2 files and .ts files for a fixed size need torch 2.7 or later, '
            f'got {torch.__version__}; only .ts files for any size work here'
        )
    from torch.fx.experimental import _config as symbolic_shapes

    sizes = tuple({axis: torch.export.Dim(name, min=1) for axis, name in axes.items()} for axes in free)
    # Without this setting torch specialises the graph on whether each size is 1.
    with _quiet(), symbolic_shapes.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        program = torch.export.export(model, example, dynamic_shapes=sizes)
        if 2 in free[0]:
            return program
        folded = fold_constants(program.module(check_guards=False))
        return torch.export.export(folded, example, dynamic_shapes=sizes)


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
    logger = logging.getLogger('torch.onnx')
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        logger.setLevel(level)
