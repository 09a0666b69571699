# shellcheck shell=bash disable=SC2034 source-path=SCRIPTDIR
# The common part of the recipes (scripts/run-*.sh): the model, the paths, and the run, on GPUs or as a toy on a CPU.
#
#    source scripts/lib/recipe.sh
#    recipe_model qwen3-30B-A3B qwen3_moe "$@"      # MODEL_ARGS of the model; its family; the recipe's own arguments
#    PLACEMENT_ARGS=(...) CKPT_ARGS=(...) ROLLOUT_ARGS=(...) EVAL_ARGS=(...) PERF_ARGS=(...)
#    GRPO_ARGS=(...) OPTIMIZER_ARGS=(...) SGLANG_ARGS=(...)
#    recipe_run train.py
#
# Recipes read models and data from, and write checkpoints to, BASE (default /root). Arguments of a recipe go to
# train.py after its arrays and override them; they are checked before anything is created or started. With `--tiny` as
# the first argument the recipe runs on this machine's CPU: it creates a toy of the model's family, which learns
# addition for two rollouts with the recipe's model flags (other sizes), algorithm and optimizer. With `--dry-run` it
# prints the plan and starts nothing. The newest ten rollouts are recorded in the folder of the run.

LIB_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
source "$LIB_DIR/say.sh"
source "$LIB_DIR/flags.sh"
source "$LIB_DIR/ray.sh"

GPUS_PER_NODE=8
BASE=${BASE:-/root}
MISC_ARGS=(
   --attention-dropout 0.0
   --hidden-dropout 0.0
   --accumulate-allreduce-grads-in-fp32
   --attention-softmax-in-fp32
   --use-tensorboard
   --save-debug-rollout-data "{run_dir}/rollouts/{rollout_id}.jsonl"
   --save-debug-rollout-limit 10
)
PLACEMENT_ARGS=()
CKPT_ARGS=()
ROLLOUT_ARGS=()
EVAL_ARGS=()
PERF_ARGS=()
GRPO_ARGS=()
OPTIMIZER_ARGS=()
SGLANG_ARGS=()

# recipe_model MODEL FAMILY [ARGUMENT...]: sources the model's flags, and handles the arguments --help and --tiny.
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
   local caller=$PWD
   cd -- "$LIB_DIR/../.." || exit
   # Custom functions may be in the folder that the recipe was started from.
   if [[ $caller != "$PWD" ]]; then export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$caller; fi
}

# recipe_run ENTRY: runs ENTRY as a Ray job with the recipe's arrays.
recipe_run() {
   local entry=$1 num_gpus=$GPUS_PER_NODE later='' prefix=()
   if [[ $TINY == yes && $FAMILY == none ]]; then
      fail 2 "--tiny: $RECIPE is for a model that this version does not support, so it has no toy"
   fi
   recipe_environment
   if [[ $TINY == yes ]]; then
      # On this machine only, even inside a job of several pods.
      unset RAY_ADDRESS WORLD_SIZE RANK
      recipe_tiny
      later=$RUN_DIR
      num_gpus=$TINY_GPUS
      prefix=(env "CUDA_VISIBLE_DEVICES=")
   elif [[ -n ${RAY_ADDRESS:-} || ${RANK:-0} != 0 ]]; then
      later=/ # paths are on the machine that the job runs on
   fi
   local flags=(
      "${PLACEMENT_ARGS[@]}"
      "${MODEL_ARGS[@]}"
      "${CKPT_ARGS[@]}"
      "${ROLLOUT_ARGS[@]}"
      "${EVAL_ARGS[@]}"
      "${PERF_ARGS[@]}"
      "${GRPO_ARGS[@]}"
      "${OPTIMIZER_ARGS[@]}"
      "${SGLANG_ARGS[@]}"
      "${MISC_ARGS[@]}"
      "${EXTRA_ARGS[@]}"
   )
   flags_check python3 "$entry" "$later" "${flags[@]}"
   if [[ $TINY == yes ]]; then recipe_make_toy; fi
   if flags_have --dry-run "${EXTRA_ARGS[@]}"; then flags_plan "$entry" "${flags[@]}"; fi
   ray_begin --num-gpus "$num_gpus" ${TINY:+--object-store-memory 200000000}
   ray_job "${prefix[@]}" python3 "$entry" "${flags[@]}" ||
      fail $? "the training job failed; see its output above"
}

