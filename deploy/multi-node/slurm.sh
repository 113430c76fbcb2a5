#!/usr/bin/env bash
# A system on the first node of an allocation, and ranks on all of its nodes:
#   SHARED=/shared/rlboost sbatch --nodes 2 --gpus-per-node 8 deploy/multi-node/slurm.sh job.yaml
# job.yaml has trainer.nodes: 2. SHARED is a folder on a file system of all nodes. See docs/multi-node.md.
#SBATCH --job-name=rlboost
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --no-kill
set -euo pipefail

job=${1:?name a job file}
: "${SHARED:?a folder that all nodes have under the same path}"
cd "$SLURM_SUBMIT_DIR"
mkdir -p "$SHARED"
# A requeued allocation continues its jobs, which are signed with the token.
[ -f "$SHARED/token" ] || (umask 077 && openssl rand -hex 32 > "$SHARED/token")
RLBOOST_TOKEN=$(< "$SHARED/token")
HF_HOME=${HF_HOME:-$SHARED/huggingface}
export RLBOOST_TOKEN HF_HOME

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahostsv4 "$first" | awk 'NR == 1 {print $1}')
sed "s,/shared/rlboost,$SHARED," deploy/multi-node/system.yaml > "$SHARED/system.yaml"

# This script runs on the first node.
rlboost up "$SHARED/system.yaml" --host "$address" --state "$SHARED/state" --detach
trap 'rlboost down --state "$SHARED/state"' EXIT
# A step for each node: the loss of one does not end the others.
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
    srun --nodes 1 --ntasks 1 --nodelist "$node" --overlap rlboost trainer join --url "tcp://$address:8702" --name "$node" &
done
# Workers are other jobs of Slurm: this job waits until there is one.
[ -s "$SHARED/join-token" ] ||
    (umask 077 && rlboost token create --scope worker --name slurm --state "$SHARED/state" > "$SHARED/join-token")
echo "start workers: RLBOOST_URL=http://$address:8700 TOKEN_FILE=$SHARED/join-token sbatch deploy/slurm/worker.sh"
rlboost run "$job" --state "$SHARED/state" --follow
