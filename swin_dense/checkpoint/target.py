"""The parameters that a model expects from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from swin_dense.checkpoint.names import MMDET, plain_name
from swin_dense.ops.windows import Pair

Shape = tuple[int, ...]
STAGE = re.compile(r'stages\.(\d+)\.')
OUT_NORM = re.compile(r'norm(\d+)\.(weight|bias)')
HEAD = ('head.weight', 'head.bias')
# Wrappers of PyTorch whose own load hooks remove this component from parameter names.
_SELF_RENAMING = re.compile(r'(?:_fsdp_wrapped_module|_checkpoint_wrapped_module)\.')


@dataclass(frozen=True)
class Target:
    """The parameters and persistent buffers of a backbone, or of a classifier.

    Attributes:
        names: maps our names to names in the module, which wrappers of submodules may extend.
        shapes: maps our names to shapes, or to None if the parameter is sharded and its full shape is unknown.
        added: our names of parameters that no Swin has, such as those of an adapter.
        window: window of the backbone in tokens.
        grid: (H, W) of the absolute position embedding.
        stages: number of stages of the model.
        version: the version of Swin, 1 or 2.
        trained_windows: per stage, the pretraining window to which V2's position networks scale their coordinates.
        clamps: whether windows shrink to small maps.
        is_classifier: whether the model has a classification head.
        complete: whether the module lists all its parameters. FSDP may hide those of submodules in flat parameters.
    """

    names: Mapping[str, str]
    shapes: Mapping[str, Shape | None]
    added: frozenset[str]
    window: Pair
    grid: Pair
    stages: int
    complete: bool
    version: int
    trained_windows: tuple[Pair, ...]
    clamps: bool
    is_classifier: bool

    @classmethod
    def of(cls, model: nn.Module) -> Target:
        """Describe a SwinBackbone or a SwinClassifier.

        Raises:
            TypeError: ``model`` is neither.
        """
        is_classifier = getattr(model, 'is_swin_classifier', False) is True
        backbone: Any = model.backbone if is_classifier else model
        window, grid = (getattr(backbone, name, None) for name in ('window_size', 'position_grid'))
        if not hasattr(backbone, 'patch_embed') or not isinstance(window, tuple) or not isinstance(grid, tuple):
            inside = '; pass its .backbone' if hasattr(model, 'backbone') else ''
            raise TypeError(f'backbone must be a SwinBackbone, got {type(model).__name__}{inside}')
        names: dict[str, str] = {}
        shapes: dict[str, Shape | None] = {}
        complete = True
        for name, tensor in state_of(model):
            if name.endswith('_flat_param'):
                complete = False
                continue
            plain = plain_name(name)
            plain = plain.removeprefix('backbone.') if is_classifier else plain
            sharded = '_fsdp_wrapped_module.' in name or tensor.numel() == 0
            names[plain] = _SELF_RENAMING.sub('', name)
            shapes[plain] = None if sharded else tuple(tensor.shape)
        trained = getattr(backbone, 'pretrained_window_size', None)
        return cls(
            names,
            shapes,
            frozenset(name for name in names if not (is_standard(name) or (is_classifier and name in HEAD))),
            window,
            grid,
            len(backbone.stages),
            complete,
            version=1 if trained is None else 2,
            trained_windows=tuple((side, side) if side else window for side in trained or ()),
            clamps=getattr(backbone, 'clamp_window', False) is True,
            is_classifier=is_classifier,
        )

    def extended_by(self, given: Mapping[str, Tensor]) -> Target:
        """Return the target with the ``given`` parameters added that a wrapper in the module renames or hides."""
        absent = {name for name in given if name not in self.names and is_standard(name)}
        if self.complete:
            renamed = {name: own for name in absent if (own := self._wrapped(name, tuple(given[name].shape)))}
        else:  # FSDP loads the parameters that it hides by their usual names
            absent -= {name for name in absent if name.startswith(f'stages.{self.stages - 1}.downsample.')}
            hidden = {name for name in absent if (match := STAGE.match(name)) and int(match[1]) < self.stages}
            return replace(
                self,
                names={**{name: name for name in hidden}, **self.names},
                shapes={**dict.fromkeys(hidden), **self.shapes},
            )
        ours = {own: name for name, own in renamed.items()}
        return replace(
            self,
            names={ours.get(own, own): key for own, key in self.names.items()},
            shapes={ours.get(own, own): shape for own, shape in self.shapes.items()},
            added=self.added - ours.keys(),
        )

    def _wrapped(self, name: str, shape: Shape) -> str | None:
        """Return the parameter of this shape and of this name with components inserted (by LoRA, say), if unique."""
        dots = [index for index, character in enumerate(name) if character == '.']
        inside = [
            own
            for own in self.added
            if self.shapes[own] == shape
            and any(own.startswith(name[:dot]) and own.endswith(name[dot:]) for dot in dots)
        ]
        return inside[0] if len(inside) == 1 else None


def is_standard(name: str) -> bool:
    """Return whether one of our names is that of a backbone parameter, for any options."""
    read = MMDET.read(name)
    return read is not None and read.role != 'final_norm'


def state_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of all parameters and persistent buffers of a model."""
    yield from model.named_parameters(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f'{path}.{name}' if path else name, buffer
