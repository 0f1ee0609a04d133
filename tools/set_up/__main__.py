"""Make an environment of this project: look at the machine, resolve everything, only then download, and compile last.

Usage: PYTHON tools/set_up KIND FOLDER

A torch that is already in FOLDER is kept. What was interrupted goes on where it stopped.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from kinds import KINDS
from machine import Unfit
from steps import set_up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('kind', choices=KINDS)
    parser.add_argument('folder', type=Path)
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        set_up(KINDS[args.kind], args.folder)
    except Unfit as error:
        sys.exit(f'set-up: {error}')
    except KeyboardInterrupt:
        sys.exit('\nset-up: interrupted; the same command goes on where it stopped')


main()
