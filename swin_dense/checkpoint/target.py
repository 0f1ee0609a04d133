"""What a backbone expects of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from swin_dense.checkpoint.names import plain_name
from swin_dense.windows import Pair

Shape = tuple[int, ...]
STAGE = re.compile(r'layers\.(\d+)\.')
OUT_NORM = re.compile(r'norm(\d+)\.(weight|bias)')
# Wrappers of PyTorch that take their component out of names when they load, in hooks of their own.
_SELF_RENAMING = re.compile(r'(?:_fsdp_wrapped_module|_checkpoint_wrapped_module)\.')


@dataclass(frozen=True)
class Target:
    """The parameters of a backbone.

    Attributes:
        names: our name to the name in the module, which wrappers of submodules may extend.
        shapes: our name to the shape, or None where a sharded parameter does not show its own.
        window: window of the backbone in tokens.
        stages: how many stages are built.
        version: of Swin, 1 or 2.
        trained_windows: per stage, the window that V2's position networks take theirs to be trained with.
        clamps: whether that of a stage may turn out smaller, as windows shrink to small maps.
        complete: whether the module shows all its parameters; FSDP may hide those of submodules in flat ones.
    """

    names: Mapping[str, str]
    shapes: Mapping[str, Shape | None]
    window: Pair
    stages: int
    complete: bool = True
    version: int = 1
    trained_windows: tuple[Pair, ...] = ()
    clamps: bool = False

    @classmethod
    def of(cls, backbone: nn.Module) -> Target:
        """Describe a backbone.

        Raises:
            TypeError: ``backbone`` is no SwinBackbone.
        """
        window = getattr(backbone, 'window_size', None)
        if not isinstance(backbone, nn.Module) or not hasattr(backbone, 'patch_embed') or not isinstance(window, tuple):
            inside = '; pass its .backbone' if hasattr(backbone, 'backbone') else ''
            raise TypeError(f'backbone must be a SwinBackbone, got {type(backbone).__name__}{inside}')
        names: dict[str, str] = {}
        shapes: dict[str, Shape | None] = {}
        complete = True
        for name, parameter in backbone.named_parameters(remove_duplicate=False):
            if name.endswith('_flat_param'):
                complete = False
                continue
            plain = plain_name(name)
            sharded = '_fsdp_wrapped_module.' in name or parameter.numel() == 0
            names[plain] = _SELF_RENAMING.sub('', name)
            shapes[plain] = None if sharded else tuple(parameter.shape)
        trained = getattr(backbone, 'pretrained_window_size', None)
        return cls(
            names,
            shapes,
            window,
            len(backbone.layers),  # type: ignore[arg-type]
            complete,
            version=1 if trained is None else 2,
            trained_windows=tuple((side, side) if side else window for side in trained or ()),  # type: ignore
            clamps=getattr(backbone, 'clamp_window', False) is True,
        )

    @property
    def grid(self) -> Pair | None:
        """(H, W) of the absolute position embedding."""
        shape = self.shapes.get('absolute_pos_embed')
        return None if shape is None else (shape[2], shape[3])

    def with_hidden(self, given: Iterable[str]) -> Target:
        """Add those of the ``given`` parameters that FSDP may hide, as it takes what is under their usual names."""
        hidden = {name for name in given if (match := STAGE.match(name)) and int(match[1]) < self.stages}
        hidden -= {name for name in hidden if name.startswith(f'layers.{self.stages - 1}.downsample.')}
        names = {**{name: name for name in hidden}, **self.names}
        return replace(self, names=names, shapes={**dict.fromkeys(hidden), **self.shapes})
