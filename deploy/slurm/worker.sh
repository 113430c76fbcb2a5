#!/usr/bin/env bash
# Spot workers on one node, one per GPU, as a job that Slurm may preempt:
#   sbatch --export=ALL,RLBOOST_URL=http://10.0.0.5:8700,TOKEN_FILE=$HOME/join-token deploy/slurm/worker.sh
# TOKEN_FILE has a join token (rlboost token create --scope worker). See docs/multi-node.md.
#SBATCH --job-name=rlboost-worker
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=B:TERM@60
set -euo pipefail

: "${RLBOOST_URL:?the address of the manager}"
: "${TOKEN_FILE:?a file with a join token}"
RLBOOST_TOKEN=$(< "$TOKEN_FILE")
# A pool of the manager is named as the kind: sbatch --job-name h100.
RLBOOST_WORKER_KIND=${RLBOOST_WORKER_KIND:-$SLURM_JOB_NAME}
export RLBOOST_TOKEN RLBOOST_WORKER_KIND
# exec: Slurm's SIGTERM reaches the command, which drains the workers and exits.
exec rlboost worker join --gpus all --url "$RLBOOST_URL" --state "${TMPDIR:-/tmp}/rlboost-$SLURM_JOB_ID"
