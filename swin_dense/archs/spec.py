"""What a checkpoint must fit, besides the shapes of parameters. This module needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from swin_dense.archs.arch import Arch

_Size = tuple[int, int]  # (height, width)


@dataclass(frozen=True)
class Spec:
    """The geometry of a model, which its parameters do not tell. The method ``spec`` of a model returns it."""

    network: str  # 'swin' or 'swinv2'
    arch: Arch
    stages: int  # that are built, up to the last output
    windows: tuple[_Size, ...]  # in tokens, per stage of the architecture
    grid: _Size  # in tokens, of the absolute position embedding
    strides: tuple[int, ...]  # of the patch embedding and of each merging
    clamp_window: bool
    given_windows: tuple[_Size | None, ...] = ()  # of V2's pretrained_window_size, per stage; None: those of the model
    is_classifier: bool = False

    @property
    def trained_windows(self) -> tuple[_Size, ...]:
        """Per stage, the window to which V2's position networks scale their coordinates."""
        return tuple(given or own for given, own in zip(self.given_windows, self.windows, strict=False))
