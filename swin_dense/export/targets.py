"""What the compilers of other platforms refuse or compute wrongly, checked before a file gets its name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from swin_dense.export.formats import ExportError
from swin_dense.utils import checks


@dataclass(frozen=True)
class Target:
    """What a compiler takes.

    Attributes:
        name: its name in messages.
        suffix: of the files that it reads.
        is_fixed: whether all sizes must be fixed.
        most_axes: largest number of axes of a tensor; None is any.
        wrong: operators that some of its releases compute wrongly, mapped to the argument that avoids them.
    """

    name: str
    suffix: str
    is_fixed: bool = False
    most_axes: int | None = None
    wrong: Mapping[str, tuple[str, Any]] = field(default_factory=dict)


TARGETS = {
    'coreml': Target('Core ML', '.pt2', is_fixed=True, most_axes=5),
    'executorch': Target('ExecuTorch', '.pt2', is_fixed=True),
    'litert': Target('LiteRT', '.pt2', is_fixed=True),
    'tensorrt': Target('TensorRT', '.onnx', wrong={'GridSample': ('grid_sample', False)}),
}


def check_arguments(target: str | None, suffix: str, is_free: bool) -> None:
    """Check that a compiler reads files with a suffix, and with free sizes if there are any.

    Raises:
        ValueError: it does not, or there is no such target.
    """
    if target is None:
        return
    checks.one_of('target', target, TARGETS)
    given, rules = checks.argument('target', target), TARGETS[target]
    if rules.suffix != suffix:
        raise ValueError(f'{given} needs a {rules.suffix} file, got {suffix}')
    if rules.is_fixed and is_free:
        raise ValueError(
            f'{given} needs fixed sizes: export with {checks.argument("dynamic", False)} and a batch of at least 1 '
            f'({checks.argument("batch", 1)})'
        )


def check_file(path: Path, target: str | None) -> None:
    """Check that a file contains only what a compiler takes.

    Raises:
        ExportError: it contains something else.
    """
    if target is None:
        return
    rules = TARGETS[target]
    reasons = _reasons_against_onnx if path.suffix == '.onnx' else _reasons_against_program
    found = list(dict.fromkeys(reasons(path, rules)))
    if found:
        raise ExportError(f'the file is not for {rules.name}, so it was removed: {"; ".join(found)}')


def _reasons_against_onnx(path: Path, rules: Target) -> Iterator[str]:
    import onnx_ir  # a dependency of onnxscript

    for node in onnx_ir.load(path).graph.all_nodes():
        if node.op_type in rules.wrong:
            remedy = checks.argument(*rules.wrong[node.op_type])
            yield f'it contains {node.op_type}, which some releases compute wrongly; whole models omit it with {remedy}'


def _reasons_against_program(path: Path, rules: Target) -> Iterator[str]:
    most = rules.most_axes
    for node in torch.export.load(path).graph.nodes:
        value: Any = node.meta.get('val')
        if most is not None and isinstance(value, torch.Tensor) and value.dim() > most:
            module = list(node.meta.get('nn_module_stack', {'': ('the model', '')}).values())[-1][0]
            yield f'{node.target} of {module} has a tensor of {value.dim()} axes, and at most {most} are allowed'
