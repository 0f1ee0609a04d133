"""A hook of mmengine that lets the backbone of a model replay a CUDA graph."""

from __future__ import annotations

from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import nn

from swin_dense.models.graphs import use_graphs
from swin_dense.utils.names import unwrapped_module


class UseGraphs(Hook):  # type: ignore[misc]
    """Call :func:`swin_dense.use_graphs` for the model's backbone: ``custom_hooks = [dict(type='UseGraphs')]``."""

    def before_run(self, runner: Runner) -> None:
        """Replace the forward pass of the backbone.

        Raises:
            ValueError: the model has no backbone.
        """
        model = unwrapped_module(runner.model)
        backbone = getattr(model, 'backbone', None)
        if not isinstance(backbone, nn.Module):
            raise ValueError(f'UseGraphs needs a model with a backbone, and {type(model).__name__} has none')
        use_graphs(backbone)
