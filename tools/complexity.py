"""``swin-dense complexity`` under the name of a script."""

import sys

from swin_dense.__main__ import main

sys.exit(main(['complexity', *sys.argv[1:]]))
