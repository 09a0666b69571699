#!/usr/bin/env bash
# GSPO on Qwen3-Next-80B-A3B-Thinking, dapo-math-17k and AIME 2024, on 4 machines with 8 GPUs each.
#
#    bash scripts/run-qwen3-next-80B-A3B.sh [--tiny] [more flags of train.py]
#
# Run it on each of the 4 nodes with WORLD_SIZE=4, RANK, MASTER_ADDR and a token set (see scripts/lib/ray.sh).
# slimrl does not support this model yet; see scripts/models/qwen3-next-80B-A3B.sh.
# docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and --tiny.
# Proven: not run (unsupported: no weight mapping for linear attention).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model qwen3-next-80B-A3B none "$@"

PLACEMENT_ARGS=(--actor-num-nodes 4 --actor-num-gpus-per-node 8 --colocate)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/Qwen3-Next-80B-A3B-Thinking"
   --ref-load "$BASE/Qwen3-Next-80B-A3B-Thinking_torch_dist"
   --load "$BASE/Qwen3-Next-80B-A3B-Thinking_slimrl/"
   --save "$BASE/Qwen3-Next-80B-A3B-Thinking_slimrl/"
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
   --rollout-max-response-len 32768
   --rollout-temperature 1
   --global-batch-size 64
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime "$BASE/aime-2024/aime-2024.jsonl"
   --n-samples-per-eval-prompt 8
   --eval-max-response-len 32768
   --eval-top-p 1
)

PERF_ARGS=(
   --bf16
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 4
   --context-parallel-size 4
   --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   --decoder-last-pipeline-num-layers 9
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --use-dynamic-batch-size --max-tokens-per-gpu 8192
   # Token dispatch between experts by DeepEP.
   --moe-enable-deepep --moe-token-dispatcher-type flex
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
   --rollout-num-gpus-per-engine 8
   --sglang-mem-fraction-static 0.7
   --sglang-ep-size 8
   --sglang-max-running-requests 256
   # Speculative decoding with the model's own MTP layer, which is not trained.
   --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3
   --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 4
)

recipe_run train.py
