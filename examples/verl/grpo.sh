#!/bin/sh
# verl's trainer on a fleet of spot workers: GRPO on sums of two numbers.
#
#   rlboost init sums && rlboost up --trainers 0 --detach
#   python examples/verl/sums.py sums
#   export RLBOOST_URL=http://127.0.0.1:8700 RLBOOST_TOKEN=...   # in Ray's processes, too
#   sh examples/verl/grpo.sh sums trainer.n_gpus_per_node=1
#
# The first three lines of arguments are the difference from training without a fleet.
set -eu
folder=$1
shift
export VERL_USE_EXTERNAL_MODULES="${VERL_USE_EXTERNAL_MODULES:-rlboost.verl}"
exec python -m verl.trainer.main_ppo \
    actor_rollout_ref.rollout.name=rlboost \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    +actor_rollout_ref.rollout.engine_kwargs.rlboost.job=sums-verl \
    algorithm.adv_estimator=grpo \
    data.train_files="$folder/train.parquet" \
    data.val_files="$folder/eval.parquet" \
    data.train_batch_size=32 \
    data.max_prompt_length=16 \
    data.max_response_length=8 \
    data.dataloader_num_workers=0 \
    reward.custom_reward_function.path="$(dirname "$0")/sums.py" \
    actor_rollout_ref.model.path="$folder/model-verl" \
    actor_rollout_ref.model.custom_chat_template="'{% for one in messages %}{{ one[\"content\"] }}{% endfor %}'" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-3 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64 \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=64 \
    trainer.logger="['console']" \
    trainer.val_before_train=False \
    trainer.resume_mode=disable \
    trainer.nnodes=1 \
    "$@"
