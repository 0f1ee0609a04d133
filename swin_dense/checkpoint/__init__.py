"""Load the weights of any Swin into a backbone, or say exactly why not; and write them for others.

A checkpoint passes through four steps, one module each: ``fetch`` and ``files`` read it, ``source`` finds the backbone
in it by the name tables of ``families``, ``fit`` brings that to the shapes of the model (``target``) and reports what
it did. :func:`load_checkpoint` does this for files and dicts, :func:`convert_before_load`, a hook, for the state dicts
that ``load_state_dict`` of the backbone, or of any model around it, is given.
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
