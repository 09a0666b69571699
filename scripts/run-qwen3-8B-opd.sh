#!/usr/bin/env bash
# On-policy distillation of Qwen3-32B into Qwen3-8B on dapo-math-17k, on one machine with 8 GPUs: 4 train, 2 generate,
# 2 serve the teacher.
#
#    bash scripts/run-qwen3-8B-opd.sh [--tiny] [more flags of train.py]
#
# docs/recipes.md lists the downloads, of which the teacher needs only the Hugging Face folder; scripts/lib/recipe.sh
# explains the common settings and --tiny; docs/distillation.md explains the method.
# Proven: gated in CI on CPU (tests/scripts/test_recipes.py).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model qwen3-8B qwen3 "$@"

PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 2)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/Qwen3-8B"
   --ref-load "$BASE/Qwen3-8B_torch_dist"
   --load "$BASE/Qwen3-8B_opd/"
   --save "$BASE/Qwen3-8B_opd/"
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data "$BASE/dapo-math-17k/dapo-math-17k.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --num-rollout 300
   # The advantage is the group-normalised reward plus the teacher's term; --rm-type zero leaves the teacher alone.
   --rm-type deepscaler
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --num-steps-per-rollout 1
   --rollout-max-response-len 8192
   # A server's log-probabilities of given tokens are those at temperature 1.
   --rollout-temperature 1
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
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --use-opd --opd-type sglang --opd-kl-coef 1.0
   --rm-model "$BASE/Qwen3-32B" --rm-num-gpus 2 --rm-num-gpus-per-engine 2
   --eps-clip 0.2 --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6 --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9 --adam-beta2 0.98
   --use-distributed-optimizer
)

SGLANG_ARGS=(--rollout-num-gpus-per-engine 1)

recipe_run train.py
