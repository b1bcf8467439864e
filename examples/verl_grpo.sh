#!/bin/sh
# GRPO of a hybrid model in verl 0.9, padded path, with padless planning the micro-batches.
#
#   MODEL=... TRAIN=train.parquet VAL=val.parquet sh examples/verl_grpo.sh [verl overrides]
#
# What differs from a run without padless: external_lib, and nothing else. use_remove_padding=False is what a model
# that leaks between packed sequences (Jamba, Bamba, Qwen3-Next, ...) needs; use_dynamic_bsz with the token budgets is
# what there is to plan. Options of padless are environment variables: docs/recipes/verl.md.
set -eu
: "${MODEL:?path of the model}" "${TRAIN:?training prompts, Parquet}" "${VAL:?validation prompts, Parquet}"
: "${TOKENS:=16384}" "${GPUS:=8}" "${NODES:=1}"

exec "${PYTHON:-python3}" -m verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$TRAIN" data.val_files="$VAL" \
  data.train_batch_size=256 data.max_prompt_length=4096 data.max_response_length=8192 \
  actor_rollout_ref.model.path="$MODEL" \
  actor_rollout_ref.model.external_lib=padless.integrations.verl \
  actor_rollout_ref.model.use_remove_padding=False \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$TOKENS" \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.ref.log_prob_max_token_len_per_gpu="$TOKENS" \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu="$TOKENS" \
  trainer.n_gpus_per_node="$GPUS" trainer.nnodes="$NODES" \
  "$@"
