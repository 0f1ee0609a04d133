"""Load the weights of any Swin into a backbone, and export them in the formats of other libraries.

To load, top down: ``read`` a file with ``unpickler``, ``convert`` its backbone by the names in ``families``,
``compare`` it with the model, which ``resize`` serves, and ``load`` the parameters that fit. ``infer`` has the
options of a model.
"""

from typing import TYPE_CHECKING

from swin_dense.utils.lazy import public_names

if TYPE_CHECKING:
    from swin_dense.checkpoint.load import allow_partial_loading, convert_before_load, load_checkpoint
    from swin_dense.checkpoint.report import Report
    from swin_dense.checkpoint.save import export_state_dict
    from swin_dense.utils.errors import CheckpointError

__all__ = [
    'CheckpointError',
    'Report',
    'allow_partial_loading',
    'convert_before_load',
    'export_state_dict',
    'load_checkpoint',
]
# Imported when they are asked for: a backbone without a checkpoint needs no downloader and no reader of pickles.
_HOMES = {
    'CheckpointError': 'swin_dense.utils.errors',
    'Report': 'swin_dense.checkpoint.report',
    'allow_partial_loading': 'swin_dense.checkpoint.load',
    'convert_before_load': 'swin_dense.checkpoint.load',
    'export_state_dict': 'swin_dense.checkpoint.save',
    'load_checkpoint': 'swin_dense.checkpoint.load',
}
__getattr__, __dir__ = public_names(__name__, _HOMES)
