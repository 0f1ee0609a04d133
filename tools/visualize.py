"""``swin-dense visualize`` under the name of a script."""

import sys

from swin_dense.__main__ import main

sys.exit(main(['visualize', *sys.argv[1:]]))
