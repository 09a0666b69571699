#!/usr/bin/env bash
# Makes or re-uses the environment, then runs the test suite; arguments go to pytest.
#
#    bash scripts/test.sh                 # everything
#    bash scripts/test.sh -m 'not slow'   # without the tests that start engines or several processes
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source scripts/lib/say.sh
source scripts/lib/environment.sh

prepare_environment
# One thread per process: the tests start many on few cores, where threads of one process only wait for each other.
export OMP_NUM_THREADS=1
exec python -m pytest "$@"
