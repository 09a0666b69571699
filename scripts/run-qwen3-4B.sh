#!/usr/bin/env bash
# GRPO on Qwen3-4B, dapo-math-17k and AIME 2024, on one machine with 8 GPUs.
#
#    bash scripts/run-qwen3-4B.sh            # training and generation take turns on all 8 GPUs
#    bash scripts/run-qwen3-4B.sh --split    # 2 GPUs train, 6 generate
#    bash scripts/run-qwen3-4B.sh --async    # the same, generating the next rollout while this one is trained on
#    bash scripts/run-qwen3-4B.sh --tiny     # a toy of its family on this machine's CPU (also --split/--async --tiny)
#
# Models and data are looked for, and checkpoints written, under BASE (default /root); docs/quickstart.md says how to
# fetch them. Further arguments go to train.py and win over those below. Where RAY_ADDRESS is set, the job is submitted
# to the cluster there; otherwise a Ray head is started for it and ended with it.
# Proven: checked against published configs (qwen3-4B.json).
# shellcheck source-path=SCRIPTDIR disable=SC2034
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/recipe.sh"

ENTRY=train.py
PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate)
# Each side leaves the memory while the other works; what is not the engines' is for their graphs and for NCCL.
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
   # What SGLang loads first, and the tokenizer.
   --hf-checkpoint "$BASE/Qwen3-4B"
   # The reference model, in Megatron's format.
   --ref-load "$BASE/Qwen3-4B_torch_dist"
   # Resumed from; while it is empty, training starts from --ref-load.
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
   # 32 prompts x 8 responses = 256 samples per rollout, trained on in one step.
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
   # A longer sample makes a micro-batch of its own; none is ever cut.
   --use-dynamic-batch-size --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
   --advantage-estimator grpo
   # With coefficient 0 the KL is only watched.
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
