# shellcheck shell=bash source-path=SCRIPTDIR
# The language model of Qwen3.5-35B-A3B under its name in recipes with images; to be sourced.
source "$(dirname -- "${BASH_SOURCE[0]}")/qwen3.5-35B-A3B.sh"
