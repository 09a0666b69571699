#!/usr/bin/env bash
# Supervised training of Qwen3-4B-Base on OpenHermes 2.5, on one machine with 8 GPUs.
#
#    bash scripts/run-qwen3-4B-base-sft.sh [--tiny] [more flags of train_async.py]
#
# docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and --tiny.
# Proven: gated in CI on CPU (tests/scripts/test_recipes.py).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model qwen3-4B qwen3 "$@"

PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/Qwen3-4B-Base"
   --ref-load "$BASE/Qwen3-4B-Base_torch_dist"
   --load "$BASE/Qwen3-4B-Base_slimrl/"
   --save "$BASE/Qwen3-4B-Base_slimrl/"
   --save-interval 1000
)

ROLLOUT_ARGS=(
   --rollout-function-path slimrl.rollout.sft_rollout.generate_rollout
   --prompt-data "$BASE/openhermes2_5.parquet"
   --input-key messages
   --rollout-shuffle
   --num-epoch 3
   --rollout-batch-size 128
   --global-batch-size 128
   --loss-type sft_loss
   --calculate-per-token-loss
   --disable-compute-advantages-and-returns
   --debug-train-only
)

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
   --lr 1e-5 --lr-decay-style cosine --min-lr 1e-6 --lr-warmup-fraction 0.1
   --weight-decay 0.1
   --adam-beta1 0.9 --adam-beta2 0.95
)

recipe_run train_async.py
