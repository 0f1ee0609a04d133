"""Let Python 3.13 build mmcv 2.1: its setup.py reads from locals() what exec() defined, as older Pythons let it.

Python imports a module of this name at its start; the build of mmcv has this folder in its PYTHONPATH.
"""

import builtins
import sys
from typing import Any

execute = builtins.exec


def execute_in_caller(source: Any, *namespaces: Any, **keywords: Any) -> None:
    caller = sys._getframe(1)
    execute(source, *(namespaces or (caller.f_globals, caller.f_locals)), **keywords)


if sys.version_info >= (3, 13):
    builtins.exec = execute_in_caller
