"""``swin-dense train`` as a script, for launchers that start a file."""

import sys

from swin_dense.commands._main import main

sys.exit(main(['train', *sys.argv[1:]]))
