"""``python -m swin_dense`` is ``swin-dense``."""

import sys

from swin_dense.commands._main import main

if __name__ == '__main__':
    sys.exit(main())
