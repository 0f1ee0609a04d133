"""Load the weights of any Swin into a backbone, and export them in the formats of other libraries.

To load: ``read`` with ``unpickler``, ``find`` by the names in ``families``, ``fit`` with ``resize``, ``load``.
"""

from swin_dense.checkpoint.export import export_state_dict
from swin_dense.checkpoint.load import allow_partial_loading, convert_before_load, load_checkpoint
from swin_dense.checkpoint.report import CheckpointError, Report

__all__ = [
    'CheckpointError',
    'Report',
    'allow_partial_loading',
    'convert_before_load',
    'export_state_dict',
    'load_checkpoint',
]
