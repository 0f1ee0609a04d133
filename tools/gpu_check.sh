#!/usr/bin/env bash
# What a machine with a GPU is asked, in pieces of under ten minutes each:
#
#   tools/gpu_check.sh --list              the pieces
#   tools/gpu_check.sh tests profile       some of them; without names, all
#   OUT=results tools/gpu_check.sh         where the reports go (default: work_dirs/gpu_check)
#   REHEARSE=1 tools/gpu_check.sh          on a machine without a GPU: the same steps, small and on the processor
#
# First the kernels are proven and timed, as by `swin-dense doctor --again`, and the tests marked gpu are run. Then come our
# backbone and others, eager, as CUDA graphs and compiled, in inference and in training; profiles; sweeps over parameters.
# It needs torch, triton, numpy, pytest and hypothesis, and takes timm, mmdet, torchvision and transformers where they
# are; no network, no installation. Reports are JSON, written anew after every round, so what a time limit cuts off is kept
# up to there. gpu.json holds the medians of all comparisons: copied to benchmarks/, tools/update_readme.py makes the
# README's table of it.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
out=${OUT:-work_dirs/gpu_check}
limit=${LIMIT:-580}  # seconds per piece
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
if [ -n "${REHEARSE:-}" ]; then export CUDA_VISIBLE_DEVICES=''; fi

pieces=$("$PYTHON" benchmarks/gpu_check.py --list) || exit 2
if [ "${1:-}" = --list ]; then echo "$pieces"; exit; fi
mkdir -p "$out"
failed=0
for piece in ${*:-$pieces}; do
  echo "== $piece"
  start=$SECONDS
  timeout "$limit" "$PYTHON" benchmarks/gpu_check.py "$piece" --out "$out" ${REHEARSE:+--rehearse} 2>&1 | tee "$out/$piece.log"
  status=${PIPESTATUS[0]}
  echo "== $piece: exit status $status after $((SECONDS - start)) s"
  [ "$status" = 0 ] || failed=1
done
exit $failed
