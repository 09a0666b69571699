#!/usr/bin/env bash
# GRPO or PPO end to end on this machine's CPU, with real engines, in a few minutes.
#
#    bash scripts/quickstart.sh [--seed N] [--split | --async] [--ppo | --lora] [--engine NAME] [--run-name NAME] [-- more flags of train.py]
#
# Starts Ray, meanwhile creates a tiny Qwen3 and an addition task and converts it for Megatron, submits train.py as a Ray
# job, converts the trained model back to Hugging Face and shows the result. All files are in runs/quickstart.
# Flags are checked before anything is created; with --dry-run among the flags of train.py it only prints the plan.
#   --seed N         of the model, the data and the run (default 0)
#   --split          training and generation on separate GPUs, instead of alternating on the same ones
#   --async          as --split, and the next rollout is generated during training
#   --ppo            PPO with a critic instead of GRPO
#   --lora           GRPO of LoRA adapters, which the engines load beside the model; PEFT folder by --save-hf
#   --engine NAME    sglang (default) or vllm, which needs -- --vllm-python PATH, the interpreter of its environment
#   --run-name NAME  write to runs/NAME (default quickstart); if that exists, to runs/NAME_attempt_N
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/lib/say.sh
source scripts/lib/environment.sh
source scripts/lib/flags.sh
source scripts/lib/ray.sh

SEED=0
WANTED_NAME=quickstart
PLACEMENT=colocated
ALGORITHM=grpo
ENGINE=sglang
need_value() { (($# > 1)) || fail 2 "$1 needs a value; see --help"; }
while (($#)); do
   case $1 in
      --seed) need_value "$@" && SEED=$2 && shift 2 ;;
      --run-name) need_value "$@" && WANTED_NAME=$2 && shift 2 ;;
      --split) PLACEMENT='split' && shift ;;
      --async) PLACEMENT=async && shift ;;
      --ppo) ALGORITHM=ppo && shift ;;
      --lora) ALGORITHM=lora && shift ;;
      --engine) need_value "$@" && ENGINE=$2 && shift 2 ;;
      --) shift && break ;;
      -h | --help) sed -n '2,/^set /{s/^# \{0,1\}//;/^set /!p}' "$0" && exit ;;
      *) fail 2 "unknown option $1; see --help (flags of train.py go after --)" ;;
   esac
done
[[ $SEED =~ ^[0-9]+$ ]] || fail 2 "--seed $SEED is not a whole number"
[[ $ENGINE == sglang || $ENGINE == vllm ]] || fail 2 "--engine $ENGINE is neither sglang nor vllm"
[[ $WANTED_NAME =~ ^[A-Za-z0-9][A-Za-z0-9._-]*$ ]] || fail 2 "--run-name $WANTED_NAME is not a plain folder name"

# The tiny model runs on the CPU, even if there is a GPU. One thread per process: there are more processes than cores.
export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
# On this machine only, even inside a job of several pods.
unset WORLD_SIZE RANK RAY_ADDRESS

RUN_NAME=$(free_name runs "$WANTED_NAME")
RUN=$PWD/runs/$RUN_NAME
TINY=$RUN/tiny
REFERENCE=$RUN/torch_dist
if flags_have --dry-run "$@"; then
   # A plan needs the model's files, but no trained weights and no Megatron checkpoint.
   TINY=$(mktemp -d)/tiny
   REFERENCE=$TINY/model
   trap 'rm -rf -- "${TINY%/tiny}"' EXIT
fi
source scripts/lib/tiny/model_args.sh
TINY_SIZE=()
if [[ $ENGINE == vllm ]]; then
   # vLLM's attention on a CPU needs heads of at least 32.
   TINY_SIZE=(--kv-channels 32)
   MODEL_ARGS+=("${TINY_SIZE[@]}")
fi

CKPT_ARGS=(
   --hf-checkpoint "$TINY/model"
   --ref-load "$REFERENCE"
   --load "$RUN/checkpoints"
   --save "$RUN/checkpoints"
   --save-interval 15
)

ROLLOUT_ARGS=(
   --prompt-data "$TINY/train.jsonl"
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rollout-seed "$SEED"
   --rm-type math
   --num-rollout 30
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --num-steps-per-rollout 1
   --rollout-max-response-len 16
   --rollout-temperature 1
   --balance-data
)

EVAL_ARGS=(
   --eval-interval 10
   --eval-prompt-data addition "$TINY/eval.jsonl"
   --n-samples-per-eval-prompt 1
   --eval-temperature 0
)

PERF_ARGS=(
   --tensor-model-parallel-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 2048
)

GRPO_ARGS=(
   --advantage-estimator grpo
   --use-kl-loss
   --kl-loss-coef 0
   --kl-loss-type low_var_kl
   --entropy-coef 0
   --eps-clip 0.2
   --eps-clip-high 0.28
)
if [[ $ALGORITHM == ppo ]]; then
   GRPO_ARGS+=(
      --advantage-estimator ppo
      --gamma 1
      --lambd 0.95
      --normalize-advantages
      --critic-lr 3e-3
   )
