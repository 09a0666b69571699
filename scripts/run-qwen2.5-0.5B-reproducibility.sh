#!/usr/bin/env bash
# GRPO on Qwen2.5-0.5B-Instruct and GSM8K, bitwise reproducible, on one machine with 8 GPUs.
#
#    bash scripts/run-qwen2.5-0.5B-reproducibility.sh [--tiny] [more flags of train.py]
#
# Its flags, and variables of NCCL, Transformer Engine and cuBLAS, fix the order of all sums.
# docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and --tiny.
# Proven: checked against published configs (qwen2.5-0.5B.json).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model qwen2.5-0.5B qwen2 "$@"

export NCCL_ALGO=Ring NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 CUBLAS_WORKSPACE_CONFIG=:4096:8

PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/Qwen2.5-0.5B-Instruct"
   --ref-load "$BASE/Qwen2.5-0.5B-Instruct_torch_dist"
)

ROLLOUT_ARGS=(
   --prompt-data "$BASE/gsm8k/train.parquet"
   --input-key messages --label-key label --apply-chat-template
   --rollout-shuffle
   --rm-type math
   --num-rollout 100
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 1024
   --rollout-temperature 1
   --global-batch-size 256
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data gsm8k "$BASE/gsm8k/test.parquet"
   --n-samples-per-eval-prompt 1
   --eval-max-response-len 1024
   --eval-top-k 1
)

PERF_ARGS=(
   --bf16
   --tensor-model-parallel-size 1
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
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
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   --sglang-mem-fraction-static 0.7
   --sglang-enable-deterministic-inference
   --sglang-disable-radix-cache
)

MISC_ARGS+=(
   --deterministic-mode
   --calculate-per-token-loss
)

recipe_run train.py
