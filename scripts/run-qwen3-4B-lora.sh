#!/usr/bin/env bash
# GRPO of LoRA adapters of Qwen3-4B, dapo-math-17k and AIME 2024, on one machine with 8 GPUs.
#
#    bash scripts/run-qwen3-4B-lora.sh [--tiny] [more flags of train.py]
#
# The engines keep the model and load the adapters after every step (docs/lora.md). docs/recipes.md lists the downloads;
# scripts/lib/recipe.sh explains the common settings and --tiny.
# Proven: checked against published configs (qwen3-4B.json).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model qwen3-4B qwen3 "$@"

PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/Qwen3-4B"
   --ref-load "$BASE/Qwen3-4B_torch_dist"
   --load "$BASE/Qwen3-4B_lora/"
   --save "$BASE/Qwen3-4B_lora/"
   --save-interval 20
   # PEFT folders.
   --save-hf "$BASE/Qwen3-4B_lora/adapters_{rollout_id}"
)

ROLLOUT_ARGS=(
   --prompt-data "$BASE/dapo-math-17k/dapo-math-17k.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   # 32 prompts x 8 responses = 256 samples per rollout, trained in one step.
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --num-steps-per-rollout 1
   --rollout-max-response-len 8192
   --rollout-temperature 0.8
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 5
   --eval-prompt-data aime "$BASE/aime-2024/aime-2024.jsonl"
   --n-samples-per-eval-prompt 16
   --eval-max-response-len 16384
   --eval-top-p 0.7
)

PERF_ARGS=(
   --bf16
   --transformer-impl local
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   # A longer sample gets its own micro-batch; samples are never truncated.
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
   --lora-rank 32 --lora-alpha 64
   --advantage-estimator grpo
   # With coefficient 0 the KL is only logged.
   --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
   --entropy-coef 0.00
   --eps-clip 0.2 --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-5 --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9 --adam-beta2 0.98
   --use-distributed-optimizer
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static 0.7
)

recipe_run train.py
