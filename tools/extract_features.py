"""``swin-dense features`` under the name of a script."""

import sys

from swin_dense.__main__ import main

sys.exit(main(['features', *sys.argv[1:]]))
