"""``swin-dense zoo`` under the name of a script."""

import sys

from swin_dense.__main__ import main

sys.exit(main(['zoo', *sys.argv[1:]]))
