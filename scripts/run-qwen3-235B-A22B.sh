#!/usr/bin/env bash
# GSPO on Qwen3-235B-A22B, dapo-math-17k and AIME 2024, on 16 machines with 8 GPUs each: 8 train, 8 generate.
#
#    bash scripts/run-qwen3-235B-A22B.sh [--tiny] [more flags of train.py]
#
# Run it on each of the 16 nodes with WORLD_SIZE=16, RANK, MASTER_ADDR and a token set (see scripts/lib/ray.sh).
# docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and --tiny.
# Proven: checked against published configs (qwen3-235B-A22B.json).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model qwen3-235B-A22B qwen3_moe "$@"

PLACEMENT_ARGS=(
   --actor-num-nodes 8
   --actor-num-gpus-per-node 8
   --rollout-num-gpus 64
   --update-weight-buffer-size $((4 * 1024 ** 3))
)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/Qwen3-235B-A22B"
   --ref-load "$BASE/Qwen3-235B-A22B_torch_dist"
   --load "$BASE/Qwen3-235B-A22B_slimrl/"
   --save "$BASE/Qwen3-235B-A22B_slimrl/"
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data "$BASE/dapo-math-17k/dapo-math-17k.jsonl"
   --input-key prompt --label-key label --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 8
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 0.8
   --global-batch-size 64
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
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 4
   --context-parallel-size 2
   --expert-model-parallel-size 16 --expert-tensor-parallel-size 1
   --decoder-last-pipeline-num-layers 22
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --use-dynamic-batch-size --max-tokens-per-gpu 16384
)

GRPO_ARGS=(
   --advantage-estimator gspo
   --entropy-coef 0.00
   --eps-clip 4e-4
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6 --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9 --adam-beta2 0.98
   # Keeps Adam's moments in host memory.
   --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 32
   --sglang-mem-fraction-static 0.7
   --sglang-ep-size 32
   --sglang-enable-dp-attention --sglang-dp-size 4 --sglang-enable-dp-lm-head
   --sglang-disable-radix-cache
   --sglang-moe-a2a-backend deepep --sglang-deepep-mode auto
   --sglang-cuda-graph-bs 1 2 4 8 {16..256..8}
)

recipe_run train.py
