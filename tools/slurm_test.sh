#!/usr/bin/env bash
# GPUS, GPUS_PER_NODE, CPUS_PER_TASK and SRUN_ARGS describe the job; one task runs per GPU.
set -euo pipefail
usage='usage: tools/slurm_test.sh PARTITION JOB_NAME CONFIG CHECKPOINT [options of swin-dense test]'
partition=${1:?$usage} job=${2:?$usage} config=${3:?$usage} checkpoint=${4:?$usage}
gpus=${GPUS:-8} per_node=${GPUS_PER_NODE:-8}
# shellcheck disable=SC2086  # SRUN_ARGS are several words
exec srun --partition="$partition" --job-name="$job" --gres="gpu:$per_node" --ntasks="$gpus" \
    --ntasks-per-node="$per_node" --cpus-per-task="${CPUS_PER_TASK:-5}" --kill-on-bad-exit=1 ${SRUN_ARGS:-} \
    python -u "$(dirname "$0")/test.py" "$config" "$checkpoint" --launcher slurm "${@:5}"
