#!/usr/bin/env bash
# GRPO on Qwen3-4B, dapo-math-17k and AIME 2024, on one machine with 8 GPUs.
#
#    bash scripts/run-qwen3-4B.sh            # training and generation alternate on all 8 GPUs
#    bash scripts/run-qwen3-4B.sh --split    # 2 GPUs train, 6 generate
#    bash scripts/run-qwen3-4B.sh --async    # the same, generating the next rollout during training
#    bash scripts/run-qwen3-4B.sh --tiny     # a toy model on this machine's CPU (also --split/--async --tiny)
#
# Reads models and data from, and writes checkpoints to, BASE (default /root); docs/recipes.md explains how to
# download them. Further arguments go to train.py and override those below. If RAY_ADDRESS is set, the job is submitted
# to that cluster; otherwise the script starts a Ray head and ends it with the job.
# Proven: checked against published configs (qwen3-4B.json).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"

ENTRY=train.py
PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate)
# Either side is offloaded while the other runs; the memory outside this fraction is for CUDA graphs and NCCL.
MEM_FRACTION=0.7
case ${1:-} in
   --split | --async)
      PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 6)
      MEM_FRACTION=0.8
      if [[ $1 == --async ]]; then ENTRY=train_async.py; fi
      shift
      ;;
esac
recipe_model qwen3-4B qwen3 "$@"

CKPT_ARGS=(
   # The initial weights of SGLang, and the tokenizer.
   --hf-checkpoint "$BASE/Qwen3-4B"
   # The reference model, in Megatron's format.
   --ref-load "$BASE/Qwen3-4B_torch_dist"
   # The checkpoint to resume; while it is empty, training starts from --ref-load.
   --load "$BASE/Qwen3-4B_slimrl/"
   --save "$BASE/Qwen3-4B_slimrl/"
   --save-interval 20
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
   --tensor-model-parallel-size 2 --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   # A longer sample gets its own micro-batch; samples are never truncated.
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
   --use-distributed-optimizer
)

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 2
   --sglang-mem-fraction-static "$MEM_FRACTION"
)

recipe_run "$ENTRY"