# fail, unless the python3 of the PATH has Ray; prints a note if its slimrl is not that of this checkout.
recipe_environment() {
   local found look='
import importlib.util as look
print("ray" if look.find_spec("ray") else "", getattr(look.find_spec("slimrl"), "origin", None) or "", sep="|")'
   found=$(cd / && python3 -c "$look" 2>/dev/null) || found='|'
   if [[ $found != ray\|* ]]; then
      fail 1 "$(command -v python3 || echo python3) has no Ray: run bash scripts/setup.sh once to create the" \
         "environment (with GPUs see docs/install.md), then source .venv/bin/activate in each terminal"
   fi
   found=${found#ray|}
   if [[ -n $found && $found != "$(pwd -P)/slimrl/__init__.py" ]]; then
      say "the environment has the slimrl of another checkout, ${found%/slimrl/__init__.py}; this run uses that of" \
         "$PWD (bash scripts/setup.sh installs it)"
      export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
   fi
}

# Replaces the model by a toy of its family, and the recipe's rollouts by two short ones. Sets RUN_DIR, the folder that
# recipe_make_toy creates later.
recipe_tiny() {
   local name changes=''
   if flags_have --update-weight-local-checkpoint-dir "${SGLANG_ARGS[@]}"; then changes=yes; fi
   # One thread per process: there are more processes than cores.
   export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
   name=$(free_name runs "$RECIPE-tiny")
   RUN_DIR=$PWD/runs/$name
   TOY=$RUN_DIR/toy
   REFERENCE=$RUN_DIR/torch_dist
   if flags_have --dry-run "${EXTRA_ARGS[@]}"; then
      # A plan needs the model's files, but no trained weights and no Megatron checkpoint.
      RUN_DIR=$(mktemp -d)
      TOY=$RUN_DIR/toy
      REFERENCE=$TOY/model
      trap 'rm -rf -- "$RUN_DIR"' EXIT
   fi
   TINY_GPUS=4
   UNTIED=()
   if flags_have --untie-embeddings-and-output-weights "${MODEL_ARGS[@]}"; then UNTIED=(--untie); fi
   # shellcheck source=/dev/null
   source "$LIB_DIR/tiny/$FAMILY.sh"
   case " ${PLACEMENT_ARGS[*]} " in
      *' --colocate '*) PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 2 --colocate) ;;
      *' --rollout-num-gpus '*) PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 2) ;;
      *) PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 2) ;;
   esac
   CKPT_ARGS=(
      --hf-checkpoint "$TOY/model"
      --ref-load "$REFERENCE"
      --load "$PWD/runs/$name/checkpoints"
      --save "$PWD/runs/$name/checkpoints"
      --save-interval 2
   )
   if [[ " ${ROLLOUT_ARGS[*]} " == *' --loss-type sft_loss '* ]]; then
      ROLLOUT_ARGS+=(--prompt-data "$TOY/messages.jsonl" --num-epoch 1 --rollout-batch-size 400 --global-batch-size 400)
   elif [[ " ${ROLLOUT_ARGS[*]} " == *' --preference-loss kto '* ]]; then
      # Long enough to learn, with a learning rate for so small a model.
      ROLLOUT_ARGS+=(--prompt-data "$TOY/labelled.jsonl" --num-rollout 24)
      EVAL_ARGS=(--eval-interval 12 --eval-prompt-data held-out "$TOY/eval-labelled.jsonl")
      OPTIMIZER_ARGS+=(--lr 1e-3 --lr-decay-style constant --lr-warmup-fraction 0)
   elif [[ " ${ROLLOUT_ARGS[*]} " =~ ' --loss-type '(preference|reward_model)_loss' ' ]]; then
      ROLLOUT_ARGS+=(--prompt-data "$TOY/pairs.jsonl" --num-rollout 4)
      EVAL_ARGS=(--eval-interval 2 --eval-prompt-data held-out "$TOY/eval-pairs.jsonl")
   else
      local sees='' grouped='' roles=''
      if flags_have --multimodal-keys "${ROLLOUT_ARGS[@]}"; then sees=yes; fi
      if flags_have --sglang-config "${SGLANG_ARGS[@]}"; then grouped=yes; fi
      if flags_have --prefill-num-servers "${SGLANG_ARGS[@]}"; then roles=yes; fi
      recipe_tiny_rollouts "$TOY"
      if [[ $roles == yes ]]; then SGLANG_ARGS+=(--prefill-num-servers 1); fi
      if [[ $grouped == yes ]]; then
         PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 4)
         SGLANG_ARGS+=(--sglang-config "$LIB_DIR/tiny/judge.yaml")
         TINY_GPUS=5
      fi
      if [[ $sees == yes ]]; then recipe_tiny_pictures "$TOY"; fi
   fi
   if [[ " ${GRPO_ARGS[*]} " == *' --num-critic-only-steps '* ]]; then
      GRPO_ARGS+=(--num-critic-only-steps 1) # of the two rollouts
   fi
   if [[ " ${GRPO_ARGS[*]} " == *' --use-opd '* ]]; then
      PLACEMENT_ARGS=(--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus 1)
      GRPO_ARGS+=(--rm-model "$TOY/teacher/model" --rm-num-gpus 1 --rm-num-gpus-per-engine 1)
   fi
   PERF_ARGS=(--use-dynamic-batch-size --max-tokens-per-gpu 2048)
   if [[ $changes == yes ]]; then
      # In bf16: a step changes every weight of a float32 model.
      PERF_ARGS+=(--bf16)
      SGLANG_ARGS+=(
         --sglang-dtype bfloat16
         --update-weight-mode delta
         --update-weight-transport disk
         --update-weight-disk-dir "$PWD/runs/$name/updates"
         --update-weight-local-checkpoint-dir "$PWD/runs/$name/engine"
      )
   fi
   if [[ " ${MODEL_ARGS[*]} " == *' --num-experts '* ]]; then PERF_ARGS+=(--expert-model-parallel-size 2); fi
   recipe_tiny_optimizer
   MISC_ARGS+=(--run-name "$name")
}

