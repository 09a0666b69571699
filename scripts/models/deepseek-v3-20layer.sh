# shellcheck shell=bash source-path=SCRIPTDIR
# The first 20 layers of DeepSeek-V3 in Megatron's flags, to test its architecture on few GPUs; to be sourced.
# Proven: checked against published configs (deepseek-v3.json).
MODEL_ARGS_NUM_LAYERS=20 source "$(dirname -- "${BASH_SOURCE[0]}")/deepseek-v3.sh"
