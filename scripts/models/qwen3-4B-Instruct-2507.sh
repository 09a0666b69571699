# shellcheck shell=bash source-path=SCRIPTDIR
# Qwen3-4B-Instruct-2507 and -Thinking-2507 in Megatron's flags: Qwen3-4B with another rotary base; to be sourced.
# Proven: checked against published configs (qwen3-4B-Instruct-2507.json).
MODEL_ARGS_ROTARY_BASE=${MODEL_ARGS_ROTARY_BASE:-5000000} source "$(dirname -- "${BASH_SOURCE[0]}")/qwen3-4B.sh"
MODEL_ARGS+=(--max-position-embeddings 262144)
