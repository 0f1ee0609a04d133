"""``swin-dense test`` as a script, for launchers that start a file."""

import sys

from swin_dense.commands._main import main

sys.exit(main(['test', *sys.argv[1:]]))
