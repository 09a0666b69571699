#!/usr/bin/env bash
# Supervised training of Qwen3-235B-A22B on OpenHermes 2.5, on 4 machines with 8 GPUs each.
#
#    bash scripts/run-qwen3-235B-A22B-sft.sh [--tiny] [more flags of train_async.py]
#
# Run it on each of the 4 nodes with WORLD_SIZE=4, RANK, MASTER_ADDR and a token set (see scripts/lib/ray.sh).
# docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and --tiny.
# Proven: checked against published configs (qwen3-235B-A22B.json).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model qwen3-235B-A22B qwen3_moe "$@"

PLACEMENT_ARGS=(--actor-num-nodes 4 --actor-num-gpus-per-node 8)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/Qwen3-235B-A22B"
   --ref-load "$BASE/Qwen3-235B-A22B_torch_dist"
   --load "$BASE/Qwen3-235B-A22B_slimrl/"
   --save "$BASE/Qwen3-235B-A22B_slimrl/"
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
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-5 --lr-decay-style cosine --min-lr 1e-6 --lr-warmup-fraction 0.1
   --weight-decay 0.1
   --adam-beta1 0.9 --adam-beta2 0.95
   # Keeps Adam's moments in host memory.
   --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
)

recipe_run train_async.py
