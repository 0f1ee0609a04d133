"""The name of the checkpoint hook in configs that versions up to 0.3 wrote; it is mmengine's own now."""

from mmengine.hooks import CheckpointHook

WholeCheckpointHook = CheckpointHook
