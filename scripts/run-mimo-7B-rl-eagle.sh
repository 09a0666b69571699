#!/usr/bin/env bash
# GRPO on MiMo-7B-RL with speculative decoding, dapo-math-17k and AIME 2024, on one machine with 8 GPUs.
#
#    bash scripts/run-mimo-7B-rl-eagle.sh [--tiny] [more flags of train.py]
#
# docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and --tiny.
# Proven: checked against published configs (mimo-7B-rl.json).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model mimo-7B-rl mimo "$@"

PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/MiMo-7B-RL"
   --ref-load "$BASE/MiMo-7B-RL_torch_dist"
   --load "$BASE/MiMo-7B-RL_slimrl/"
   --save "$BASE/MiMo-7B-RL_slimrl/"
   --save-interval 200
)

ROLLOUT_ARGS=(
   --prompt-data "$BASE/dapo-math-17k/dapo-math-17k.jsonl"
   --input-key prompt --label-key label --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 3000
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 8192
   --rollout-temperature 0.8
   --global-batch-size 256
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 20
   --eval-prompt-data aime "$BASE/aime-2024/aime-2024.jsonl"
   --n-samples-per-eval-prompt 1
   --eval-max-response-len 8192
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
   # Its config and tokenizer are custom code in the downloaded folder.
   --sglang-trust-remote-code
   # Speculative decoding with the model's own MTP layer, which is not trained.
   --sglang-speculative-algorithm EAGLE --sglang-speculative-num-steps 3
   --sglang-speculative-eagle-topk 1 --sglang-speculative-num-draft-tokens 4
)

recipe_run train.py
