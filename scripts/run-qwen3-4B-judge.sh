#!/usr/bin/env bash
# GRPO of Qwen3-4B on dapo-math-17k, with a frozen judge for answers that the rule does not accept, on one machine with 8
# GPUs: 2 train, 4 generate in two groups of engines (two servers on one GPU each, one on two), 2 serve the judge.
#
#    bash scripts/run-qwen3-4B-judge.sh [--tiny] [more flags of train.py]
#
# docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and --tiny;
# docs/engine-groups.md explains scripts/lib/groups/qwen3-4B-judge.yaml. The judge is Qwen3-4B as it is at the start, so
# there is no further download.
# Proven: gated in CI on CPU (tests/scripts/test_recipes.py).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model qwen3-4B qwen3 "$@"

PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 6)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/Qwen3-4B"
   --ref-load "$BASE/Qwen3-4B_torch_dist"
   --load "$BASE/Qwen3-4B_judge/"
   --save "$BASE/Qwen3-4B_judge/"
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data "$BASE/dapo-math-17k/dapo-math-17k.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --num-rollout 300
   --rm-type math
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --num-steps-per-rollout 1
   --rollout-max-response-len 8192
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
   --use-kl-loss --kl-loss-coef 0.00 --kl-loss-type low_var_kl
   --eps-clip 0.2 --eps-clip-high 0.28
   # Asks the judge, after the rule of --rm-type.
   --custom-rm-path examples.frozen_judge.reward
)

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-6 --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9 --adam-beta2 0.98
   --use-distributed-optimizer
)

SGLANG_ARGS=(--sglang-config "$PWD/scripts/lib/groups/qwen3-4B-judge.yaml" --use-fault-tolerance)

recipe_run train.py
