#!/usr/bin/env bash
# GRPO on Qwen3-8B and MATH with Megatron-FSDP, on one machine with 8 GPUs: the settings of PAI-ChatLearn's
# train_grpo_qwen3.sh.
#
#    bash scripts/run-qwen3-8B-math-fsdp.sh            # training and generation alternate on all 8 GPUs
#    bash scripts/run-qwen3-8B-math-fsdp.sh --tiny     # a toy model on this machine's CPU
#
# Reads models and data from, and writes checkpoints to, BASE (default /root). The data are made by
# python tools/prepare_data.py MATH-lighteval --output-dir $BASE/math. Further arguments go to train.py and override
# those below. If RAY_ADDRESS is set, the job is submitted to that cluster; otherwise the script starts a Ray head and
# ends it with the job.
# Proven: gated in CI on CPU (tests/scripts/test_recipes.py).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model qwen3-8B qwen3 "$@"

PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/Qwen3-8B"
   # The initial weights, in Megatron's format; the loss has no KL, so that there is no reference pass.
   --ref-load "$BASE/Qwen3-8B_torch_dist"
   --load "$BASE/Qwen3-8B_math/"
   --save "$BASE/Qwen3-8B_math/"
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data "$BASE/math/train.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --apply-chat-template-kwargs '{"enable_thinking": false}'
   --rollout-shuffle
   --rm-type math
   --num-rollout 20
   # 64 prompts x 32 responses = 2048 samples per rollout, trained in one step.
   --rollout-batch-size 64
   --n-samples-per-prompt 32
   --global-batch-size 2048
   --rollout-max-response-len 2048
   --rollout-temperature 1.0
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 5
   --skip-eval-before-train
   --eval-prompt-data math "$BASE/math/test.jsonl"
   --eval-temperature 0.6
   --eval-top-p 0.95
   --eval-top-k 20
)

PERF_ARGS=(
   --bf16
   # Weights, gradients and optimizer state are sharded over all 8 GPUs, as by FSDP.
   --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --use-dynamic-batch-size --max-tokens-per-gpu 16384
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --eps-clip 0.2 --eps-clip-high 0.2
   --calculate-per-token-loss
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 2e-6 --lr-decay-style constant
   --clip-grad 1.0
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.85
)

recipe_run train.py
