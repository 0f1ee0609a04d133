"""``swin-dense train`` as a file, which launchers start."""

import sys

from swin_dense.__main__ import main

sys.exit(main(['train', *sys.argv[1:]]))
