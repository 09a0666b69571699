#!/usr/bin/env bash
# GRPO on GLM-5, dapo-math-17k, on 32 machines with 8 GPUs each.
#
#    bash scripts/run-glm5-744B-A40B.sh [--tiny] [more flags of train.py]
#
# Run it on each of the 32 nodes with WORLD_SIZE=32, RANK, MASTER_ADDR and a token set (see scripts/lib/ray.sh).
# slimrl does not support this model yet; see scripts/models/glm5-744B-A40B.sh.
# docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and --tiny.
# Proven: not run (unsupported: no weight mapping for sparse attention).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model glm5-744B-A40B none "$@"

PLACEMENT_ARGS=(
   --actor-num-nodes 32
   --actor-num-gpus-per-node 8
   --colocate
   --update-weight-buffer-size $((2 * 1024 ** 3))
)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/GLM-5"
   --ref-load "$BASE/GLM-5_torch_dist"
   --load "$BASE/GLM-5_slimrl/"
   --save "$BASE/GLM-5_slimrl/"
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
)

PERF_ARGS=(
   --bf16
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 4
   --context-parallel-size 2
   --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
   --decoder-last-pipeline-num-layers 18
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --use-dynamic-batch-size --max-tokens-per-gpu 16384
   --allgather-cp
   --data-pad-size-multiplier 4096
   --log-probs-chunk-size 1024
   # Token dispatch between experts by DeepEP.
   --moe-enable-deepep --moe-token-dispatcher-type flex
)

GRPO_ARGS=(
   --advantage-estimator grpo
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
   --rollout-num-gpus-per-engine 64
   --sglang-mem-fraction-static 0.7
   --sglang-ep-size 64
   --sglang-enable-dp-attention --sglang-dp-size 64 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head
   --sglang-max-running-requests 512
   # Speculative decoding with the model's own MTP layer, which is not trained.
   --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3
   --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 4
)

recipe_run train.py
