"""Load the weights of any Swin into a backbone, and export them in the formats of other libraries.

To load, top down: ``read`` a file with ``unpickler``, ``convert`` its backbone by the names in ``families``,
``compare`` it with the model, which ``resize`` serves, and ``load`` what fits. ``infer`` has the options of a model.
"""

from swin_dense.checkpoint.export import export_state_dict
from swin_dense.checkpoint.load import allow_partial_loading, convert_before_load, load_checkpoint
from swin_dense.checkpoint.report import Report
from swin_dense.utils.errors import CheckpointError

__all__ = [
    'CheckpointError',
    'Report',
    'allow_partial_loading',
    'convert_before_load',
    'export_state_dict',
    'load_checkpoint',
]
