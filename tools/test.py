"""``swin-dense test`` as a script, for launchers that start a file."""

import sys

from swin_dense.__main__ import main

sys.exit(main(['test', *sys.argv[1:]]))
