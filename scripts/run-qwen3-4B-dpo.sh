#!/usr/bin/env bash
# Preference training (DPO) of Qwen3-4B on UltraFeedback, on one machine with 8 GPUs.
#
#    bash scripts/run-qwen3-4B-dpo.sh [--tiny] [more flags of train.py]
#
# docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and --tiny.
# Proven: gated in CI on CPU (tests/scripts/test_recipes.py).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model qwen3-4B qwen3 "$@"

PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/Qwen3-4B"
   --ref-load "$BASE/Qwen3-4B_torch_dist"
   --load "$BASE/Qwen3-4B_dpo/"
   --save "$BASE/Qwen3-4B_dpo/"
   --save-interval 200
)

ROLLOUT_ARGS=(
   --rollout-function-path slimrl.rollout.preference_rollout.generate_rollout
   --prompt-data "$BASE/ultrafeedback/train.jsonl"
   --input-key prompt
   --rollout-shuffle
   --num-epoch 1
   --rollout-batch-size 64
   --n-samples-per-prompt 2
   --global-batch-size 128
   --loss-type preference_loss
   --preference-loss sigmoid
   --preference-beta 0.1
   --debug-train-only
)

EVAL_ARGS=(--eval-interval 100 --eval-prompt-data held-out "$BASE/ultrafeedback/test.jsonl")

PERF_ARGS=(
   --bf16
   --tensor-model-parallel-size 1 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 5e-7 --lr-decay-style linear --lr-warmup-fraction 0.1
   --weight-decay 0.0
   --adam-beta1 0.9 --adam-beta2 0.95
)

recipe_run train.py
