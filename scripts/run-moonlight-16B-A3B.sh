#!/usr/bin/env bash
# GRPO on Moonlight-16B-A3B, dapo-math-17k and AIME 2024, on one machine with 8 GPUs.
#
#    bash scripts/run-moonlight-16B-A3B.sh [--tiny] [more flags of train.py]
#
# docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and --tiny.
# Proven: checked against published configs (moonlight.json).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model moonlight moonlight "$@"

PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/Moonlight-16B-A3B-Instruct"
   --ref-load "$BASE/Moonlight-16B-A3B-Instruct_torch_dist"
   --load "$BASE/Moonlight-16B-A3B-Instruct_slimrl/"
   --save "$BASE/Moonlight-16B-A3B-Instruct_slimrl/"
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data "$BASE/dapo-math-17k/dapo-math-17k.jsonl"
   --input-key prompt --label-key label --apply-chat-template
   --rollout-shuffle
   --rm-type math
   --num-rollout 3000
   --rollout-batch-size 128
   --n-samples-per-prompt 8
   --rollout-max-response-len 4096
   --rollout-temperature 0.8
   # Dynamic sampling: groups with all answers right or all wrong give no signal; they are dropped and replaced.
   --over-sampling-batch-size 256
   --dynamic-sampling-filter-path slimrl.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --num-steps-per-rollout 4
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime "$BASE/aime-2024/aime-2024.jsonl"
   --n-samples-per-eval-prompt 8
   --eval-max-response-len 4096
   --eval-top-p 0.7
)

PERF_ARGS=(
   --bf16
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 8 --expert-tensor-parallel-size 1
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --use-dynamic-batch-size --max-tokens-per-gpu 8192
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
   --sglang-cuda-graph-bs 1 2 4 8 {16..256..8}
   # Its config and tokenizer are custom code in the downloaded folder.
   --sglang-trust-remote-code
)

recipe_run train.py
