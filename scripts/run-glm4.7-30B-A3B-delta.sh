#!/usr/bin/env bash
# GRPO on GLM-4.7-Flash (30B-A3B), dapo-math-17k and AIME 2024, on 4 machines with 8 GPUs each: 2 train, 2 generate. The
# engines get what changed in files (docs/weight-updates.md#changes-in-files): they may be in another cluster that shares
# the folder SHARED. LOCAL is a disk of each machine, with room for the model.
#
#    bash scripts/run-glm4.7-30B-A3B-delta.sh [--tiny] [more flags of train.py]
#
# Run it on each of the 4 nodes with WORLD_SIZE=4, RANK, MASTER_ADDR and a token set (see scripts/lib/ray.sh).
# docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and --tiny.
# Proven: gated in CI on CPU (tests/scripts/test_recipes.py).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model glm4.7-30B-A3B glm4_moe_lite "$@"

PLACEMENT_ARGS=(--actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 16)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/GLM-4.7-Flash"
   --ref-load "$BASE/GLM-4.7-Flash_torch_dist"
   --load "$BASE/GLM-4.7-Flash_delta/"
   --save "$BASE/GLM-4.7-Flash_delta/"
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
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 2
   --context-parallel-size 2
   --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   --decoder-last-pipeline-num-layers 23
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --use-dynamic-batch-size --max-tokens-per-gpu 32768
   # Token dispatch between experts by DeepEP.
   --moe-enable-deepep --moe-token-dispatcher-type flex
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
   --update-weight-mode delta
   --update-weight-transport disk
   --update-weight-disk-dir "${SHARED:-$BASE}/GLM-4.7-Flash_updates"
   --update-weight-local-checkpoint-dir "${LOCAL:-/tmp}/GLM-4.7-Flash_engine"
   --update-weight-delta-encoding xor
   --update-weight-delta-checksum xxh3-128
)

recipe_run train.py
