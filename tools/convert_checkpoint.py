"""``swin-dense convert`` under the name of a script."""

import sys

from swin_dense.__main__ import main

sys.exit(main(['convert', *sys.argv[1:]]))
