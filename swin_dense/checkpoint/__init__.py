"""Load the weights of any Swin into a backbone, and export them in the formats of other libraries.

Loading has four steps: ``fetch`` and ``files`` read the checkpoint, ``source`` finds the backbone in it with the name
tables of ``families``, and ``fit`` adapts the parameters to the shapes of the model (``target``) and returns a report.
:func:`load_checkpoint` does this for files and dicts. The hook :func:`convert_before_load` does it for the state dicts
passed to ``load_state_dict`` of the backbone or of a model that contains it.
"""

from swin_dense.checkpoint.export import export_state_dict
from swin_dense.checkpoint.hook import allow_partial_loading, convert_before_load
from swin_dense.checkpoint.load import load_checkpoint
from swin_dense.checkpoint.report import CheckpointError, Report

__all__ = [
    'CheckpointError',
    'Report',
    'allow_partial_loading',
    'convert_before_load',
    'export_state_dict',
    'load_checkpoint',
]
