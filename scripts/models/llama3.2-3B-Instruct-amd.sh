# shellcheck shell=bash source-path=SCRIPTDIR
# Llama-3.2-3B-Instruct, as named in recipes for AMD GPUs: the same model; to be sourced.
# Proven: checked against published configs (llama3.2-3B-Instruct.json).
source "$(dirname -- "${BASH_SOURCE[0]}")/llama3.2-3B-Instruct.sh"
