"""Make mmcv 2.1 build with Python 3.13, where names defined by exec() no longer appear in locals().

mmcv's setup.py reads its version that way. Python imports a module of this name at startup; the build of mmcv has this
folder in PYTHONPATH.
"""

import builtins
import sys
from typing import Any

original_exec = builtins.exec


def exec_in_caller(source: Any, *namespaces: Any, **keywords: Any) -> None:
    caller = sys._getframe(1)
    original_exec(source, *(namespaces or (caller.f_globals, caller.f_locals)), **keywords)


if sys.version_info >= (3, 13):
    builtins.exec = exec_in_caller
