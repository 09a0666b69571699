#!/usr/bin/env bash
# GRPO on Kimi-K2-Instruct, dapo-math-17k and AIME 2024, on 32 machines with 8 GPUs each.
#
#    bash scripts/run-kimi-k2-Instruct.sh [--tiny] [more flags of train.py]
#
# Run it on each of the 32 nodes with WORLD_SIZE=32, RANK, MASTER_ADDR and a token set (see scripts/lib/ray.sh).
# docs/recipes.md lists the downloads; scripts/lib/recipe.sh explains the common settings and --tiny.
# Proven: checked against published configs (kimi-k2.json).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"
recipe_model kimi-k2 kimi_k2 "$@"

PLACEMENT_ARGS=(
   --actor-num-nodes 32
   --actor-num-gpus-per-node 8
   --colocate
   --update-weight-buffer-size $((2 * 1024 ** 3))
)

CKPT_ARGS=(
   --hf-checkpoint "$BASE/Kimi-K2-Instruct"
   --ref-load "$BASE/Kimi-K2_torch_dist"
   --load "$BASE/Kimi-K2_slimrl/"
   --save "$BASE/Kimi-K2_slimrl/"
   --save-interval 20
)

ROLLOUT_ARGS=(
   --prompt-data "$BASE/dapo-math-17k/dapo-math-17k.jsonl"
   --input-key prompt --label-key label --apply-chat-template
   --rollout-shuffle
   --rm-type math
   --num-rollout 100
   --rollout-batch-size 128
   --n-samples-per-prompt 8
   --rollout-max-response-len 32768
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
   --eval-max-response-len 32768
   --eval-top-p 0.7
)

PERF_ARGS=(
   --bf16
   --tensor-model-parallel-size 8 --sequence-parallel
   --pipeline-model-parallel-size 8
   --context-parallel-size 4
   --expert-model-parallel-size 32 --expert-tensor-parallel-size 1
   --decoder-last-pipeline-num-layers 5
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --use-dynamic-batch-size --max-tokens-per-gpu 16384
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
   --rollout-num-gpus-per-engine 16
   --sglang-mem-fraction-static 0.7
   --sglang-ep-size 16
   --sglang-enable-dp-attention --sglang-dp-size 8 --sglang-moe-dense-tp-size 1 --sglang-enable-dp-lm-head
   --sglang-disable-radix-cache
   # 128 concurrent requests for each of the 8 attention groups (DP attention).
   --sglang-server-concurrency 1024
   # Its config and tokenizer are custom code in the downloaded folder.
   --sglang-trust-remote-code
)

recipe_run train.py
