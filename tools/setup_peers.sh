#!/usr/bin/env bash
# Usage: tools/setup_peers.sh PYTHON VENV    installs other people's Swins, for tests/peers, into the environment VENV
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2

printf '\n== Environment of the peers: torchvision, timm, transformers, mmpretrain (1 to 5 minutes)\n'
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
pip install -r requirements/torch.txt -r requirements/peers.txt
pip install --no-deps -r requirements/peers-no-deps.txt
pip install --no-build-isolation --no-deps --editable .
