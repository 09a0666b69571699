#!/usr/bin/env bash
# GRPO on Qwen3-VL-30B-A3B-Instruct and the geometry problems of geo3k, prompts with images, on one machine with 8 GPUs.
#
#    bash scripts/run-qwen3-VL-30B-A3B-geo3k.sh [--tiny] [more flags of train.py]
#
# The toy of --tiny counts the squares of pictures; the share of right answers rises from below a half to 0.9 in 20
# rollouts. The vision tower is trained; --freeze-params-name-list vision_model freezes it (docs/vision.md).
# docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and --tiny.
# Proven: gated in CI on CPU (tests/scripts/test_recipes.py).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model qwen3-VL-30B-A3B qwen3_vl_moe "$@"

PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/Qwen3-VL-30B-A3B-Instruct"
   --ref-load "$BASE/Qwen3-VL-30B-A3B-Instruct_torch_dist"
   --load "$BASE/Qwen3-VL-30B-A3B_slimrl"
   --save "$BASE/Qwen3-VL-30B-A3B_slimrl"
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data "$BASE/geo3k/train.jsonl"
   --input-key prompt --label-key label --apply-chat-template
   --multimodal-keys '{"image": "images"}'
   --rollout-shuffle
   --rm-type math
   --num-rollout 3000
   --rollout-batch-size 64
   --n-samples-per-prompt 8
   --rollout-max-prompt-len 2048
   --rollout-max-response-len 4096
   --rollout-temperature 0.8
   --global-batch-size 512
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data geo3k "$BASE/geo3k/test.jsonl"
   --n-samples-per-eval-prompt 1
   --eval-max-response-len 4096
)

PERF_ARGS=(
   --bf16
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   # The vision tower adds features to the first layers, so that whole layers cannot be recomputed.
   --recompute-granularity selective --recompute-modules core_attn moe
   --use-dynamic-batch-size --max-tokens-per-gpu 8192
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --kl-loss-coef 0.00 --kl-loss-type low_var_kl
   --kl-coef 0.00
   --entropy-coef 0.00
   --eps-clip 0.2 --eps-clip-high 0.28
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
   --sglang-mem-fraction-static 0.6
)

recipe_run train.py
