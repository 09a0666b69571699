#!/usr/bin/env bash
# Makes the Python environment that the other scripts run in (.venv), or re-uses it. They call this themselves.
#
#    bash scripts/setup.sh                                              # Python 3.11 or 3.12 from the PATH
#    PYTHON=/opt/python3.12/bin/python3 VENV=/big/disk/venv bash scripts/setup.sh
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/lib/say.sh
source scripts/lib/environment.sh

prepare_environment
say "ready: source $VENV/bin/activate, then for example: bash scripts/quickstart.sh"
