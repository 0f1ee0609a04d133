"""What the compilers of other platforms refuse or compute wrongly, checked before a file gets its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from swin_dense.export.formats import ExportError
from swin_dense.utils import checks

# What the compilers are called in messages, and the suffix of the files that they read.
TARGETS = {
    'coreml': ('Core ML', '.pt2'),
    'executorch': ('ExecuTorch', '.pt2'),
    'litert': ('LiteRT', '.pt2'),
    'tensorrt': ('TensorRT', '.onnx'),
}
_MOST_AXES = 5  # of a tensor in Core ML


def check_arguments(target: str | None, suffix: str, is_free: bool) -> None:
    """Check that a compiler reads files with a suffix, and with free sizes if there are any.

    Raises:
        ValueError: it does not, or there is no such target.
    """
    if target is None:
        return
    checks.one_of('target', target, TARGETS)
    given, (_, needed) = checks.argument('target', target), TARGETS[target]
    if needed != suffix:
        raise ValueError(f'{given} needs a {needed} file, got {suffix}')
    if suffix == '.pt2' and is_free:
        raise ValueError(
            f'{given} needs fixed sizes: export with {checks.argument("dynamic", False)} and a batch of at least 1 '
            f'({checks.argument("batch", 1)})'
        )


def check_file(path: Path, target: str | None) -> None:
    """Check that a file contains only what a compiler takes.

    Raises:
        ExportError: it contains something else.
    """
    reasons = {'tensorrt': _wrong_in_tensorrt, 'coreml': _too_many_axes}.get(target or '')
    if reasons is None:
        return
    found = list(dict.fromkeys(reasons(path)))
    if found:
        raise ExportError(f'the file is not for {TARGETS[str(target)][0]}, so it was removed: {"; ".join(found)}')


def _wrong_in_tensorrt(path: Path) -> Iterator[str]:
    import onnx_ir  # a dependency of onnxscript

    if any(node.op_type == 'GridSample' for node in onnx_ir.load(path).graph.all_nodes()):
        remedy = checks.argument('grid_sample', False)
        yield f'it contains GridSample, which some releases compute wrongly; whole models omit it with {remedy}'


def _too_many_axes(path: Path) -> Iterator[str]:
    for node in torch.export.load(path).graph.nodes:
        value: Any = node.meta.get('val')
        if isinstance(value, torch.Tensor) and value.dim() > _MOST_AXES:
            module = list(node.meta.get('nn_module_stack', {'': ('the model', '')}).values())[-1][0]
            axes = f'{value.dim()} axes, and at most {_MOST_AXES} are allowed'
            yield f'{node.target} of {module} has a tensor of {axes}'
