#!/usr/bin/env bash
# NNODES, NODE_RANK, MASTER_ADDR and PORT describe a job on several machines.
set -euo pipefail
usage='usage: tools/dist_train.sh CONFIG GPUS [options of swin-dense train]'
config=${1:?$usage} gpus=${2:?$usage}
exec torchrun --nnodes="${NNODES:-1}" --node_rank="${NODE_RANK:-0}" --master_addr="${MASTER_ADDR:-127.0.0.1}" \
    --master_port="${PORT:-29500}" --nproc_per_node="$gpus" \
    "$(dirname "$0")/train.py" "$config" --launcher pytorch "${@:3}"