# Creates the files that recipe_tiny refers to: the toy and, except for a plan, its weights in Megatron's format.
recipe_make_toy() {
   local options=(--family "$FAMILY" --output-dir "$TOY" "${UNTIED[@]}")
   # A column of videos for the prompts of a recipe with images: the toy then counts over the frames of films.
   if [[ " ${EXTRA_ARGS[*]} " == *'"video"'* ]]; then options+=(--videos); fi
   if [[ " ${MISC_ARGS[*]} " == *' examples.look_again.generate '* ]]; then options+=(--turns 3); fi
   if [[ $REFERENCE == "$TOY"/* ]]; then
      say "creating a toy of the family $FAMILY for the plan"
      python3 tools/make_tiny_model.py "${options[@]}" --warm-start-steps 0 >/dev/null
   else
      mkdir -p runs
      mkdir -- "$RUN_DIR" 2>/dev/null || fail 1 "another script has just created $RUN_DIR; run the same command again"
      say "creating a toy of the family $FAMILY in ${RUN_DIR#"$PWD"/}"
      python3 tools/make_tiny_model.py "${options[@]}" --warm-start-steps 300
      say "converting Hugging Face -> torch_dist"
      python3 tools/convert_hf_to_torch_dist.py "${MODEL_ARGS[@]}" --hf-checkpoint "$TOY/model" --save "$REFERENCE"
   fi
   if [[ " ${GRPO_ARGS[*]} " == *' --use-opd '* ]]; then
      say "creating a toy with another seed and the same tokenizer as the teacher"
      options+=(--output-dir "$TOY/teacher" --seed 1)
      if [[ $REFERENCE == "$TOY"/* ]]; then options+=(--warm-start-steps 0); else options+=(--warm-start-steps 300); fi
      python3 tools/make_tiny_model.py "${options[@]}" >/dev/null
   fi
   if [[ " ${ROLLOUT_ARGS[*]} " == *' --loss-type sft_loss '* ]]; then
      recipe_conversations <"$TOY/train.jsonl" >"$TOY/messages.jsonl"
   elif [[ " ${ROLLOUT_ARGS[*]} " == *' --preference-loss kto '* ]]; then
      recipe_labelled <"$TOY/train.jsonl" >"$TOY/labelled.jsonl"
      recipe_labelled <"$TOY/eval.jsonl" >"$TOY/eval-labelled.jsonl"
   elif [[ " ${ROLLOUT_ARGS[*]} " =~ ' --loss-type '(preference|reward_model)_loss' ' ]]; then
      recipe_pairs <"$TOY/train.jsonl" >"$TOY/pairs.jsonl"
      recipe_pairs <"$TOY/eval.jsonl" >"$TOY/eval-pairs.jsonl"
   fi
}

# Removes the optimizer offload flags: the toy's weights are float32, so there are no master copies to offload.
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

# Rollouts on the pictures of the toy in folder $1: long enough to learn, with a learning rate for so small a model.
recipe_tiny_pictures() {
   ROLLOUT_ARGS+=(
      --multimodal-keys '{"image": "images"}'
      --num-rollout 20
      --rollout-batch-size 32
   )
   EVAL_ARGS=(--eval-interval 10 --eval-prompt-data squares "$1/eval.jsonl" --eval-temperature 0)
   # Turns of the environment, with their images, are part of the response: 58 tokens in all.
   if flags_have --custom-generate-function-path "${MISC_ARGS[@]}"; then
      ROLLOUT_ARGS+=(--rollout-max-response-len 80)
   fi
   OPTIMIZER_ARGS+=(--lr 1e-3 --lr-decay-style constant --lr-warmup-fraction 0)
   CKPT_ARGS+=(--save-interval 20)
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
   # Its config class is not in transformers; it is code in the model's folder.
   if [[ $FAMILY == mimo ]]; then SGLANG_ARGS+=(--sglang-trust-remote-code); fi
   MISC_ARGS+=(--check-weight-update-equal)
}

# Converts problems to pairs of the solution and a wrong answer, for preference training.
recipe_pairs() {
   python3 -c '
import json, sys
for row in map(json.loads, sys.stdin):
    answers = {"chosen": row["label"], "rejected": str(int(row["label"]) + 1)}
    print(json.dumps({"prompt": row["prompt"], **{side: f"\\boxed{{{text}}}" for side, text in answers.items()}}))
'
}

# Converts problems to answers with a label for KTO: desirable is the solution in a box, undesirable a bare number.
recipe_labelled() {
   python3 -c '
import json, sys
for number, row in enumerate(map(json.loads, sys.stdin)):
    right, text = number % 2 == 0, row["label"]
    answer = f"\\boxed{{{text}}}" if right else str(int(text) + 1)
    print(json.dumps({"prompt": row["prompt"], "completion": answer, "label": right}))
'
}

# Converts problems to conversations with the solution, for supervised training.
recipe_conversations() {
   python3 -c '
import json, sys
for row in map(json.loads, sys.stdin):
    answer = {"role": "assistant", "content": "\\boxed{" + row["label"] + "}"}
    print(json.dumps({"messages": [*row["prompt"], answer]}))'
}
