# shellcheck shell=bash source-path=SCRIPTDIR
# Llama-3.2-3B-Instruct under its name in the recipes for AMD's GPUs: the same model; to be sourced.
# Proven: checked against published configs (llama3.2-3B-Instruct.json).
source "$(dirname -- "${BASH_SOURCE[0]}")/llama3.2-3B-Instruct.sh"
