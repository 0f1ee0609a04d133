#!/usr/bin/env bash
# Usage: tools/setup.sh PYTHON VENV    installs the pinned stack and this package into the environment VENV
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "set-up needs Python 3.11 or newer; '$python' is $("$python" --version). Choose another: make PYTHON=python3.11" >&2
    exit 1
}
command -v c++ >/dev/null || {
    echo 'set-up compiles mmcv and found no C++ compiler; install one (Debian and Ubuntu: apt install g++)' >&2
    exit 1
}

say() { printf '\n== %s\n' "$*"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

say '1/4 torch and the build tools (1 to 5 minutes, mostly downloads)'
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip install --quiet -r requirements/torch.txt
say '2/4 mmcv: compiled once, 12 to 35 minutes on 2 cores; pip keeps the wheel, so the next environment takes seconds'
mmcv=$(grep '^mmcv==' requirements/mm.txt)
# Without isolation, as an isolated build would fetch another torch to compile against.
"$venv/bin/python" -m pip show --quiet mmcv 2>/dev/null || pip install --no-build-isolation "$mmcv"
say '3/4 mmengine, mmdet, mmsegmentation, and what the tools and tests use (1 to 3 minutes)'
pip install --quiet -r requirements/torch.txt -r requirements/mm.txt -r requirements/dev.txt
say '4/4 swin_dense itself'
pip install --quiet --no-build-isolation --no-deps --editable .
