"""Load the weights of any Swin into a backbone, and export them in the formats of other libraries.

| file | what it does |
| --- | --- |
| read.py | reads the checkpoint at a path or an address, which it downloads |
| unpickler.py | unpickles tensors and arrays, and runs nothing else |
| families.py | translates the parameter names and layouts of each library |
| find.py | finds the backbone in a checkpoint |
| fit.py | fits it to a model |
| resize.py | infers windows, and resizes what has another size |
| infer.py | infers the options of a backbone that fits it |
| report.py | reports what loaded, or why the checkpoint does not fit |
| load.py | loads it: :func:`load_checkpoint`, and a hook of ``load_state_dict`` |
| export.py | exports the weights of a model, and writes them |
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
