#!/usr/bin/env bash
# PPO with a critic on Qwen3-4B and dapo-math-17k, on one machine with 8 GPUs.
#
#    bash scripts/run-qwen3-4B-ppo.sh [--tiny] [more flags of train.py]
#
# The critic starts from the policy's weights, is trained by the same GPUs and saved in the folder critic beside the
# policy's checkpoints; with --critic-num-nodes 1 it has the GPUs of a second node. Reads models and data from, and
# writes checkpoints to, BASE (default /root); docs/recipes.md explains how to download them. --tiny runs a toy model
# on this machine's CPU. If RAY_ADDRESS is set, the job is submitted to that cluster; otherwise the script starts a Ray
# head and ends it with the job.
# Proven: gated in CI on CPU (tests/scripts/test_recipes.py).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"

PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate)
recipe_model qwen3-4B qwen3 "$@"

CKPT_ARGS=(
   # The initial weights of SGLang, and the tokenizer.
   --hf-checkpoint "$BASE/Qwen3-4B"
   # The reference model, in Megatron's format.
   --ref-load "$BASE/Qwen3-4B_torch_dist"
   # The checkpoint to resume; while it is empty, training starts from --ref-load.
   --load "$BASE/Qwen3-4B_ppo/"
   --save "$BASE/Qwen3-4B_ppo/"
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data "$BASE/dapo-math-17k/dapo-math-17k.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   # 32 prompts x 8 responses = 256 samples per rollout, trained in one step.
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --num-steps-per-rollout 1
   --rollout-max-response-len 8192
   --rollout-temperature 0.8
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 5
   --eval-prompt-data aime "$BASE/aime-2024/aime-2024.jsonl"
   --n-samples-per-eval-prompt 16
   --eval-max-response-len 16384
   --eval-top-p 0.7
)

PERF_ARGS=(
   --bf16
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   # A longer sample gets its own micro-batch; samples are never truncated.
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
   --advantage-estimator ppo
   --gamma 1 --lambd 0.95
   --normalize-advantages
   --value-clip 0.2
   # The critic alone learns from the first rollouts: until then its values say nothing.
   --num-critic-only-steps 10
   --critic-lr 1e-5
   # The penalty is a reward of every token.
   --kl-coef 0.001 --kl-loss-type k1
   --entropy-coef 0.00
   --eps-clip 0.2
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6 --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9 --adam-beta2 0.98
   --use-distributed-optimizer
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   # Training is offloaded while the engines run; the rest is for CUDA graphs and NCCL.
   --sglang-mem-fraction-static 0.7
)

recipe_run train.py
