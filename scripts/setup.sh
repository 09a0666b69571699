#!/usr/bin/env bash
# Creates or reuses the Python environment of the other scripts (.venv). They create it themselves if needed.
#
#    bash scripts/setup.sh                                              # Python 3.11 or 3.12 from the PATH
#    PYTHON=/opt/python3.12/bin/python3 VENV=/big/disk/venv bash scripts/setup.sh
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/lib/say.sh
source scripts/lib/environment.sh

prepare_environment
say "ready: source $VENV/bin/activate, then for example: bash scripts/quickstart.sh"
