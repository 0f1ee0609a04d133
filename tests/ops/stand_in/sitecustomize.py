"""Install the simulated GPU at the start of Python, which imports this file if the folder is on its path."""

import os
import sys

# Skip the many other processes of `swin-dense doctor`, which would import torch without need.
if 'STAND_IN' in os.environ and any('spawn_main' in argument or argument == 'doctor' for argument in sys.orig_argv):
    sys.modules['mmengine'] = None  # not needed, and slow to import
    from tests.ops import stand_in

    stand_in.install()
