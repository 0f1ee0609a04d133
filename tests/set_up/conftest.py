"""The set-up runs before anything is installed, so it is no package: its tests import it from its folder."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2] / folder) for folder in ('tools', 'tools/mmcv_build')]
