#!/usr/bin/env bash
# GRPO on Qwen2.5-VL-3B-Instruct and geo3k over several turns with images, on one machine with 8 GPUs.
#
#    bash scripts/run-qwen2.5-VL-3B-geo3k-multi-turn.sh [--tiny] [more flags of train.py]
#
# After each of the first two answers the environment shows the model a half of its picture, enlarged, and asks again
# (examples/look_again.py); the reward is 1 if all three answers are right. The toy of --tiny counts the squares of
# pictures in this way; the share of pictures with three right answers rises from below a half to 0.9 in 20 rollouts.
# docs/vision.md has the calls.
# docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and --tiny.
# Proven: gated in CI on CPU (tests/scripts/test_recipes.py).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model qwen2.5-VL-3B qwen2_5_vl "$@"

PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/Qwen2.5-VL-3B-Instruct"
   --ref-load "$BASE/Qwen2.5-VL-3B-Instruct_torch_dist"
   --load "$BASE/Qwen2.5-VL-3B_turns_slimrl"
   --save "$BASE/Qwen2.5-VL-3B_turns_slimrl"
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
   --tensor-model-parallel-size 1
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
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
)

MISC_ARGS+=(
   --custom-generate-function-path examples.look_again.generate
   --custom-rm-path examples.look_again.all_answers_are_right
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   --sglang-mem-fraction-static 0.6
)

recipe_run train.py
