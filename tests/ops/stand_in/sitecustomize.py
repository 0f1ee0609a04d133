"""Python runs this at its start where the folder is on its path: then the process has a stand-in for a GPU."""

import os
import sys

# Not in the many other processes of `swin-dense doctor`, which would import torch for nothing.
if 'STAND_IN' in os.environ and any('spawn_main' in argument or argument == 'doctor' for argument in sys.orig_argv):
    sys.modules['mmengine'] = None  # not needed, and slow to import
    from tests.ops import stand_in

    stand_in.install()
