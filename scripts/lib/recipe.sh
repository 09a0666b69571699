# shellcheck shell=bash disable=SC2034 source-path=SCRIPTDIR
# What the recipes (scripts/run-*.sh) share: the model, where things lie, and the run itself, on GPUs or tiny on a CPU.
#
#    source scripts/lib/recipe.sh
#    recipe_model qwen3-30B-A3B qwen3_moe "$@"      # MODEL_ARGS of the model; its family; the recipe's own arguments
#    PLACEMENT_ARGS=(...) CKPT_ARGS=(...) ROLLOUT_ARGS=(...) EVAL_ARGS=(...) PERF_ARGS=(...)
#    GRPO_ARGS=(...) OPTIMIZER_ARGS=(...) SGLANG_ARGS=(...)
#    recipe_run train.py
#
# Models and data are looked for, and checkpoints written, under BASE (default /root). Arguments of a recipe go to
# train.py behind its arrays and win over them. `--tiny` as the first one runs the recipe on this machine's CPU: a toy
# of the model's family, made on the spot, learns additions for two rollouts with the recipe's model flags (other
# sizes), algorithm and optimizer.

LIB_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$LIB_DIR/say.sh"
source "$LIB_DIR/ray.sh"

GPUS_PER_NODE=8
BASE=${BASE:-/root}
MISC_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --use-tensorboard
)
PLACEMENT_ARGS=()
CKPT_ARGS=()
ROLLOUT_ARGS=()
EVAL_ARGS=()
PERF_ARGS=()
GRPO_ARGS=()
OPTIMIZER_ARGS=()
SGLANG_ARGS=()

# recipe_model MODEL FAMILY [ARGUMENT...]: sources the model's flags, and takes --help and --tiny from the arguments.
recipe_model() {
   RECIPE=$(basename -- "$0" .sh) FAMILY=$2 TINY=''
   # shellcheck source=/dev/null
   source "$LIB_DIR/../models/$1.sh"
   shift 2
   case ${1:-} in
      -h | --help) sed -n '2,/^# shellcheck/{/^# shellcheck/!s/^# \{0,1\}//p}' "$0" && exit ;;
      --tiny) TINY=yes && shift ;;
   esac
   EXTRA_ARGS=("$@")
   cd -- "$LIB_DIR/../.." || exit
}

# recipe_run ENTRY: runs ENTRY as a Ray job with the recipe's arrays.
recipe_run() {
   local entry=$1 slots=$GPUS_PER_NODE prefix=()
   if [[ $TINY == yes ]]; then
      # On this machine alone, also where a job of several pods runs it.
      unset RAY_ADDRESS WORLD_SIZE RANK
      recipe_tiny
      slots=4
      prefix=(env "CUDA_VISIBLE_DEVICES=")
   fi
   ray_begin --num-gpus "$slots" ${TINY:+--object-store-memory 200000000}
   ray_job "${prefix[@]}" python3 "$entry" \
      "${PLACEMENT_ARGS[@]}" \
      "${MODEL_ARGS[@]}" \
      "${CKPT_ARGS[@]}" \
      "${ROLLOUT_ARGS[@]}" \
      "${EVAL_ARGS[@]}" \
      "${PERF_ARGS[@]}" \
      "${GRPO_ARGS[@]}" \
      "${OPTIMIZER_ARGS[@]}" \
      "${SGLANG_ARGS[@]}" \
      "${MISC_ARGS[@]}" \
      "${EXTRA_ARGS[@]}"
}

# Puts a toy of the family in place of the model, and two short rollouts in place of the recipe's.
recipe_tiny() {
   local run="$PWD/runs/$RECIPE-tiny" toy options=()
   [[ $FAMILY != none ]] || fail 2 "--tiny: $RECIPE is for a model that this version refuses, so there is no toy of it"
   toy=$run/toy
   # One thread per process: there are more processes than cores.
   export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
   rm -rf -- "$run"
   mkdir -p "$run"
   if [[ " ${MODEL_ARGS[*]} " == *' --untie-embeddings-and-output-weights '* ]]; then options+=(--untie); fi
   say "making a toy of the family $FAMILY in ${run#"$PWD"/}"
   python3 tools/make_tiny_model.py --family "$FAMILY" --output-dir "$toy" --warm-start-steps 300 "${options[@]}"
   # shellcheck source=/dev/null
   source "$toy/size_args.sh"
   say "converting Hugging Face -> torch_dist"
   python3 tools/convert_hf_to_torch_dist.py "${MODEL_ARGS[@]}" --hf-checkpoint "$toy/model" --save "$run/torch_dist"
   case " ${PLACEMENT_ARGS[*]} " in
      *' --colocate '*) PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 2 --colocate) ;;
      *' --rollout-num-gpus '*) PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 2) ;;
      *) PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 2) ;;
   esac
   CKPT_ARGS=(
      --hf-checkpoint "$toy/model"
      --ref-load "$run/torch_dist"
      --load "$run/checkpoints"
      --save "$run/checkpoints"
      --save-interval 2
   )
   if [[ " ${ROLLOUT_ARGS[*]} " == *' --loss-type sft_loss '* ]]; then
      recipe_conversations <"$toy/train.jsonl" >"$toy/messages.jsonl"
      ROLLOUT_ARGS+=(--prompt-data "$toy/messages.jsonl" --num-epoch 1 --rollout-batch-size 400 --global-batch-size 400)
   else
      recipe_tiny_rollouts "$toy"
   fi
   PERF_ARGS=(--use-dynamic-batch-size --max-tokens-per-gpu 2048)
   if [[ " ${MODEL_ARGS[*]} " == *' --num-experts '* ]]; then PERF_ARGS+=(--expert-model-parallel-size 2); fi
   recipe_tiny_optimizer
   MISC_ARGS+=(--run-name "$RECIPE-tiny")
}

# The toy's weights are float32, of which an optimizer in host memory has no copies to keep: it stays beside them.
recipe_tiny_optimizer() {
   local word kept=()
   for word in "${OPTIMIZER_ARGS[@]}"; do
      case $word in
         --optimizer-cpu-offload | --overlap-cpu-optimizer-d2h-h2d | --use-precision-aware-optimizer) ;;
         *) kept+=("$word") ;;
      esac
   done
   OPTIMIZER_ARGS=("${kept[@]}")
}

# Two short rollouts on the problems of the toy in folder $1.
recipe_tiny_rollouts() {
   ROLLOUT_ARGS=(
      --prompt-data "$1/train.jsonl"
      --input-key prompt
      --label-key label
      --apply-chat-template
      --rollout-shuffle
      --rm-type math
      --num-rollout 2
      --rollout-batch-size 8
      --n-samples-per-prompt 8
      --num-steps-per-rollout 1
      --rollout-max-response-len 16
      --rollout-temperature 1
      --balance-data
   )
   EVAL_ARGS=(--eval-interval 2 --eval-prompt-data addition "$1/eval.jsonl" --eval-temperature 0)
   SGLANG_ARGS=(--rollout-num-gpus-per-engine 1)
   # A config class outside transformers comes with the model, as code.
   if grep -q auto_map "$1/model/config.json"; then SGLANG_ARGS+=(--sglang-trust-remote-code); fi
   MISC_ARGS+=(--check-weight-update-equal)
}

# From problems to conversations in which they are solved, for supervised training.
recipe_conversations() {
   python3 -c '
import json, sys
for row in map(json.loads, sys.stdin):
    answer = {"role": "assistant", "content": "\\boxed{" + row["label"] + "}"}
    print(json.dumps({"messages": [*row["prompt"], answer]}))'
}
