# shellcheck shell=bash source-path=SCRIPTDIR
# The language model of Qwen3.5-35B-A3B, as named in recipes with images; to be sourced.
# Proven: not run (unsupported: no weight mapping for linear attention).
source "$(dirname -- "${BASH_SOURCE[0]}")/qwen3.5-35B-A3B.sh"
