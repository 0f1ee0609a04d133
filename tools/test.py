"""``swin-dense test`` as a file, which launchers start."""

import sys

from swin_dense.__main__ import main

sys.exit(main(['test', *sys.argv[1:]]))
