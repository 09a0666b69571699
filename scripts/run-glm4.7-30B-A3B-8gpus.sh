#!/usr/bin/env bash
# GRPO on GLM-4.7-Flash (30B-A3B), dapo-math-17k and AIME 2024, on one machine with 8 GPUs.
#
#    bash scripts/run-glm4.7-30B-A3B-8gpus.sh [--tiny] [more flags of train.py]
#
# docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and --tiny.
# Proven: checked against published configs (glm4.7-30B-A3B.json).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model glm4.7-30B-A3B glm4_moe_lite "$@"

PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/GLM-4.7-Flash"
   --ref-load "$BASE/GLM-4.7-Flash_torch_dist"
   --load "$BASE/GLM-4.7-Flash_slimrl/"
   --save "$BASE/GLM-4.7-Flash_slimrl/"
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data "$BASE/dapo-math-17k/dapo-math-17k.jsonl"
   --input-key prompt --label-key label --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 128
   --n-samples-per-prompt 8
   --rollout-max-response-len 32768
   --rollout-temperature 1.0
   --global-batch-size 1024
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime "$BASE/aime-2024/aime-2024.jsonl"
   --n-samples-per-eval-prompt 2
   --eval-max-response-len 32768
   --eval-temperature 1.0
   --eval-top-p 0.95
)

PERF_ARGS=(
   --bf16
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 2
   --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --use-dynamic-batch-size --max-tokens-per-gpu 16384
)

GRPO_ARGS=(
   --advantage-estimator grpo
   # With coefficient 0 the KL is only logged.
   --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
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
   --sglang-mem-fraction-static 0.7
   --sglang-enable-dp-attention --sglang-dp-size 8 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head
   --sglang-cuda-graph-max-bs 64
   --sglang-max-running-requests 512
   # Speculative decoding with the model's own MTP layer, which is not trained.
   --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3
   --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 4
)

recipe_run train.py
