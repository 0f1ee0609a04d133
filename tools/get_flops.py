"""``swin-dense flops`` under the name of a script."""

import sys

from swin_dense.__main__ import main

sys.exit(main(['flops', *sys.argv[1:]]))
