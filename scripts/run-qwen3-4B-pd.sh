#!/usr/bin/env bash
# GRPO of Qwen3-4B on dapo-math-17k with prefill and decode on different servers, on one machine with 8 GPUs: 2 train, 6
# generate on one GPU each, of which 2 compute the KV caches of prompts and 4 the responses.
#
#    bash scripts/run-qwen3-4B-pd.sh [--tiny] [more flags of train.py]
#
# Mooncake moves the caches and must be installed: docs/engine-groups.md#prefill-and-decode has the commands, on a
# machine without a GPU too. docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and
# --tiny.
# Proven: gated in CI on CPU (tests/scripts/test_recipes.py).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model qwen3-4B qwen3 "$@"

PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 6)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/Qwen3-4B"
   --ref-load "$BASE/Qwen3-4B_torch_dist"
   --load "$BASE/Qwen3-4B_pd/"
   --save "$BASE/Qwen3-4B_pd/"
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data "$BASE/dapo-math-17k/dapo-math-17k.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --num-rollout 300
   --rm-type deepscaler
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --num-steps-per-rollout 1
   --rollout-max-response-len 8192
   --rollout-temperature 1
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 20
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
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
   --eps-clip 0.2 --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6 --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9 --adam-beta2 0.98
   --use-distributed-optimizer
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   --prefill-num-servers 2
   --sglang-mem-fraction-static 0.8
   --use-fault-tolerance
)

recipe_run train.py
