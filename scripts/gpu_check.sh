#!/usr/bin/env bash
# Checks which features of slimrl work on this machine's GPUs: prints a table, and writes gpu_check.json for a report.
#
#    bash scripts/gpu_check.sh [--minutes 20] [--output gpu_check.json] [--only NAME...] [--list] [--verbose]
#
# Uses your Python environment of slimrl and installs nothing. PYTHON is the interpreter, by default the first one with
# torch of python3 in the PATH and .venv/bin/python. docs/gpu-check.md explains every row.
set -euo pipefail
PROJECT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
source "$PROJECT/scripts/lib/say.sh"

# Whether interpreter $1 is new enough; whether it has torch.
suits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
has_torch() { "$1" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' 2>/dev/null; }

CANDIDATES=(python3 "$PROJECT/.venv/bin/python")
if [[ -n ${PYTHON:-} ]]; then CANDIDATES=("$PYTHON"); fi
FOUND=''
for candidate in "${CANDIDATES[@]}"; do
   suits "$candidate" || continue
   if has_torch "$candidate"; then
      FOUND=$candidate
      break
   fi
   FOUND=${FOUND:-$candidate}
done
if [[ -z $FOUND ]]; then
   fail 2 "needs Python 3.11 or newer, and ${CANDIDATES[0]} is $("${CANDIDATES[0]}" --version 2>/dev/null || echo missing);" \
      "activate slimrl's environment, or set its interpreter: PYTHON=/path/to/python3 bash $0"
fi
PYTHONPATH="$PROJECT${PYTHONPATH:+:$PYTHONPATH}" exec "$FOUND" -m tools.gpu_check "$@"