fi

OPTIMIZER_ARGS=(
   --optimizer adam
   --lr 1e-3
   --lr-decay-style constant
   --weight-decay 0.1
   --adam-beta1 0.9
   --adam-beta2 0.98
)

if [[ $ALGORITHM == lora ]]; then
   OPTIMIZER_ARGS+=(--lr 1e-2)
   CKPT_ARGS+=(--lora-rank 8 --save-hf "$RUN/adapters_{rollout_id}")
fi

SGLANG_ARGS=(
   --rollout-num-gpus-per-engine 1
   # One seed per sample and no shared prefix cache: the same flags and seed reproduce the same rewards and losses.
   --sglang-enable-deterministic-inference
   --sglang-disable-radix-cache
   --check-weight-update-equal
)
if [[ $ENGINE == vllm ]]; then
   SGLANG_ARGS=(--rollout-num-gpus-per-engine 1 --rollout-engine vllm)
   [[ $ALGORITHM == lora ]] && SGLANG_ARGS+=(--lora-merge)
fi

MISC_ARGS=(
   --seed "$SEED"
   --run-name "$RUN_NAME"
   --use-tensorboard
   --save-debug-rollout-data "{run_dir}/rollouts/{rollout_id}.jsonl"
   --save-debug-rollout-limit 10
)

# The number of Ray's GPUs; without physical GPUs they are logical.
NUM_GPUS=2
ENTRY=train.py
PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 2)
case $PLACEMENT in
   # Without GPUs host and device memory are the same: offloading would only cost time.
   colocated) PLACEMENT_ARGS+=(--colocate --no-offload-train --no-offload-rollout) ;;
   split) NUM_GPUS=4 ;;
   async) NUM_GPUS=4 && ENTRY=train_async.py ;;
esac
RUN_ARGS=(
   "${CKPT_ARGS[@]}"
   "${ROLLOUT_ARGS[@]}"
   "${EVAL_ARGS[@]}"
   "${PERF_ARGS[@]}"
   "${GRPO_ARGS[@]}"
   "${OPTIMIZER_ARGS[@]}"
   "${SGLANG_ARGS[@]}"
   "${MISC_ARGS[@]}"
   "$@"
)

PYTHON_FOR_CHECK=$(python_at_hand)
flags_check "$PYTHON_FOR_CHECK" "$ENTRY" "${TINY%/tiny}" "${PLACEMENT_ARGS[@]}" "${MODEL_ARGS[@]}" "${RUN_ARGS[@]}"
prepare_environment
if flags_have --dry-run "$@"; then
   say "creating a tiny model of the same sizes for the plan"
   python tools/make_tiny_model.py --output-dir "$TINY" --seed "$SEED" "${TINY_SIZE[@]}" --warm-start-steps 0 >/dev/null
   flags_plan "$ENTRY" "${PLACEMENT_ARGS[@]}" "${MODEL_ARGS[@]}" "${RUN_ARGS[@]}"
fi

mkdir -p runs
mkdir -- "$RUN" 2>/dev/null || fail 1 "another script has just created $RUN; run the same command again"
if [[ $RUN_NAME != "$WANTED_NAME" ]]; then
   say "runs/$WANTED_NAME exists and is kept; this run writes to runs/$RUN_NAME"
fi

say "starting Ray with $NUM_GPUS GPUs in the background"
ray_launch --num-gpus "$NUM_GPUS" --object-store-memory 200000000

say "creating a tiny model and its task"
ray_meanwhile python tools/make_tiny_model.py --output-dir "$TINY" --seed "$SEED" "${TINY_SIZE[@]}"
# shellcheck source=/dev/null
source "$TINY/model_args.sh"

say "converting Hugging Face -> torch_dist"
ray_meanwhile python tools/convert_hf_to_torch_dist.py "${MODEL_ARGS[@]}" --hf-checkpoint "$TINY/model" --save "$REFERENCE"
ray_await

say "training: $ENTRY, $PLACEMENT"
ray_job env CUDA_VISIBLE_DEVICES='' python3 "$ENTRY" "${PLACEMENT_ARGS[@]}" "${MODEL_ARGS[@]}" "${RUN_ARGS[@]}" ||
   fail $? "the training job failed; see its output above, and the logs of all processes in runs/$RUN_NAME/logs"

ITERATION=$(<"$RUN/checkpoints/latest_checkpointed_iteration.txt")
TRAINED=$RUN/hf
if [[ $ALGORITHM == lora ]]; then
   TRAINED=$RUN/adapters_$ITERATION
else
   say "converting torch_dist -> Hugging Face"
   python tools/convert_torch_dist_to_hf.py \
      --input-dir "$(printf '%s/checkpoints/iter_%07d' "$RUN" "$ITERATION")" \
      --output-dir "$TRAINED" \
      --origin-hf-dir "$TINY/model"
fi

say "done"
python -m slimrl.observability.report "$RUN/summary.json" --png "$RUN/reward.png" --model "$TRAINED"
